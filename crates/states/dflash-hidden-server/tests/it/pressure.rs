//! Clients and batches that ask for too much: their answers, and that others do not suffer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dflash_hidden_server::{Error, Features, Featurizer, Loader, ModelFacts, PackedPrompts};
use dflash_settings::HiddenServerSettings;
use dflash_test_support::eventually;
use futures::future::join_all;
use serde_json::json;

use crate::double::{LAYERS, Running, config, expected, facts, refusal, states};

/// Long enough for an honest client on a busy machine, short enough for a test.
const SHORT: f64 = 2.0;
/// Time allowed for a request while others are cut.
const PROMPT: Duration = Duration::from_secs(20);

fn connect(server: &Running) -> TcpStream {
    let stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// A connection with the start of a request that never continues.
fn stuck(server: &Running, text: &str) -> TcpStream {
    let mut stream = connect(server);
    // The server may close it before everything is sent.
    let _ = stream.write_all(text.as_bytes());
    stream
}

/// The head of a request whose body has `length` bytes.
fn head(length: usize) -> String {
    format!(
        "POST /v1/hidden_states HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    )
}

/// Whether the server has closed the connection, without a reply.
fn is_cut(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

async fn assert_serves(server: &Running) {
    let began = Instant::now();
    assert_eq!(states(server.prompt(&[4, 5]).await).await, expected(&[4, 5], &LAYERS));
    assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_without_memory_is_halved_until_it_fits() {
    check_halved(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_without_a_gpu_s_memory_is_halved_until_it_fits() {
    check_halved(true).await;
}

async fn check_halved(on_gpu: bool) {
    let server = Arc::new(Running::start(config()));
    server.desk.fits.store(30, Ordering::SeqCst);
    server.desk.on_gpu.store(on_gpu, Ordering::SeqCst);
    server.desk.close();
    let ask = |ids: Vec<i64>| {
        let server = Arc::clone(&server);
        tokio::spawn(async move { server.prompt(&ids).await })
    };
    let first = ask(vec![1]);
    server.desk.await_batch();
    let mut waiting = Vec::new();
    for (index, tokens) in [20, 10, 31, 15].into_iter().enumerate() {
        waiting.push(ask(vec![index as i64; tokens]));
        server.until("waiting", index as u64 + 1).await;
    }
    server.desk.open();
    states(first.await.unwrap()).await;
    for (index, (tokens, answer)) in [20, 10, 31, 15].into_iter().zip(waiting).enumerate() {
        let answer = answer.await.unwrap();
        if tokens <= 30 {
            assert_eq!(states(answer).await, expected(&vec![index as i64; tokens], &LAYERS));
            continue;
        }
        // Clients read this as a fault of the prompt, not of the server.
        let (status, error) = refusal(answer).await;
        assert_eq!(status, 413);
        assert!(error["message"].as_str().unwrap().contains("a prompt of 31 tokens"), "{error}");
    }
    let begun = server.desk.batches();
    assert_eq!(
        begun,
        [vec![1], vec![20, 10, 31, 15], vec![20, 10], vec![31, 15], vec![31], vec![15]]
    );
    let health = server.health().await;
    assert_eq!((&health["out_of_memory"], &health["failed"]), (&json!(3), &json!(1)), "{health}");
    assert_serves(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_for_which_there_was_memory_before_is_asked_again_later() {
    let server = Running::start(config());
    states(server.prompt(&[1; 40]).await).await;
    server.desk.fits.store(30, Ordering::SeqCst);
    let response = server.prompt(&[1; 35]).await;
    assert_eq!(response.headers()["retry-after"], "1");
    let (status, error) = refusal(response).await;
    assert_eq!(status, 503);
    assert!(error["message"].as_str().unwrap().contains("35 tokens at present"), "{error}");
    server.desk.fits.store(0, Ordering::SeqCst);
    states(server.prompt(&[1; 35]).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn once_memory_has_run_out_batches_are_smaller() {
    let server = Arc::new(Running::start(config()));
    server.desk.fits.store(50, Ordering::SeqCst);
    for _ in 0..2 {
        server.desk.close();
        let before = server.desk.batches().len();
        let mut waiting = Vec::new();
        for index in 0..5 {
            let asking = Arc::clone(&server);
            waiting.push(tokio::spawn(async move { asking.prompt(&[1; 24]).await }));
            eventually("a batch has begun", || server.desk.batches().len() > before);
            server.until("waiting", index).await;
        }
        server.desk.open();
        for answer in join_all(waiting).await {
            states(answer.unwrap()).await;
        }
        server.until("in_use", 0).await;
    }
    assert_eq!(server.health().await["out_of_memory"], 1, "{:?}", server.desk.batches());
}

#[tokio::test(flavor = "multi_thread")]
async fn half_heads_neither_block_nor_stay() {
    let client_timeout = SHORT;
    let server = Running::start(HiddenServerSettings { client_timeout, ..config() });
    let half = "POST /v1/hidden_states HTTP/1.1\r\nHost:";
    let mut stuck: Vec<TcpStream> = (0..300).map(|_| stuck(&server, half)).collect();
    assert_serves(&server).await;
    for stream in &mut stuck {
        assert!(is_cut(stream));
    }
    server.until("cut", 300).await;
    let deadline = Instant::now() + PROMPT;
    while server.health().await["connections"].as_u64().unwrap() > 10 {
        assert!(Instant::now() < deadline, "{}", server.health().await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_connections_make_room_for_new_ones() {
    let server = Running::start(HiddenServerSettings { client_timeout: 600.0, ..config() });
    // More than allowed: 16 in the queue, three times 256 others.
    let _stuck: Vec<TcpStream> = (0..900).map(|_| stuck(&server, "GET /health")).collect();
    assert_serves(&server).await;
    let deadline = Instant::now() + PROMPT;
    while server.health().await["connections"].as_u64().unwrap() > 784 {
        assert!(Instant::now() < deadline, "{}", server.health().await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_first_lines_are_cut() {
    let server = Running::start(HiddenServerSettings { client_timeout: 600.0, ..config() });
    let head = format!("GET /health HTTP/1.1\r\nX: {}", "x".repeat(200 << 10));
    assert!(is_cut(&mut stuck(&server, &head)));
    assert_serves(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_uploads_count_against_the_queue_until_they_are_cut() {
    let settings = HiddenServerSettings { max_queue: 3, client_timeout: SHORT, ..config() };
    let server = Running::start(settings);
    let begin = format!("{}{{\"input_ids\": [1, ", head(1000));
    let mut stuck: Vec<TcpStream> = (0..3).map(|_| stuck(&server, &begin)).collect();
    server.until("in_use", 3).await;
    assert_eq!(refusal(server.prompt(&[1]).await).await.0, 429);
    for stream in &mut stuck {
        assert!(is_cut(stream));
    }
    server.until("in_use", 0).await;
    assert_eq!(server.health().await["cut"], 3);
    assert_serves(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_are_bounded_in_sum() {
    let settings = HiddenServerSettings { max_queue: 256, client_timeout: 600.0, ..config() };
    let server = Running::start(settings);
    // The largest body for a context of 64 tokens is 1 MiB and 1 KiB; there is room for 64 MiB.
    let begin = format!("{}{{\"input_ids\": [1, ", head(1 << 20));
    let mut uploads: Vec<TcpStream> = (0..64).map(|_| stuck(&server, &begin)).collect();
    server.until("in_use", 64).await;
    assert_eq!(refusal(server.prompt(&[1]).await).await.0, 429);
    uploads.pop();
    server.until("in_use", 63).await;
    assert_serves(&server).await;
}

/// Rows of 16 MiB per token: more than socket buffers hold.
struct Wide(ModelFacts);

const WIDE: usize = 8 << 20;

fn wide(settings: &HiddenServerSettings) -> Running {
    let mut facts = facts();
    facts.metadata.hidden_size = WIDE;
    let load: Loader = Box::new(move || Ok(Box::new(Wide(facts))));
    Running::load(settings.clone(), load)
}

impl Featurizer for Wide {
    fn facts(&self) -> &ModelFacts {
        &self.0
    }

    fn features(&mut self, prompts: &PackedPrompts, ids: &[u32]) -> Result<Features, Error> {
        let rows = |ends: &[i64]| vec![0; (ends[1] - ends[0]) as usize * WIDE * 2].into();
        let each = |ends: &[i64]| ids.iter().map(|_| rows(ends)).collect();
        Ok(Features::Here(prompts.document_starts.windows(2).map(each).collect()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unread_reply_keeps_its_slot_until_it_is_cut() {
    let server = wide(&HiddenServerSettings { max_queue: 1, client_timeout: 0.5, ..config() });
    let body = r#"{"input_ids":[1],"layer_ids":[2]}"#;
    let mut unread = stuck(&server, &format!("{}{body}", head(body.len())));
    // All but the end of the reply has been handed to HTTP at once; the slot stays occupied.
    assert_eq!(unread.peek(&mut [0; 8]).unwrap(), 8);
    server.until("in_use", 1).await;
    assert_eq!(refusal(server.prompt(&[1]).await).await.0, 429);
    // Half a second, plus one for each 16 MiB.
    server.until("in_use", 0).await;
    assert_eq!(server.health().await["cut"], 1);
    let mut rest = Vec::new();
    let _ = unread.read_to_end(&mut rest);
    assert!(rest.len() < 16 << 20, "{} bytes", rest.len());
    assert_eq!(server.post(body).await.bytes().await.unwrap().len() >> 20, 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn everyone_gets_a_turn() {
    const CLIENTS: usize = 32;
    // Enough that a thread delayed for some milliseconds does not decide the outcome.
    const TURNS: usize = 100;
    let server = Running::start(HiddenServerSettings { max_queue: 8, max_wait: 60.0, ..config() });
    let server = Arc::new(server);
    let turns: Arc<Vec<AtomicUsize>> = Arc::new((0..CLIENTS).map(|_| 0.into()).collect());
    let client = |number: usize| {
        let (server, turns) = (Arc::clone(&server), Arc::clone(&turns));
        tokio::spawn(async move {
            for turn in 1..=TURNS {
                let ids = [number as i64; 40];
                assert_eq!(states(server.prompt(&ids).await).await, expected(&ids, &LAYERS));
                turns[number].store(turn, Ordering::SeqCst);
            }
            turns.iter().map(|turns| turns.load(Ordering::SeqCst)).min().unwrap()
        })
    };
    let last = join_all((0..CLIENTS).map(client)).await;
    // Progress of the slowest when the first had finished.
    let last = last.into_iter().map(Result::unwrap).min().unwrap();
    assert!(last >= TURNS / 2, "one client had {last} turns when another had all {TURNS}");
    assert_eq!(server.health().await["put_off"], 0);
}
