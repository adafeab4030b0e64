//! Order, back-pressure and load balancing: what the stream guarantees whatever the servers do.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use dflash_hidden_states::{Error, Request, StatesRequest, Stream, StreamConfig, WantedRow};
use dflash_test_support::{ChaCha8Rng, Rng, eventually, random};

use crate::fake::{
    HIDDEN, LAYERS, Notes, assert_right, config, drain, good, own_server, prompt, single_rows,
    start, status, wanted,
};

fn bytes_of(request: &Request) -> usize {
    request.input_ids.len() * LAYERS.len() * HIDDEN * 2
}

/// Up to 40 rows of up to 5 samples, some rows empty.
fn random_rows(random: &mut ChaCha8Rng) -> Vec<Vec<Request>> {
    let mut sample = 0;
    (0..random.random_range(1..=40))
        .map(|_| {
            let samples = random.random_range(0..6);
            let row = (0..samples).map(|offset| prompt(sample + offset)).collect::<Vec<_>>();
            sample += row.len() as u64;
            row
        })
        .collect()
}

/// Maximum number of concurrent requests seen by a server.
#[derive(Default)]
struct Gauge {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    fn enter(&self) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.peak.fetch_max(now, Ordering::SeqCst);
    }

    fn leave(&self) {
        self.now.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn rows_come_in_order_whatever_the_delays() {
    let mut random = random();
    for _ in 0..25 {
        let rows = random_rows(&mut random);
        let gauge = Arc::new(Gauge::default());
        let seen = Arc::clone(&gauge);
        let delays: Vec<u64> = (0..100).map(|_| random.random_range(0..8)).collect();
        let failing = random.random_range(0..9);
        let (server, _) = own_server(move |number, request: StatesRequest| {
            let gauge = Arc::clone(&seen);
            let delay = delays[number % delays.len()];
            async move {
                gauge.enter();
                tokio::time::sleep(Duration::from_millis(delay)).await;
                gauge.leave();
                // One in nine fails, to mix retries in.
                if number % 9 == failing { status(500, "no") } else { good(&request) }
            }
        });
        let mut config = config(&[&server.url]);
        config.max_in_flight = random.random_range(1..=8);
        config.window_bytes = 4096 * random.random_range(1..=6);
        let limit = config.max_in_flight;
        let mut stream = start(config, rows.clone()).unwrap();
        let fetched = drain(&mut stream);
        let order = |rows: &[Vec<u64>]| rows.to_vec();
        let expected: Vec<Vec<u64>> =
            rows.iter().map(|row| row.iter().map(|r| r.sample).collect()).collect();
        let got: Vec<Vec<u64>> =
            fetched.iter().map(|row| row.iter().map(|f| f.sample).collect()).collect();
        assert_eq!(order(&got), order(&expected));
        fetched.iter().flatten().for_each(assert_right);
        let peak = gauge.peak.load(Ordering::SeqCst);
        assert!(peak <= limit, "{peak} requests at once, {limit} allowed");
    }
}

#[test]
fn no_more_than_the_window_is_fetched_ahead() {
    // Rows of 4,096 bytes in a window of three, in bytes and in tokens.
    let tokens = 4096 / (LAYERS.len() * HIDDEN * 2);
    check_window(tokens, (3 * 4096, 0));
    check_window(tokens, (1, 3 * tokens));
}

fn check_window(tokens: usize, (window_bytes, window_tokens): (usize, usize)) {
    let row = |sample: u64| vec![Request { sample, input_ids: vec![sample as i64; tokens] }];
    let rows: Vec<_> = (0..12).map(row).collect();
    assert_eq!(bytes_of(&rows[0][0]), 4096);
    // Number of rows that the consumer requested, and how far ahead the server was asked.
    let asked = Arc::new(AtomicUsize::new(0));
    let ahead = Arc::new(AtomicUsize::new(0));
    let (seen, most) = (Arc::clone(&asked), Arc::clone(&ahead));
    let (server, requests) = own_server(move |number, request| {
        most.fetch_max(number + 1 - seen.load(Ordering::SeqCst), Ordering::SeqCst);
        async move { good(&request) }
    });
    let config = StreamConfig { window_bytes, window_tokens, ..config(&[&server.url]) };
    let mut stream = start(config, rows).unwrap();
    for taken in 0..12 {
        let expected = (taken + 3).min(12);
        eventually("the window is full", || requests.load(Ordering::SeqCst) >= expected);
        asked.store(taken + 1, Ordering::SeqCst);
        assert_eq!(stream.next_row().unwrap().unwrap().samples[0].sample, taken as u64);
    }
    assert!(stream.next_row().is_none());
    assert_eq!(ahead.load(Ordering::SeqCst), 3);
}

#[test]
fn a_closed_stream_ends_the_wait_of_another_thread() {
    let (server, requests) = own_server(async |_, _| std::future::pending().await);
    let mut stream = start(config(&[&server.url]), vec![vec![prompt(1)]]).unwrap();
    let closer = stream.closer();
    let waiting = thread::spawn(move || stream.next_row().unwrap().unwrap_err());
    eventually("the server is asked", || requests.load(Ordering::SeqCst) > 0);
    assert!(!waiting.is_finished());
    closer.store(true, Ordering::SeqCst);
    assert!(matches!(waiting.join().unwrap(), Error::Interrupted));
}

#[test]
fn a_row_larger_than_the_window_goes_alone() {
    let (server, _) = own_server(async |_, request| good(&request));
    let mut config = config(&[&server.url]);
    config.window_bytes = 1;
    let rows: Vec<_> = (0..4).map(|row| (row * 20..row * 20 + 20).map(prompt).collect()).collect();
    let fetched = drain(&mut start(config, rows).unwrap());
    assert_eq!(fetched.iter().flatten().count(), 80);
}

#[test]
fn two_servers_share_the_work() {
    let slow = async |_: usize, request: StatesRequest| {
        tokio::time::sleep(Duration::from_millis(4)).await;
        good(&request)
    };
    let (a, a_requests) = own_server(slow);
    let (b, b_requests) = own_server(slow);
    let mut stream =
        start(config(&[&format!("{}, {}", a.url, b.url)]), single_rows(0..60)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    for requests in [a_requests, b_requests] {
        let requests = requests.load(Ordering::SeqCst);
        assert!((10..=50).contains(&requests), "{requests} of 60");
    }
}

#[test]
fn a_server_that_breaks_down_and_recovers_costs_no_sample() {
    let served: Notes<i64> = Arc::default();
    let noted = Arc::clone(&served);
    let (a, a_requests) = own_server(move |number, request: StatesRequest| {
        let reply = match number {
            5..9 => status(500, "broken"),
            _ => {
                noted.lock().unwrap().push(request.input_ids.as_ref().unwrap()[0]);
                good(&request)
            }
        };
        async { reply }
    });
    let (b, _) = own_server(async |_, request| {
        tokio::time::sleep(Duration::from_millis(20)).await;
        good(&request)
    });
    let mut config = config(&[&a.url, &b.url]);
    config.max_in_flight = 4;
    let mut stream = start(config, single_rows(0..80)).unwrap();
    let rows = drain(&mut stream);
    rows.iter().flatten().for_each(assert_right);
    assert_eq!(rows.len(), 80);
    assert!(a_requests.load(Ordering::SeqCst) > 9, "it was readmitted");
    let mut times = HashMap::new();
    served.lock().unwrap().iter().for_each(|id| *times.entry(*id).or_insert(0) += 1);
    assert!(times.values().all(|&times| times == 1), "a sample was asked for twice");
}

#[test]
fn one_dead_server_of_two_is_done_without() {
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (server, _) = own_server(async |_, request| good(&request));
    let config = config(&[&dead.to_string(), &server.url]);
    let mut stream = start(config, single_rows(0..20)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
}

#[test]
fn the_iterator_is_pulled_no_further_than_needed() {
    let (server, _) = own_server(async |_, request| good(&request));
    let taken = Arc::new(AtomicUsize::new(0));
    let ahead = Arc::new(AtomicUsize::new(0));
    let (seen, most) = (Arc::clone(&taken), Arc::clone(&ahead));
    let rows = (0..).map(move |sample| {
        most.fetch_max(sample as usize - seen.load(Ordering::SeqCst), Ordering::SeqCst);
        wanted(vec![prompt(sample)])
    });
    let mut config = config(&[&server.url]);
    config.window_bytes = 4096;
    let mut stream = Stream::start(config, rows).unwrap();
    for _ in 0..200 {
        stream.next_row().unwrap().unwrap();
        taken.fetch_add(1, Ordering::SeqCst);
    }
    let ahead = ahead.load(Ordering::SeqCst);
    assert!(ahead < 20, "{ahead} rows ahead");
}

/// Errors of a row source, in addition to a stream's.
#[derive(Debug, PartialEq)]
enum Made {
    NoRow(u64),
    NoStates,
}

impl From<Error> for Made {
    fn from(_: Error) -> Self {
        Self::NoStates
    }
}

#[test]
fn a_row_that_cannot_be_made_fails_in_its_turn_and_is_not_tried_again() {
    let (server, _) = own_server(async |_, request| good(&request));
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    // the fault does not recur, but the row is lost: continuing would train without it
    let rows = (0..20).map(move |sample| match count.fetch_add(1, Ordering::SeqCst) {
        7 => Err(Made::NoRow(sample)),
        _ => Ok(WantedRow { row: sample * 10, requests: vec![prompt(sample)] }),
    });
    let mut stream = Stream::start(config(&[&server.url]), rows).unwrap();
    for sample in 0..7 {
        let row = stream.next_row().unwrap().unwrap();
        assert_eq!((row.row, row.samples[0].sample), (sample * 10, sample));
    }
    assert_eq!(stream.next_row().unwrap().unwrap_err(), Made::NoRow(7));
    assert!(stream.next_row().is_none(), "a failed stream goes on");
    assert_eq!(asked.load(Ordering::SeqCst), 8);
}
