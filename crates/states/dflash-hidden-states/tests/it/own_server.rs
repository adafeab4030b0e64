//! Single samples from our own kind of server.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use dflash_hidden_states::{
    Counters, DIGEST_HEADER, Error, HiddenStates, StatesRequest, StreamConfig, TARGET_HEADER,
    encode_stream,
};
use dflash_identity::TargetIdentity;
use dflash_test_support::eventually;

use crate::fake::assert_right;
use crate::fake::{
    LAYERS, Server, arrow, config, drain, full_text, good, list, models, own_server, reply_digest,
    single_rows, start, states_of, status,
};

/// Limit for anything that does not wait for a request, which may take ten seconds.
const SOON: Duration = Duration::from_secs(5);

/// Runs three samples against a server and checks that all arrive intact.
fn recovers_from<F, R>(answer: F) -> Counters
where
    F: Fn(usize, StatesRequest) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Response> + Send + 'static,
{
    let (server, _) = own_server(answer);
    let mut stream = start(config(&[&server.url]), single_rows(0..3)).unwrap();
    let rows = drain(&mut stream);
    assert_eq!(rows.len(), 3);
    rows.iter().flatten().for_each(assert_right);
    stream.counters()
}

#[test]
fn samples_arrive_with_their_bytes_counted() {
    let counters = recovers_from(async |_, request| good(&request));
    let rows: usize = (0..3).map(|sample| crate::fake::prompt(sample).input_ids.len()).sum();
    let bytes = (rows * 2 * 8 * 2) as u64;
    let expected = Counters { requests: 3, generated: 3, bytes, ..Counters::default() };
    assert_eq!(counters, expected);
}

#[test]
fn milliseconds_come_before_seconds() {
    let start = Instant::now();
    let counters = recovers_from(async |number, request| match number {
        0 => {
            let mut full = status(429, "full");
            full.headers_mut().insert("retry-after", "30".parse().unwrap());
            full.headers_mut().insert("retry-after-ms", "50".parse().unwrap());
            full
        }
        _ => good(&request),
    });
    assert_eq!((counters.busy, counters.generated), (1, 3));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn a_full_server_is_asked_again_after_the_pause_it_names() {
    let start = Instant::now();
    let counters = recovers_from(async |number, request| match number {
        0 => {
            let mut full = status(429, "full");
            full.headers_mut().insert("retry-after", "1".parse().unwrap());
            full
        }
        _ => good(&request),
    });
    assert_eq!((counters.busy, counters.retries, counters.generated), (1, 1, 3));
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn server_errors_are_tried_again() {
    let counters = recovers_from(async |number, request| match number {
        0..4 => status(500, "out of memory"),
        _ => good(&request),
    });
    assert_eq!((counters.retries, counters.generated), (4, 3));
}

#[test]
fn a_reply_cut_short_is_tried_again() {
    let counters = recovers_from(async |number, request| {
        let states = states_of(request.input_ids.as_ref().unwrap(), &LAYERS);
        let whole = bytes::Bytes::from(encode_stream(&states, "tiny").unwrap().concat());
        let digest = [(DIGEST_HEADER, reply_digest(&request, &whole))];
        let cut = futures::stream::iter([
            Ok(whole.slice(..whole.len() / 2)),
            Err(std::io::Error::other("gone")),
        ]);
        match number {
            // With the announced length, chunked, and with a wrong length.
            0 => {
                let length = [("content-length", whole.len().to_string())];
                (digest, length, Body::from_stream(cut)).into_response()
            }
            1 => (digest, Body::from_stream(cut)).into_response(),
            2 => (digest, Body::from(whole.slice(..whole.len() / 2))).into_response(),
            _ => good(&request),
        }
    });
    assert_eq!((counters.retries, counters.generated, counters.damaged), (3, 3, 1));
}

#[test]
fn noise_instead_of_arrow_is_tried_again() {
    let counters = recovers_from(async |number, request| match number {
        0 => "<html>welcome</html>".into_response(),
        _ => good(&request),
    });
    assert_eq!((counters.retries, counters.damaged), (1, 1));
}

/// The error that ends a stream against this server.
fn fails_with<F, R>(answer: F) -> (Error, Counters)
where
    F: Fn(usize, StatesRequest) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Response> + Send + 'static,
{
    let (server, _) = own_server(answer);
    let mut stream = start(config(&[&server.url]), single_rows(0..100)).unwrap();
    let error = loop {
        match stream.next_row() {
            Some(Ok(row)) => assert!(row.samples[0].states.is_none(), "a bad sample came through"),
            Some(Err(error)) => break error,
            None => panic!("every sample was bad and nothing failed"),
        }
    };
    assert!(stream.next_row().is_none(), "a failed stream goes on");
    (error, stream.counters())
}

/// Corrupts a correct record's rows on every answer.
fn fails_after(
    change: impl Fn(HiddenStates) -> HiddenStates + Clone + Send + Sync + 'static,
) -> String {
    let (error, counters) = fails_with(move |_, request: StatesRequest| {
        let reply =
            arrow(&request, &change(states_of(request.input_ids.as_ref().unwrap(), &LAYERS)));
        async { reply }
    });
    assert!(matches!(error, Error::TooManyFailures { count: 8, .. }), "{error:?}");
    assert!(counters.retries >= 16, "each sample is tried three times: {counters:?}");
    full_text(&error)
}

/// The record with the bytes of its first layer's second row replaced.
fn with_row(states: &HiddenStates, element: [u8; 2]) -> HiddenStates {
    let width = states.row_bytes();
    let layers = states.layer_ids.iter().map(|&id| {
        let mut bytes = states.layer(id).unwrap().to_vec();
        if id == LAYERS[0] {
            bytes[width..2 * width].copy_from_slice(&element.repeat(width / 2));
        }
        bytes.into()
    });
    let layers = layers.collect();
    let ids = states.layer_ids.clone();
    HiddenStates::new(ids, states.tokens, states.hidden_size, states.dtype, layers).unwrap()
}

#[test]
fn unusable_rows_never_reach_the_trainer() {
    let text = fails_after(|states| with_row(&states, [0, 0]));
    assert!(text.contains("row 1 of layer 2 is all zero"), "{text}");
    let text = fails_after(|states| with_row(&states, [0xc0, 0x7f]));
    assert!(text.contains("row 1 of layer 2 holds NaN"), "{text}");
    let text = fails_after(|states| states.clone().prefix(states.tokens - 1));
    assert!(text.contains("rows for") && text.contains("--no-enable-prefix-caching"), "{text}");
}

#[test]
fn a_few_refused_prompts_are_left_out_and_counted() {
    let (server, requests) = own_server(async |_, request: StatesRequest| {
        match request.input_ids.as_ref().unwrap()[0] % 2 {
            0 => good(&request),
            _ => status(400, "token 7 is out of range"),
        }
    });
    let mut stream = start(config(&[&server.url]), single_rows(0..10)).unwrap();
    let rows = drain(&mut stream);
    for fetched in rows.iter().flatten() {
        assert_eq!(fetched.states.is_some(), fetched.sample % 2 == 0);
    }
    let counters = stream.counters();
    assert_eq!(
        (counters.rejected, counters.missing + counters.invalid, counters.generated),
        (5, 0, 5)
    );
    assert_eq!(requests.load(Ordering::SeqCst), 15, "a second refusal is final");
}

#[test]
fn when_every_prompt_is_refused_the_reason_is_told() {
    let (error, _) = fails_with(async |_, _| status(400, "prompts are not accepted here"));
    assert!(full_text(&error).contains("400: prompts are not accepted here"));
}

#[test]
fn a_server_replaced_by_another_one_is_noticed() {
    let (error, _) = fails_with(async |_, request: StatesRequest| {
        arrow(&request, &states_of(request.input_ids.as_ref().unwrap(), &[2, 6]))
    });
    assert!(matches!(error, Error::LayerMismatch { .. }), "{error:?}");
    assert!(error.to_string().contains("--target-layer-ids 2 5"), "{error}");
    let (error, _) = fails_with(async |_, _| status(404, "no such path"));
    assert!(matches!(error, Error::Status { status: 404, .. }), "{error:?}");
}

#[test]
fn a_sample_that_is_not_available_names_its_last_failure() {
    let (server, _) = own_server(async |_, _| status(503, "restarting"));
    let mut config = config(&[&server.url]);
    config.retry.deadline = Duration::from_millis(100);
    let error = start(config, single_rows(0..1)).unwrap().next_row().unwrap().unwrap_err();
    assert!(matches!(error, Error::GaveUp { sample: 0, .. }), "{error:?}");
    assert!(full_text(&error).contains("503: restarting"));
}

/// The preflight's result for a server with this model list.
fn preflight(
    listing: Router,
    change: impl FnOnce(&mut dflash_hidden_states::StreamConfig),
) -> String {
    let server = Server::start(listing);
    let mut config = config(&[&server.url]);
    change(&mut config);
    full_text(&start(config, single_rows(0..1)).unwrap_err())
}

fn listed() -> Router {
    Router::new().route("/v1/models", get(async || list(&models())))
}

#[test]
fn mismatches_are_named_before_the_first_sample() {
    let text = preflight(listed(), |config| config.layer_ids = vec![2, 3, 8]);
    assert!(text.contains("serves layers [2, 5], the draft needs [2, 3, 8]"), "{text}");
    let text = preflight(listed(), |config| config.hidden_size = 4096);
    assert!(text.contains("hidden_size 8, the target's is 4096"), "{text}");
    let text = preflight(listed(), |config| config.vocab_size = Some(1001));
    assert!(text.contains("vocab_size 1000, the target's is 1001"), "{text}");
    let text = preflight(listed(), |config| config.num_hidden_layers = Some(9));
    assert!(text.contains("num_hidden_layers 8, the target's is 9"), "{text}");
}

#[test]
fn other_servers_are_not_taken_for_ours() {
    let none = Router::new();
    assert!(preflight(none, |_| ()).contains("is not a hidden-state server: it answers 404"));
    let web = Router::new().route("/v1/models", get(async || "<html></html>"));
    assert!(preflight(web, |_| ()).contains("not a list of models"));
    let llama = r#"{"data":[{"id":"m","owned_by":"llamacpp"}]}"#;
    let llama = Router::new().route("/v1/models", get(async move || llama));
    assert!(preflight(llama, |_| ()).contains("owned by \"llamacpp\""));
}

#[test]
fn an_unreachable_server_is_named_within_moments() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let began = Instant::now();
    let error = start(config(&[&format!("http://{free}/v1")]), single_rows(0..1)).unwrap_err();
    assert!(matches!(error, Error::NotReady { .. }), "{error:?}");
    let text = full_text(&error);
    assert!(text.contains(&free.to_string()) && text.contains("dflash hidden-server"), "{text}");
    assert!(began.elapsed() < SOON);
    assert!(matches!(start(config(&[]), vec![]), Err(Error::NoEndpoint)));
}

#[test]
fn a_loading_server_is_waited_for() {
    let asked = Arc::new(AtomicBool::new(false));
    let reply = move || {
        let loaded = asked.swap(true, Ordering::SeqCst);
        let reply =
            if loaded { list(&models()) } else { StatusCode::SERVICE_UNAVAILABLE.into_response() };
        async { reply }
    };
    let server = Server::start(Router::new().route("/v1/models", get(reply)));
    assert!(start(config(&[&server.url]), vec![]).unwrap().next_row().is_none());
}

/// A server that accepts requests and never answers, and the number it accepted.
fn hung() -> (Server, Arc<AtomicUsize>) {
    own_server(async |_, _| std::future::pending().await)
}

#[test]
fn a_stream_to_a_hung_server_can_be_dropped() {
    let (server, requests) = hung();
    let stream = start(config(&[&server.url]), single_rows(0..50)).unwrap();
    eventually("the server is asked", || requests.load(Ordering::SeqCst) > 0);
    let began = Instant::now();
    drop(stream);
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn the_stop_flag_ends_a_wait() {
    let (server, requests) = hung();
    let config = config(&[&server.url]);
    let stop = Arc::clone(&config.stop);
    let mut stream = start(config, single_rows(0..2)).unwrap();
    let setter = std::thread::spawn(move || {
        eventually("the server is asked", || requests.load(Ordering::SeqCst) > 0);
        stop.store(true, Ordering::SeqCst);
    });
    let began = Instant::now();
    assert!(matches!(stream.next_row(), Some(Err(Error::Interrupted))));
    assert!(began.elapsed() < SOON);
    assert!(stream.next_row().is_none());
    setter.join().unwrap();
}

#[test]
fn a_hung_request_times_out_and_is_tried_elsewhere() {
    let (server, _) = own_server(async |number, request| match number {
        0 => std::future::pending().await,
        _ => good(&request),
    });
    let mut config = config(&[&server.url]);
    config.retry.request_timeout = Duration::from_millis(100);
    let mut stream = start(config, single_rows(0..1)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    assert_eq!(stream.counters().retries, 1);
}

#[test]
fn another_model_that_comes_behind_the_address_ends_the_stream_at_its_first_reply() {
    fn identity(weights: &str) -> TargetIdentity {
        let (name, config) = ("tiny".into(), "c0ffee".into());
        TargetIdentity { name, config, weights: Some(weights.into()) }
    }
    let (server, _) = own_server(async |number, request| {
        let mut reply = good(&request);
        let served = identity(if number < 2 { "aaa" } else { "bbb" });
        reply.headers_mut().insert(TARGET_HEADER, served.digests().parse().unwrap());
        reply
    });
    let config =
        StreamConfig { target: Some(identity("aaa")), max_in_flight: 1, ..config(&[&server.url]) };
    let mut stream = start(config, single_rows(0..5)).unwrap();
    for _ in 0..2 {
        stream.next_row().unwrap().unwrap().samples.iter().for_each(assert_right);
    }
    let text = full_text(&stream.next_row().unwrap().unwrap_err());
    let both = ["config c0ffee, weights bbb", "tiny (config c0ffee, weights aaa)"];
    for expected in both.iter().chain(&[server.url.as_str()]) {
        assert!(text.contains(expected), "no {expected:?} in {text}");
    }
}
