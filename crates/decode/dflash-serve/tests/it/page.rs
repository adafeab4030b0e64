//! The chat page: who gets it, who may use the API from it, and the blocks that it shows.

use dflash_settings::ServeSettings;
use serde_json::{Value, json};

use crate::running::{Running, chat_body, ok, refusal, settings};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_comes_without_a_key_and_lets_nothing_else_in() {
    let server = Running::start(ServeSettings { api_key: Some("k".into()), ..settings() });
    let page = server.get("/").send().await.unwrap();
    assert_eq!(page.status(), 200);
    let header = |name: &str| page.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(header("content-type"), "text/html; charset=utf-8");
    assert_eq!(header("x-content-type-options"), "nosniff");
    let policy = header("content-security-policy");
    for part in ["default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    let html = String::from_utf8(page.bytes().await.unwrap().to_vec()).unwrap();
    assert!(html.starts_with("<!DOCTYPE html>"));
    // What it says of the server is asked for, with the key.
    assert!(!html.contains("tiny"));
    assert_eq!(server.get("/v1/models").send().await.unwrap().status(), 401);
    // The key makes the API safe under any host; the page asks for that key.
    let foreign = |path| server.get(path).header("host", "evil.example").bearer_auth("k").send();
    assert_eq!(foreign("/v1/models").await.unwrap().status(), 200);
    let (status, error) = refusal(foreign("/").await.unwrap()).await;
    let message = error["message"].as_str().unwrap();
    assert!(status == 403 && message.contains("--allowed-origins http://evil.example"), "{error}");
    let framed = server.get("/").header("origin", "https://evil.example").send().await.unwrap();
    assert_eq!(framed.status(), 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_this_server_may_use_it_and_others_may_not() {
    for host in ["127.0.0.1", "0.0.0.0"] {
        let server = Running::start(ServeSettings { host: host.into(), ..settings() });
        let body = chat_body("hi", json!({"max_tokens": 1}));
        let status = async |host: &'static str, origin: &'static str| {
            let request = server.post(CHAT, &body).header("host", host).header("origin", origin);
            request.send().await.unwrap().status().as_u16()
        };
        assert_eq!(status("localhost:9000", "http://localhost:9000").await, 200);
        assert_eq!(status("localhost:9000", "http://localhost:3000").await, 403);
        assert_eq!(status("localhost:9000", "https://evil.example").await, 403);
        // A name that was made to resolve to this machine.
        assert_eq!(status("evil.example:9000", "http://evil.example:9000").await, 403);
        let on_all = host == "0.0.0.0";
        let by_address = status("10.0.0.7:9000", "http://10.0.0.7:9000").await;
        assert_eq!(by_address, if on_all { 200 } else { 403 });
        let page = server.get("/").header("host", "evil.example").send().await.unwrap();
        assert_eq!(page.status(), 403);
        // Clients that are no browsers are served as before.
        let client = server.post(CHAT, &body).header("host", "gpubox:9000").send().await.unwrap();
        assert_eq!(client.status().as_u16(), if on_all { 200 } else { 403 });
    }
}

/// The blocks of a streamed answer, the text of its chunks, and its number of tokens.
async fn blocks(server: &Running, more: Value) -> (Vec<Value>, String, u64) {
    let mut body = chat_body("tell", more);
    body["stream_options"] = json!({"include_usage": true, "include_blocks": true});
    let events = server.stream(CHAT, body).await;
    let (usage, chunks) = events.split_last().unwrap();
    let mut text = String::new();
    for chunk in chunks {
        let choice = &chunk["choices"][0];
        let content = choice["delta"]["content"].as_str().unwrap();
        assert_eq!(texts(&choice["block"]).concat(), content, "{choice}");
        text += content;
    }
    let blocks = chunks.iter().map(|chunk| chunk["choices"][0]["block"].clone()).collect();
    (blocks, text, usage["usage"]["completion_tokens"].as_u64().unwrap())
}

fn texts(block: &Value) -> Vec<&str> {
    block["tokens"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

fn sum(blocks: &[Value], key: &str) -> f64 {
    blocks.iter().map(|block| block[key].as_f64().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_say_which_tokens_were_drafted_and_leave_the_text_as_it_is() {
    let server = Running::start(settings());
    // Characters of two tokens, the bytes of é, and a stop string that is held back.
    let bytes = json!({"195": 100, "169": 100});
    for more in [
        json!({"temperature": 0, "max_tokens": 60}),
        json!({"temperature": 2, "max_tokens": 200, "ignore_eos": true}),
        json!({"temperature": 2, "max_tokens": 60, "logit_bias": bytes}),
        json!({"temperature": 0, "max_tokens": 60, "stop": ["zzzz", "aq"]}),
    ] {
        let names = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"];
        let counts = async || {
            let mut counts = Vec::new();
            for name in names {
                counts.push(server.metric(&format!("vllm:spec_decode_{name}_total")).await);
            }
            counts
        };
        let before = counts().await;
        let (found, text, tokens) = blocks(&server, more.clone()).await;
        let after = counts().await;
        let whole = server.chat("tell", more.clone()).await;
        assert_eq!(whole["choices"][0]["message"]["content"], text.as_str(), "{more}");
        assert_eq!(more["logit_bias"].is_object(), text.contains('é'), "{text}");
        let each: Vec<usize> = found.iter().map(|block| texts(block).len()).collect();
        assert_eq!(each.iter().sum::<usize>() as u64, tokens, "{more}");
        assert_eq!(each[0], 1, "the prompt gives one token");
        for (block, &tokens) in found.iter().zip(&each) {
            let accepted = block["accepted"].as_u64().unwrap() as usize;
            // Fewer where the answer ends within a block.
            assert!((1..=accepted + 1).contains(&tokens), "{block}");
        }
        let (last, others) = each.split_last().unwrap();
        assert!(*last > 0);
        let full = found.iter().zip(others);
        assert!(full.into_iter().all(|(block, &n)| block["accepted"] == n - 1), "{found:?}");
        let drafts = found.iter().filter(|block| block["proposed"] != 0).count() as f64;
        let reported = [drafts, sum(&found, "proposed"), sum(&found, "accepted")];
        let counted: Vec<f64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
        assert_eq!(reported, counted[..], "{more}");
        assert!(drafts > 0.0);
        let is_told = |block: &Value| {
            let is_rejected = block["accepted"].as_u64() < block["proposed"].as_u64();
            is_rejected || block["rejected"] == ""
        };
        assert!(found.iter().all(is_told));
        assert!(found.iter().any(|block| block["rejected"] != ""), "{found:?}");
    }
    let plain = json!({"temperature": 0, "max_tokens": 30, "speculative": false});
    let (found, text, _) = blocks(&server, plain).await;
    let (_, drafted, _) = blocks(&server, json!({"temperature": 0, "max_tokens": 30})).await;
    assert_eq!(text, drafted);
    assert!(found.iter().all(|block| block["proposed"] == 0 && texts(block).len() == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_come_only_to_those_who_ask() {
    let server = Running::start(settings());
    let card = ok(server.get("/v1/models/tiny").send().await.unwrap()).await;
    assert_eq!(card["max_draft_tokens"], 3);
    let events = server.stream(CHAT, chat_body("tell", json!({"max_tokens": 5}))).await;
    assert!(events.iter().all(|event| event["choices"][0].get("block").is_none()));
    let mut echoed = json!({"prompt": "abc", "echo": true, "stream": true});
    echoed["stream_options"] = json!({"include_blocks": true});
    let function = json!({"name": "f", "parameters": {"type": "object"}});
    let tools = json!({"stream": true, "stream_options": {"include_blocks": true},
        "tools": [{"type": "function", "function": function}]});
    for (path, body, part) in [
        (CHAT, chat_body("a", tools), "include_blocks does not go with tools"),
        ("/v1/completions", echoed, "include_blocks does not go with echo"),
        (CHAT, chat_body("a", json!({"stream_options": {"include_blocks": true}})), "needs stream"),
        (
            CHAT,
            chat_body("a", json!({"stream": true, "stream_options": {"blocks": true}})),
            "blocks",
        ),
    ] {
        let (status, error) = refusal(server.post(path, &body).send().await.unwrap()).await;
        let message = error["message"].as_str().unwrap();
        assert!(status == 400 && message.contains(part), "{message}");
    }
    let without = Running::start(ServeSettings { draft: None, ..settings() });
    let card = ok(without.get("/v1/models/tiny").send().await.unwrap()).await;
    assert_eq!(card["max_draft_tokens"], 0);
    let (found, ..) = blocks(&without, json!({"max_tokens": 5, "ignore_eos": true})).await;
    assert_eq!((found.len(), sum(&found, "proposed")), (5, 0.0));
}
