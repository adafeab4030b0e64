//! Who may connect and how: web pages, greedy, odd, disconnected and half-closed clients.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use bytes::Bytes;
use dflash_settings::ServeSettings;
use reqwest::Method;
use serde_json::{Value, json};

use crate::running::{Running, chat_body, ok, refusal, settings};

const CHAT: &str = "/v1/chat/completions";

fn connect(server: &Running) -> TcpStream {
    let stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// A connection on which a request has been sent.
fn sent(server: &Running, version: &str, path: &str, body: &Value) -> TcpStream {
    let (mut stream, body) = (connect(server), body.to_string());
    let head = format!(
        "POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn http_2_is_not_spoken() {
    let server = Running::start(settings());
    let mut stream = connect(&server);
    // The preface, and an empty SETTINGS frame.
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
    let mut reply = Vec::new();
    match stream.read_to_end(&mut reply) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        // An HTTP/2 server would answer with a frame of type 4.
        Ok(_) => assert!(reply.is_empty() || reply.starts_with(b"HTTP/1.1 "), "{reply:?}"),
    }
    server.chat("hi", json!({"max_tokens": 1})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_closes_its_side_gets_its_answer() {
    let server = Running::start(ServeSettings { max_num_seqs: 1, ..settings() });
    let more = json!({"max_tokens": 200, "n": 3, "temperature": 0});
    let whole = chat_body("go on", more.clone());
    let mut streamed = whole.clone();
    streamed["stream"] = true.into();
    for (version, body) in [("1.1", &whole), ("1.0", &whole), ("1.1", &streamed)] {
        let mut stream = sent(&server, version, CHAT, body);
        stream.shutdown(Shutdown::Write).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let status = "200 OK\r\n";
        assert!(reply.contains(status) && reply.contains("\"finish_reason\":\""), "{reply}");
        // Clients without interim responses get none.
        assert_eq!(version == "1.0", reply.starts_with("HTTP/1.0 200"), "{reply}");
    }
    let mut metrics = connect(&server);
    write!(metrics, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    metrics.shutdown(Shutdown::Write).unwrap();
    let mut page = String::new();
    metrics.read_to_string(&mut page).unwrap();
    assert!(page.starts_with("HTTP/1.1 200 OK"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_left_is_noticed_before_its_answer_is_whole() {
    let server = Running::start(ServeSettings { max_num_seqs: 1, ..settings() });
    let body = chat_body("go on", json!({"max_tokens": 480, "n": 100, "temperature": 1.2}));
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = stream.into();
        let client = sent(&server, "1.1", CHAT, &body);
        server.until("vllm:num_requests_waiting", |waiting| waiting > 50.0).await;
        drop(client);
        server.until("vllm:num_requests_waiting", |waiting| waiting == 0.0).await;
        server.until("vllm:num_requests_running", |running| running == 0.0).await;
    }
    let length = "vllm:request_success_total{engine=\"0\",finished_reason=\"length\"";
    assert!(server.metric(length).await < 150.0, "most of 200 choices were given up");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_of_many_choices_does_not_keep_others_out() {
    let server = Running::start(ServeSettings { max_num_seqs: 3, ..settings() });
    let many = chat_body("go on", json!({"max_tokens": 480, "n": 128, "temperature": 1.2}));
    let client = sent(&server, "1.1", CHAT, &many);
    server.until("vllm:num_requests_running", |running| running == 3.0).await;
    let mut held = 0.0;
    for n in 0..4 {
        let short = json!({"max_tokens": 5, "temperature": 0, "seed": n});
        let reply = server.chat("hello", short.clone()).await;
        // The same as ever, although others paused for it.
        assert_eq!(reply["choices"], server.chat("hello", short).await["choices"]);
        held = server.metric("vllm:num_requests_waiting").await;
    }
    assert!(held > 100.0, "{held} of 128 choices wait after eight short answers");
    drop(client);
    server.until("vllm:num_requests_running", |running| running == 0.0).await;
    assert_eq!(server.metric("dflash:num_sequences_resting").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_of_many_requests_does_not_keep_others_out() {
    let server = Running::start(ServeSettings { max_num_seqs: 2, max_queue: 64, ..settings() });
    let long = chat_body("go on", json!({"max_tokens": 480, "ignore_eos": true}));
    let ask = |key: &str, body: &Value| server.post(CHAT, body).bearer_auth(key).send();
    let crowd: Vec<_> = (0..40).map(|_| tokio::spawn(ask("one", &long))).collect();
    server.until("vllm:num_requests_waiting", |waiting| waiting > 30.0).await;
    let short = chat_body("hello", json!({"max_tokens": 2}));
    ok(ask("two", &short).await.unwrap()).await;
    assert!(server.metric("vllm:num_requests_waiting").await > 25.0);
    crowd.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_of_many_requests_is_as_fast_as_the_first() {
    let server = Running::start(ServeSettings { prefix_cache_mib: 512, ..settings() });
    let mut times = Vec::new();
    for n in 0..600 {
        // Nothing in common, so that all their caches are kept.
        let prompt: Vec<u64> = (0..30).map(|at| (n * 7919 + at * at * 31 + at * n) % 250).collect();
        let began = std::time::Instant::now();
        server.complete(json!(prompt), json!({"max_tokens": 4, "temperature": 0})).await;
        times.push(began.elapsed());
    }
    assert!(server.metric("dflash:prefix_cache_bytes").await > 1e6);
    let median = |times: &mut [Duration]| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let (first, last) = (median(&mut times[50..150].to_vec()), median(&mut times[500..].to_vec()));
    // Summing all kept caches in every step was 20 times as slow.
    assert!(last < 3 * first, "{first:?} at first, {last:?} at last");
}

/// Peak memory of this process since the last call, MiB.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 10
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_small_values_takes_no_more_than_its_size() {
    let server = Running::start(ServeSettings { max_body_mib: 8, ..settings() });
    let zeros = "0,".repeat(4 << 20);
    let whole = |before: &str, after: &str| {
        Bytes::from(format!("{before}{}0]{after}", &zeros[..zeros.len() - 200]))
    };
    let prompt = whole("{\"prompt\":[", "}");
    let nested = whole("{\"prompt\":[[", "]}");
    let unknown = whole("{\"x\":[", "}");
    let messages = whole("{\"messages\":[", "}");
    let before = peak_mib();
    let mut replies = Vec::new();
    for _ in 0..2 {
        for (path, body) in [
            ("/v1/completions", &prompt),
            ("/v1/completions", &nested),
            ("/v1/completions", &unknown),
            (CHAT, &messages),
        ] {
            let request = server.post(path, &Value::Null).body(body.clone());
            replies.push(tokio::spawn(request.send()));
        }
    }
    for reply in replies {
        let (status, error) = refusal(reply.await.unwrap().unwrap()).await;
        assert!(status == 400 || status == 429, "{status} {error}");
    }
    // As JSON values each of the eight took 600 MiB.
    let grown = peak_mib() - before;
    assert!(grown < 400, "{grown} MiB more");
    let (status, error) =
        refusal(server.post("/v1/completions", &Value::Null).body(prompt).send().await.unwrap())
            .await;
    assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_are_bounded_over_a_request() {
    let server = Running::start(settings());
    let top = |n: usize| json!({"n": n, "logprobs": true, "top_logprobs": 20, "max_tokens": 480});
    let request = server.post(CHAT, &chat_body("hi", top(128)));
    let (status, error) = refusal(request.send().await.unwrap()).await;
    assert_eq!((status, &error["param"]), (400, &json!("logprobs")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("smaller max_tokens"), "{error}");
    let mut few = top(2);
    few["max_tokens"] = 3.into();
    let reply = server.chat("hi", few).await;
    let content = &reply["choices"][1]["logprobs"]["content"];
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 20, "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_token_has_its_bytes() {
    let server = Running::start(settings());
    // Every token of the tiny target is a byte, and 20 of them are reported per position.
    let more = json!({"max_tokens": 40, "logprobs": true, "top_logprobs": 20, "temperature": 2});
    let reply = server.chat("hello", more).await;
    let mut parts = 0;
    for place in reply["choices"][0]["logprobs"]["content"].as_array().unwrap() {
        for entry in place["top_logprobs"].as_array().unwrap() {
            let token = entry["token"].as_str().unwrap();
            if token.is_empty() || token.starts_with("<|") {
                continue;
            }
            let bytes: Vec<u8> = serde_json::from_value(entry["bytes"].clone())
                .unwrap_or_else(|_| panic!("no bytes in {entry}"));
            assert_eq!(String::from_utf8_lossy(&bytes), token, "{entry}");
            parts += usize::from(bytes[0] >= 0x80);
        }
    }
    assert!(parts > 0, "parts of characters were among them: {reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_need_an_origin_that_is_allowed() {
    let server = Running::start(ServeSettings {
        allowed_origins: vec!["https://chat.example".into()],
        ..settings()
    });
    let body = chat_body("hi", json!({"max_tokens": 1}));
    let status = |name: &'static str, value: &'static str| {
        let request = server.post(CHAT, &body).header(name, value);
        async move { request.send().await.unwrap().status().as_u16() }
    };
    assert_eq!(status("host", "evil.example:8000").await, 403);
    assert_eq!(status("host", "localhost:8000").await, 200);
    assert_eq!(status("origin", "https://evil.example").await, 403);
    assert_eq!(status("origin", "null").await, 403);
    let request = server.post(CHAT, &body).header("origin", "https://chat.example");
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["access-control-allow-origin"], "https://chat.example");
    assert_eq!(response.headers()["vary"], "origin");
    ok(response).await;
    // A browser's preflight request, without the key.
    let ask = |origin: &'static str| {
        let request = server.request(Method::OPTIONS, CHAT).header("origin", origin);
        let request = request.header("access-control-request-method", "POST");
        request.header("access-control-request-headers", "authorization,x-stainless-lang").send()
    };
    let allowed = ask("https://chat.example").await.unwrap();
    assert_eq!(allowed.status(), 204);
    let headers = allowed.headers();
    assert_eq!(headers["access-control-allow-headers"], "authorization,x-stainless-lang");
    assert!(headers["access-control-allow-methods"].to_str().unwrap().contains("POST"));
    assert_eq!(ask("https://evil.example").await.unwrap().status(), 403);
    // A form, or a page that made no preflight request.
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        let request = server.request(Method::POST, CHAT).body(body.to_string());
        let request = request.header("content-type", kind);
        let (status, error) = refusal(request.send().await.unwrap()).await;
        assert!(status == 415 && error["message"].as_str().unwrap().contains(kind), "{error}");
    }
    let request = server.request(Method::POST, CHAT).body(body.to_string());
    assert_eq!(request.send().await.unwrap().status(), 415);
    let refused = "dflash:requests_refused_total{engine=\"0\",model_name=\"tiny\",status=\"403\"";
    assert_eq!(server.metric(refused).await, 4.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_told_by_name_alone() {
    let server = Running::start(ServeSettings { api_key: Some("s3cret".into()), ..settings() });
    let get = |path: &'static str, bearer: &'static str| {
        server.get(path).header("authorization", bearer).send()
    };
    for bearer in ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret"] {
        let listed = ok(get("/v1/models", bearer).await.unwrap()).await;
        assert_eq!(listed["data"][0]["root"], "tiny", "{listed}");
        assert!(!listed.to_string().contains('/'), "{listed}");
        let one = ok(get("/v1/models/tiny", bearer).await.unwrap()).await;
        assert_eq!(one, listed["data"][0]);
    }
    let (status, error) =
        refusal(get("/v1/models/owner/other", "Bearer s3cret").await.unwrap()).await;
    assert_eq!((status, &error["code"]), (404, &json!("model_not_found")));
    assert_eq!(get("/v1/models/tiny", "Basic s3cret").await.unwrap().status(), 401);
}
