//! Responses to requests: rows for valid ones, a reason for invalid ones.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use bytes::Bytes;
use dflash_hidden_states::{DIGEST_HEADER, Digest};
use reqwest::Method;
use serde_json::json;

use crate::double::{LAYERS, Running, config, expected, refusal, states};

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_gets_the_rows_of_its_layers() {
    let server = Running::start(config());
    let ids = [5, 0, 99, 7];
    assert_eq!(states(server.prompt(&ids).await).await, expected(&ids, &LAYERS));
    let body = json!({"prompt": ids, "model": "double"}).to_string();
    assert_eq!(states(server.post(body).await).await, expected(&ids, &LAYERS));
    let longest: Vec<i64> = (0..64).collect();
    assert_eq!(states(server.prompt(&longest).await).await, expected(&longest, &LAYERS));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_may_name_layers_and_only_those_are_run() {
    let server = Running::start(config());
    for (asked, got) in [(vec![2], vec![2]), (vec![5, 0, 5], vec![0, 5]), (vec![8, 2], vec![2, 8])]
    {
        let body = json!({"input_ids": [1, 2], "layer_ids": asked}).to_string();
        assert_eq!(states(server.post(body).await).await, expected(&[1, 2], &got));
    }
    assert_eq!(*server.desk.layers.lock().unwrap(), [vec![2], vec![0, 5], vec![2, 8]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_told_what_is_wrong() {
    let server = Running::start(config());
    let long = vec![1; 65];
    for (body, param, reason) in [
        (
            json!({"input_ids": [1, 100]}),
            "input_ids",
            "input_ids[1] is 100, the vocabulary has ids 0 to 99",
        ),
        (json!({"prompt": [-1]}), "prompt", "prompt[0] is -1"),
        (json!({"input_ids": []}), "input_ids", "input_ids is empty"),
        (json!({"input_ids": long}), "input_ids", "65 tokens, this server takes up to 64"),
        (json!({}), "input_ids", "no prompt"),
        (json!({"input_ids": [1], "prompt": [1]}), "input_ids", "send one"),
        (
            json!({"input_ids": [1], "layer_ids": [0, 3]}),
            "layer_ids",
            "layer 3 is not served; this server has [0, 2, 5] and the last layer, 8",
        ),
        (json!({"input_ids": [1], "layer_ids": []}), "layer_ids", "layer_ids is empty"),
    ] {
        let (status, error) = refusal(server.post(body.to_string()).await).await;
        assert_eq!(status, 400, "{body}");
        assert_eq!(error["param"], param, "{body}");
        assert_eq!(error["type"], "invalid_request_error", "{body}");
        assert!(error["message"].as_str().unwrap().contains(reason), "{body}: {error}");
    }
    assert_eq!(server.health().await["invalid"], 8);
    assert!(server.desk.batches().is_empty(), "none reached the model");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_not_requests_are_told_where() {
    let server = Running::start(config());
    for (body, reason) in [
        ("", "EOF"),
        ("{\"input_ids\": [1, 2", "line 1 column 19"),
        ("[1, 2]", "body is not a request"),
        ("{\"input_ids\": \"hello\"}", "expected a sequence"),
        ("{\"input_ids\": [1.5]}", "1.5"),
        ("{\"input_ids\": [1], \"layer_id\": [2]}", "layer_id"),
    ] {
        let (status, error) = refusal(server.post(body).await).await;
        assert_eq!(status, 400, "{body}");
        assert!(error["message"].as_str().unwrap().contains(reason), "{body}: {error}");
    }
}

#[test]
fn a_body_beyond_any_context_is_refused_by_its_announced_length() {
    let server = Running::start(config());
    let mut client = TcpStream::connect(server.address).unwrap();
    let head =
        "POST /v1/hidden_states HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n";
    client.write_all(head.as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(client).read_line(&mut line).unwrap();
    assert_eq!(line, "HTTP/1.1 413 Payload Too Large\r\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_still_sends_too_long_a_body_sees_why_it_is_refused() {
    let server = Running::start(config());
    for _ in 0..10 {
        let (status, error) = refusal(server.post("1".repeat(8 << 20)).await).await;
        assert_eq!(status, 413, "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_models_paths_and_methods_are_refused() {
    let server = Running::start(config());
    let body = json!({"input_ids": [1], "model": "Qwen/Qwen3-8B"}).to_string();
    let (status, error) = refusal(server.post(body).await).await;
    assert_eq!((status, &error["param"]), (404, &json!("model")));
    let (status, error) = refusal(server.get("/v1/completions").await).await;
    assert_eq!(status, 404);
    assert!(error["message"].as_str().unwrap().contains("POST /v1/hidden_states"));
    let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
    let put = client.request(Method::PUT, server.url("/v1/models")).send().await.unwrap();
    let (status, error) = refusal(put).await;
    assert_eq!((status, error["message"].as_str()), (405, Some("/v1/models does not take PUT")));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_list_tells_what_clients_check() {
    let server = Running::start(config());
    let list = server.get("/v1/models").await.bytes().await.unwrap();
    let list: serde_json::Value = serde_json::from_slice(&list).unwrap();
    let expected = json!({"object": "list", "data": [{
        "id": "double", "object": "model", "owned_by": "dflash", "root": "double",
        "max_model_len": 64, "protocol": 2,
        "metadata": {"hidden_size": 4, "num_hidden_layers": 8, "vocab_size": 100,
                     "layer_ids": [0, 2, 5], "dtype": "bf16"},
    }]});
    assert_eq!(list, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn work_is_counted() {
    let server = Running::start(config());
    states(server.prompt(&[1, 2, 3]).await).await;
    states(server.prompt(&[4]).await).await;
    let health = server.health().await;
    assert_eq!((&health["prompts"], &health["tokens"]), (&json!(2), &json!(4)));
    assert_eq!(health["status"], "ok");
    let text = server.get("/metrics").await.bytes().await.unwrap();
    let text = String::from_utf8_lossy(&text).into_owned();
    let bytes = 4 * LAYERS.len() * 4 * 2;
    assert!(text.contains(&format!("dflash_hidden_server_bytes_total {bytes}\n")), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_body_is_sent_back_and_a_reply_has_the_digests_of_prompt_and_body() {
    let server = Running::start(config());
    let whole = Bytes::from(json!({"input_ids": [1, 2], "layer_ids": [2]}).to_string());
    let digest = Digest::of(None, [&whole]).to_string();
    let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
    let send = async |body: Bytes, digest: &str| {
        let post = client.post(server.url("/v1/hidden_states")).body(body);
        post.header(DIGEST_HEADER, digest).send().await.unwrap()
    };
    for at in 0..whole.len() {
        let mut damaged = whole.to_vec();
        damaged[at] ^= 1 << (at % 8);
        let (status, error) = refusal(send(damaged.into(), &digest).await).await;
        assert_eq!(status, 409, "byte {at}");
        assert!(error["message"].as_str().unwrap().contains("damaged"), "{error}");
    }
    assert_eq!(send(whole.clone(), "").await.status(), 409);
    assert!(server.desk.batches().is_empty(), "no damaged prompt reached the model");
    let reply = send(whole, &digest).await;
    let sent = reply.headers()[DIGEST_HEADER].to_str().unwrap().to_owned();
    let body = reply.bytes().await.unwrap();
    let prompt = dflash_hidden_states::prompt_digest(&[1, 2], Some(&[2]));
    assert_eq!(sent, Digest::of(Some(prompt), [&body]).to_string());
}
