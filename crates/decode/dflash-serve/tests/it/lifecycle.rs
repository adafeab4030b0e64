//! Draining.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dflash_settings::ServeSettings;
use serde_json::json;

use crate::running::{Running, chat_body, settings};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_under_way_ends_and_new_requests_are_refused() {
    let server = Arc::new(Running::start(ServeSettings { max_num_seqs: 1, ..settings() }));
    let ask = || {
        let server = Arc::clone(&server);
        let more = json!({"max_tokens": 400, "n": 5, "temperature": 0.7, "seed": 1});
        let body = chat_body("go on", more);
        tokio::spawn(async move { server.stream("/v1/chat/completions", body).await })
    };
    // One answer is decoded, the others wait: more than four once both requests are in.
    let under_way = [ask(), ask()];
    server.until("vllm:num_requests_waiting", |waiting| waiting > 4.0).await;
    server.stop.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(150)).await;
    let body = chat_body("hi", json!({"max_tokens": 1}));
    let refused = server.post("/v1/chat/completions", &body).send().await;
    // Without a connection there is none to refuse on.
    assert!(refused.is_err() || refused.unwrap().status() == 503);
    for stream in under_way {
        let events = stream.await.unwrap();
        let finish = &events.last().unwrap()["choices"][0]["finish_reason"];
        assert!(finish == "stop" || finish == "length", "{finish}");
    }
    let server = Arc::into_inner(server).unwrap();
    server.end().0.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drain_has_an_end() {
    let server =
        Running::start(ServeSettings { max_num_seqs: 1, drain_timeout: 0.2, ..settings() });
    // Several seconds of work, so that a periodically measured gauge must see it.
    let body = chat_body("go on", json!({"max_tokens": 480, "n": 40, "ignore_eos": true}));
    let request = server.post("/v1/chat/completions", &body);
    let client = tokio::spawn(request.send());
    server.until("vllm:num_requests_running", |running| running == 1.0).await;
    let (outcome, took) = server.end();
    outcome.unwrap();
    assert!(took < Duration::from_secs(4), "{took:?}");
    let answer = client.await.unwrap();
    assert!(answer.is_err() || answer.unwrap().status() == 503);
}
