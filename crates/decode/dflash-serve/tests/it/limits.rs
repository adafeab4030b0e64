//! What is refused, and that disconnected clients free their slots.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use dflash_settings::ServeSettings;
use serde_json::{Value, json};

use crate::running::{Running, chat_body, ok, refusal, settings};

#[tokio::test(flavor = "multi_thread")]
async fn refusals_have_openais_shape() {
    let server = Running::start(settings());
    let check =
        |path: &'static str, body: Value, status: u16, param: Value, words: &'static str| {
            let server = &server;
            async move {
                let (found, error) = refusal(server.post(path, &body).send().await.unwrap()).await;
                let message = error["message"].as_str().unwrap();
                assert_eq!((found, &error["param"]), (status, &param), "{body}: {message}");
                assert!(message.contains(words), "{message}");
            }
        };
    let (chat, complete) = ("/v1/chat/completions", "/v1/completions");
    let hi = |more| chat_body("hi", more);
    check(chat, json!([]), 400, Value::Null, "JSON object").await;
    check(chat, json!({}), 400, json!("messages"), "missing").await;
    check(chat, json!({"messages": []}), 400, json!("messages"), "empty").await;
    check(chat, hi(json!({"model": "other"})), 404, json!("model"), "this server runs \"tiny\"")
        .await;
    check(chat, hi(json!({"bogus": 1})), 400, json!("bogus"), "leave it out").await;
    check(chat, hi(json!({"best_of": 2})), 400, json!("best_of"), "send 1").await;
    check(chat, hi(json!({"max_tokens": 600})), 400, Value::Null, "longest context is 512").await;
    check(chat, chat_body(&"long ".repeat(200), json!({})), 400, Value::Null, "longest context")
        .await;
    check(complete, json!({"prompt": [1, 300]}), 400, json!("prompt"), "prompt[1] is 300").await;
    check(complete, json!({"prompt": ""}), 400, json!("prompt"), "empty").await;
    check("/v1/embeddings", json!({}), 404, Value::Null, "/v1/embeddings").await;
    let (status, _) = refusal(server.get(chat).send().await.unwrap()).await;
    assert_eq!(status, 405);
    let large = chat_body(&"x".repeat(2 << 20), json!({}));
    check(chat, large, 413, Value::Null, "--max-body-mib").await;
    assert!(
        server
            .metric("dflash:requests_refused_total{engine=\"0\",model_name=\"tiny\",status=\"413\"")
            .await
            == 1.0
    );
    let listed = ok(server.get("/v1/models").send().await.unwrap()).await;
    assert_eq!(
        (&listed["data"][0]["id"], &listed["data"][0]["max_model_len"]),
        (&json!("tiny"), &json!(512))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_nobody_named_may_be_called_anything() {
    let server = Running::start(ServeSettings { served_model_name: None, ..settings() });
    let reply = server.chat("hi", json!({"model": "qwen3-8b-dflash-api", "max_tokens": 5})).await;
    assert_eq!(reply["model"], json!("target"));
    assert!((1..=5).contains(&reply["usage"]["completion_tokens"].as_u64().unwrap()), "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_needed_where_there_is_one() {
    let server = Running::start(ServeSettings { api_key: Some("s3cret".into()), ..settings() });
    for wrong in
        [None, Some("Bearer s3cre"), Some("Bearer s3cret1"), Some("s3cret"), Some("Bearer ")]
    {
        let request = server.get("/v1/models");
        let request =
            wrong.map_or(server.get("/v1/models"), |key| request.header("authorization", key));
        let (status, error) = refusal(request.send().await.unwrap()).await;
        assert_eq!((status, &error["code"]), (401, &json!("invalid_api_key")), "{wrong:?}");
    }
    let body = chat_body("hi", json!({"max_tokens": 1}));
    let (status, _) =
        refusal(server.post("/v1/chat/completions", &body).send().await.unwrap()).await;
    assert_eq!(status, 401);
    let request = server.post("/v1/chat/completions", &body).bearer_auth("s3cret");
    ok(request.send().await.unwrap()).await;
    assert_eq!(server.get("/health").send().await.unwrap().status(), 200);
    assert_eq!(server.get("/metrics").send().await.unwrap().status(), 200);
}

/// A connection on which a stream of many tokens has begun.
fn stream(server: &Running) -> TcpStream {
    let body = chat_body("go on", json!({"stream": true, "max_tokens": 480, "temperature": 0.7}))
        .to_string();
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\
                Content-Type: application/json\r\nContent-Length:";
    write!(stream, "{head} {}\r\n\r\n{body}", body.len()).unwrap();
    let mut begun = [0; 16];
    stream.read_exact(&mut begun).unwrap();
    assert_eq!(&begun, b"HTTP/1.1 200 OK\r");
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_free_their_places() {
    let server = Running::start(ServeSettings { max_num_seqs: 2, max_queue: 12, ..settings() });
    for _ in 0..3 {
        // More than are decoded together, so that some disconnect while waiting.
        drop((0..8).map(|_| stream(&server)).collect::<Vec<_>>());
        server.until("vllm:num_requests_running", |found| found == 0.0).await;
        server.until("vllm:num_requests_waiting", |found| found == 0.0).await;
    }
    server.chat("still there", json!({"max_tokens": 1, "temperature": 0})).await;
    let ended = |reason: &str| {
        format!(
            "vllm:request_success_total{{engine=\"0\",finished_reason=\"{reason}\",model_name=\"tiny\"}}"
        )
    };
    let (aborted, length) =
        (server.metric(&ended("abort")).await, server.metric(&ended("length")).await);
    assert!(aborted >= 1.0 && length >= 1.0, "{aborted} {length}");
}

#[tokio::test(flavor = "multi_thread")]
async fn those_beyond_the_queue_are_told_when_to_come_again() {
    let one = ServeSettings { max_num_seqs: 1, max_queue: 1, max_wait: 0.0, ..settings() };
    let server = Running::start(one);
    let held = stream(&server);
    let body = chat_body("hi", json!({"max_tokens": 1}));
    let response = server.post("/v1/chat/completions", &body).send().await.unwrap();
    // On a fast machine the first one may have finished.
    if response.status() != 200 {
        assert!(response.headers().contains_key("retry-after"));
        let (status, error) = refusal(response).await;
        assert_eq!((status, &error["type"]), (429, &json!("rate_limit_error")));
    }
    drop(held);
    server.until("vllm:num_requests_running", |found| found == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_may_take_longer_than_a_client_may() {
    let server =
        Running::start(ServeSettings { client_timeout: 0.3, max_num_seqs: 1, ..settings() });
    // Five of them in sequence: the last ones wait several times as long.
    let body = chat_body("go on", json!({"n": 5, "max_tokens": 480, "temperature": 0.7}));
    let began = std::time::Instant::now();
    let events = server.stream("/v1/chat/completions", body).await;
    let ended = events.iter().filter(|e| !e["choices"][0]["finish_reason"].is_null()).count();
    assert_eq!(ended, 5);
    println!("took {:?}", began.elapsed());
    assert_eq!(server.metric("dflash:connections_cut_total").await, 0.0);
}
