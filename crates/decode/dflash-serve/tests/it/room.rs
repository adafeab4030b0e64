//! Small requests next to large ones: small ones do not wait for them, and nobody waits forever.

use std::time::{Duration, Instant};

use dflash_settings::ServeSettings;
use reqwest::Response;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::running::{Running, chat_body, refusal, settings};

const CHAT: &str = "/v1/chat/completions";
const WAITING: &str = "vllm:num_requests_waiting";

/// A pending request; aborting it disconnects the client.
fn send(server: &Running, more: Value) -> JoinHandle<Response> {
    let request = server.post(CHAT, &chat_body("go on", more));
    tokio::spawn(async move { request.send().await.unwrap() })
}

/// A request that takes almost half of the memory for log-probabilities.
fn huge(server: &Running) -> JoinHandle<Response> {
    let more = json!({"n": 128, "max_tokens": 389, "logprobs": true, "top_logprobs": 20,
        "ignore_eos": true, "temperature": 1.2});
    send(server, more)
}

async fn check_refused(response: JoinHandle<Response>) {
    let response = tokio::time::timeout(Duration::from_secs(20), response).await;
    let response = response.expect("it does not wait forever").unwrap();
    assert!(response.headers().contains_key("retry-after"), "{response:?}");
    let (status, error) = refusal(response).await;
    assert_eq!((status, &error["code"]), (429, &json!("rate_limit_exceeded")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn huge_requests_of_log_probabilities_do_not_hold_back_small_ones() {
    let server = Running::start(settings());
    let mut crowd = vec![huge(&server), huge(&server)];
    server.until(WAITING, |waiting| waiting > 240.0).await;
    crowd.push(huge(&server));
    // Lets the third queue up before the small one.
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.chat("hi", json!({"max_tokens": 3, "logprobs": true, "top_logprobs": 1})).await;
    let waiting = server.metric(WAITING).await;
    assert!(waiting > 200.0, "{waiting} of 256 choices wait");
    crowd.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_too_long_for_log_probabilities_is_told_to_come_back() {
    let server = Running::start(ServeSettings { max_wait: 0.3, ..settings() });
    let crowd = [huge(&server), huge(&server)];
    server.until(WAITING, |waiting| waiting > 240.0).await;
    check_refused(huge(&server)).await;
    crowd.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_too_long_for_grammars_is_told_to_come_back() {
    let server = Running::start(ServeSettings { max_wait: 0.3, ..settings() });
    let schema = json!({"type": "array", "minItems": 200, "items": {"type": "integer"}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let more = json!({"n": 16, "max_tokens": 400, "response_format": format});
    let crowd: Vec<_> = (0..32).map(|_| send(&server, more.clone())).collect();
    // Each of them has its own grammar.
    server.until(WAITING, |waiting| waiting > 32.0 * 16.0 - 10.0).await;
    check_refused(send(&server, more)).await;
    crowd.iter().for_each(JoinHandle::abort);
}

/// Median time until the first piece of a short streamed answer.
async fn first_token(server: &Running) -> Duration {
    let mut times = Vec::new();
    for seed in 0..7 {
        let more = json!({"max_tokens": 2, "stream": true, "seed": seed});
        let began = Instant::now();
        let mut response = server.post(CHAT, &chat_body("hello", more)).send().await.unwrap();
        response.chunk().await.unwrap().expect("a first piece");
        times.push(began.elapsed());
        while response.chunk().await.unwrap().is_some() {}
    }
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_token_of_a_small_request_does_not_wait_for_128_choices() {
    let server = Running::start(settings());
    let idle = first_token(&server).await;
    let many = json!({"n": 128, "max_tokens": 480, "ignore_eos": true, "temperature": 1.2});
    let crowd = send(&server, many);
    server.until(WAITING, |waiting| waiting > 100.0).await;
    let busy = first_token(&server).await;
    let waiting = server.metric(WAITING).await;
    assert!(waiting > 64.0, "{waiting} of 128 choices wait: the server was busy all the time");
    // A step of the others, plus delays from other tests on the same cores.
    let most = 20 * idle + Duration::from_millis(500);
    assert!(busy < most, "{busy:?}, and {idle:?} on an idle server");
    crowd.abort();
}
