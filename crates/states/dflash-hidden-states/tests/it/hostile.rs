//! Faulty or malicious servers and networks: no wrong row, no harm, no endless wait.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use bytes::Bytes;
use dflash_hidden_states::{DIGEST_HEADER, Digest, Error, StatesRequest, StreamConfig};
use dflash_test_support::{ChaCha8Rng, Rng, random};

use crate::fake::{
    LAYERS, Server, arrow, assert_right, config, drain, full_text, good, list, models, own_server,
    prompt, single_rows, start, states_of, status,
};

const SOON: Duration = Duration::from_secs(5);

/// The error for the first sample.
fn error_of(config: StreamConfig) -> String {
    match start(config, single_rows(0..1)) {
        Err(error) => full_text(&error),
        Ok(mut stream) => full_text(&stream.next_row().unwrap().unwrap_err()),
    }
}

fn models_then(states: axum::routing::MethodRouter) -> Server {
    let router = Router::new().route("/v1/models", get(async || list(&models())));
    Server::start(router.route("/v1/hidden_states", states))
}

fn endless() -> Response {
    let piece = Bytes::from(vec![b'x'; 1 << 16]);
    Body::from_stream(futures::stream::repeat_with(move || Ok::<_, std::io::Error>(piece.clone())))
        .into_response()
}

#[test]
fn redirects_are_refused_and_no_prompt_leaves() {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&count);
    let elsewhere = Server::start(Router::new().fallback(any(move || {
        seen.fetch_add(1, Ordering::SeqCst);
        async { "thanks" }
    })));
    let to = format!("{}/v1/hidden_states", elsewhere.url);
    for code in [301, 302, 307, 308] {
        let to = to.clone();
        let send = move || {
            let reply = (StatusCode::from_u16(code).unwrap(), [("location", to.clone())]);
            async { reply }
        };
        let server = models_then(post(send));
        let text = error_of(config(&[&server.url]));
        assert!(text.contains("redirects to") && text.contains(&elsewhere.url), "{text}");
    }
    let list = Router::new().route("/v1/models", get(async move || [("location", to)]));
    let server = Server::start(list);
    assert!(error_of(config(&[&server.url])).contains("not a list of models"));
    assert_eq!(count.load(Ordering::SeqCst), 0);
}

#[test]
fn endless_bodies_are_cut() {
    let began = Instant::now();
    let server = Server::start(Router::new().route("/v1/models", get(async || endless())));
    let text = error_of(config(&[&server.url]));
    assert!(text.contains("exceeds the limit of 1048576 bytes"), "{text}");
    let server = models_then(post(async || endless()));
    let mut impatient = config(&[&server.url]);
    impatient.retry.deadline = Duration::from_millis(300);
    let text = error_of(impatient);
    assert!(text.contains("damaged"), "{text}");
    let server = models_then(post(async || (StatusCode::BAD_REQUEST, endless())));
    let mut stream = start(config(&[&server.url]), single_rows(0..2)).unwrap();
    assert!(drain(&mut stream).iter().flatten().all(|fetched| fetched.states.is_none()));
    assert!(began.elapsed() < 3 * SOON, "{:?}", began.elapsed());
}

#[test]
fn what_servers_say_neither_steers_nor_fills_the_terminal() {
    let message = format!("\u{1b}]0;owned\u{7}\u{202e}{}", "line\n".repeat(10_000));
    let server = models_then(post(async move || status(401, &message)));
    let text = error_of(config(&[&server.url]));
    assert!(text.contains("]0;owned") && text.len() < 700, "{text}");
    assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}', '\n']), "{text}");
    let owner = "{\"data\":[{\"id\":\"m\",\"owned_by\":\"\\u001b[2J\"}]}";
    let server = Server::start(Router::new().route("/v1/models", get(async move || owner)));
    assert!(!error_of(config(&[&server.url])).contains('\u{1b}'));
    let name = format!("{{\"data\":[{{\"id\":\"{}\",\"owned_by\":\"vllm\"}}]}}", "m".repeat(9000));
    let server = Server::start(Router::new().route("/v1/models", get(async move || name)));
    assert!(error_of(config(&[&server.url])).len() < 700);
}

/// A server that is always full and asks for this pause.
fn full(after: &'static str) -> (Server, Arc<AtomicUsize>) {
    own_server(async move |_, _| {
        let mut full = status(429, "full");
        full.headers_mut().insert("retry-after", after.parse().unwrap());
        full
    })
}

#[test]
fn no_pause_that_a_server_names_panics_floods_or_ends_at_once() {
    let date = "Fri, 31 Dec 2100 23:59:59 GMT";
    for after in ["18446744073709551615", "0", "-1", "3600", date, "1e999", "soon", "0.001"] {
        let (server, requests) = full(after);
        let mut config = config(&[&server.url]);
        config.retry.longest_pause = Duration::from_millis(200);
        config.retry.longest_wait = Duration::from_millis(200);
        config.retry.deadline = Duration::from_millis(700);
        let began = Instant::now();
        let mut stream = start(config, single_rows(0..8)).unwrap();
        let error = stream.next_row().unwrap().unwrap_err();
        assert!(matches!(error, Error::GaveUp { .. }), "{after}: {error:?}");
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(700) && took < SOON, "{after}: {took:?}");
        let requests = requests.load(Ordering::SeqCst);
        assert!((16..200).contains(&requests), "{after}: {requests} requests for 8 samples");
    }
}

#[test]
fn a_sample_refused_once_is_not_lost() {
    let (server, requests) = own_server(async |number, request: StatesRequest| match number {
        0 => status(400, "a bad moment"),
        _ => good(&request),
    });
    let mut stream = start(config(&[&server.url]), single_rows(0..3)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    assert_eq!((stream.counters().rejected, requests.load(Ordering::SeqCst)), (0, 4));
}

/// The HTTP library's answer to a request with a garbled head: no body.
fn bare() -> axum::response::Response {
    axum::http::StatusCode::BAD_REQUEST.into_response()
}

#[test]
fn a_bare_400_is_asked_again_before_the_sample_counts_as_refused() {
    let (server, requests) = own_server(async |number, request: StatesRequest| match number {
        0..4 => bare(),
        _ => good(&request),
    });
    let mut stream = start(config(&[&server.url]), single_rows(0..1)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    let counters = stream.counters();
    assert_eq!((counters.rejected, counters.damaged), (0, 4));
    assert_eq!(requests.load(Ordering::SeqCst), 5);
    // A server that never succeeds is dropped eventually.
    let (server, requests) = own_server(async |_, request: StatesRequest| {
        if request.input_ids.as_ref().unwrap() == &prompt(0).input_ids {
            bare()
        } else {
            good(&request)
        }
    });
    let mut stream = start(config(&[&server.url]), single_rows(0..2)).unwrap();
    let rows = drain(&mut stream);
    let have: Vec<bool> = rows.iter().flatten().map(|fetched| fetched.states.is_some()).collect();
    assert_eq!((have, stream.counters().rejected), (vec![false, true], 1));
    assert_eq!(requests.load(Ordering::SeqCst), 9);
}

/// A server that after some samples lists `second`, and refuses or answers prompts.
fn replaced(second: fn() -> dflash_hidden_states::ModelList, refuses: bool) -> Server {
    let served = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&served);
    let models = get(move || {
        let reply = if count.load(Ordering::SeqCst) < 5 { models() } else { second() };
        async move { list(&reply) }
    });
    let states = post(move |axum::Json(request): axum::Json<StatesRequest>| {
        let before = served.fetch_add(1, Ordering::SeqCst) < 5;
        let asked = request.model.clone().unwrap();
        let reply = match before {
            true => good(&request),
            false if refuses => status(400, "layer 2 is not served"),
            false => status(404, &format!("model {asked:?} is not served here")),
        };
        async { reply }
    });
    let router = Router::new().route("/v1/models", models);
    Server::start(router.route("/v1/hidden_states", states))
}

#[test]
fn a_server_that_comes_back_as_another_stops_the_run_before_a_sample_is_lost() {
    let other_layers = || {
        let mut list = models();
        list.data[0].metadata.as_mut().unwrap().layer_ids = vec![2, 3];
        list
    };
    let other_model = || {
        let mut list = models();
        list.data[0].id = "other".into();
        list
    };
    for (second, refuses, expected) in [
        (other_layers as fn() -> dflash_hidden_states::ModelList, true, "serves layers [2, 3]"),
        (other_model, false, "now serves other; when the run began it served tiny"),
    ] {
        let server = replaced(second, refuses);
        let mut config = config(&[&server.url]);
        config.max_in_flight = 1;
        let mut stream = start(config, single_rows(0..20)).unwrap();
        let mut right = 0;
        let error = loop {
            match stream.next_row().unwrap() {
                Ok(row) => row.samples.iter().for_each(|fetched| {
                    assert_right(fetched);
                    right += 1;
                }),
                Err(error) => break error,
            }
        };
        assert!(full_text(&error).contains(expected), "{error}");
        assert_eq!((right, stream.counters().rejected), (5, 0));
    }
}

#[test]
fn an_older_server_is_refused_with_both_versions() {
    let mut old = models();
    old.data[0].protocol = None;
    let server = Server::start(Router::new().route("/v1/models", get(async move || list(&old))));
    let text = error_of(config(&[&server.url]));
    assert!(text.contains("speaks version 1") && text.contains("this program version 2"), "{text}");
}

#[test]
fn rows_of_other_tokens_are_never_taken() {
    let (server, _) = own_server(async |_, request: StatesRequest| {
        let mut other = request;
        other.input_ids.as_mut().unwrap()[0] += 1;
        arrow(&other, &states_of(other.input_ids.as_ref().unwrap(), &LAYERS))
    });
    let mut config = config(&[&server.url]);
    config.retry.deadline = Duration::from_millis(300);
    let mut stream = start(config, single_rows(0..3)).unwrap();
    let error = stream.next_row().unwrap().unwrap_err();
    assert!(matches!(error, Error::GaveUp { .. }), "{error:?}");
    assert!(full_text(&error).contains("the prompt of its reply was damaged"), "{error}");
    assert!(stream.counters().damaged > 3);
}

#[test]
fn passwords_are_sent_but_not_told() {
    let reply = |headers: HeaderMap| {
        let known = headers.get("authorization").is_some_and(|sent| sent == "Basic bWU6c2VjcmV0");
        let reply = if known { list(&models()) } else { status(401, "who are you?") };
        async { reply }
    };
    let states = post(async |axum::Json(request): axum::Json<StatesRequest>| good(&request));
    let router = Router::new().route("/v1/models", get(reply)).route("/v1/hidden_states", states);
    let server = Server::start(router);
    let with_password = server.url.replace("http://", "http://me:secret@");
    let mut stream = start(config(&[&with_password]), single_rows(0..3)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    drop(server);
    let text = error_of(config(&[&with_password]));
    assert!(text.contains("http://***@127.0.0.1") && !text.contains("secret"), "{text}");
}

/// Forwards bytes, flipping one bit in some pieces.
fn pass(mut from: TcpStream, mut to: TcpStream, mut random: ChaCha8Rng, one_in: u32) {
    let mut piece = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut piece) {
        if random.random_range(0..one_in) == 0 {
            piece[random.random_range(0..length)] ^= 1 << random.random_range(0..8);
        }
        if to.write_all(&piece[..length]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// A proxy to `server` that flips a bit in about every `one_in`th message, in both directions.
fn bad_wire(server: &Server, one_in: u32, random: ChaCha8Rng) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let target = server.url.strip_prefix("http://").unwrap().to_owned();
    // Ends with the process; connections end with their clients.
    thread::spawn(move || {
        for (number, client) in listener.incoming().flatten().enumerate() {
            let Ok(server) = TcpStream::connect(&target) else { return };
            for (way, (from, to)) in [(&client, &server), (&server, &client)].iter().enumerate() {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let mut own = random.clone();
                own.set_stream((2 * number + way) as u64 + 1);
                thread::spawn(move || pass(from, to, own, one_in));
            }
        }
    });
    format!("http://{address}")
}

#[test]
fn a_wire_that_turns_bits_costs_time_and_no_sample() {
    let server = models_then(post(|headers: HeaderMap, body: Bytes| {
        let own = Digest::of(None, [&body]).to_string();
        let reply = match headers.get(DIGEST_HEADER) {
            Some(sent) if sent.as_bytes() != own.as_bytes() => status(409, "damaged"),
            _ => match serde_json::from_slice(&body) {
                Ok(request) => good(&request),
                Err(_) => status(400, "not a request"),
            },
        };
        async { reply }
    }));
    let url = bad_wire(&server, 4, random());
    let mut config = config(&[&url]);
    config.retry.startup = Duration::from_secs(60);
    config.retry.deadline = Duration::from_secs(120);
    config.retry.request_timeout = Duration::from_millis(500);
    // A flipped bit in a status makes any reply a refusal; three in a row are too likely here.
    config.retry.doubts = 20;
    config.retry.refusals = 20;
    let mut stream = start(config, single_rows(0..1000)).unwrap();
    let rows = drain(&mut stream);
    rows.iter().flatten().for_each(assert_right);
    assert_eq!(rows.len(), 1000);
    let counters = stream.counters();
    assert!(counters.damaged > 50, "{counters:?}");
    assert_eq!((counters.rejected, counters.invalid), (0, 0), "{counters:?}");
}
