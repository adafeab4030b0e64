//! Answers: whole and streamed, alone and concurrently.

use futures::future::join_all;
use serde_json::{Value, json};

use crate::running::{Running, chat_body, settings};

fn text(reply: &Value, choice: usize) -> String {
    let choice = &reply["choices"][choice];
    let text = choice["message"]["content"].as_str().or(choice["text"].as_str());
    text.unwrap_or_else(|| panic!("no text in {choice}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_draft_changes_nothing_but_the_speed() {
    let server = Running::start(settings());
    let greedy = json!({"temperature": 0, "max_tokens": 40});
    let reply = server.chat("hello", greedy.clone()).await;
    let plain = json!({"temperature": 0, "max_tokens": 40, "speculative": false});
    assert_eq!(text(&server.chat("hello", plain).await, 0), text(&reply, 0));
    assert!(!text(&reply, 0).is_empty());
    assert_eq!((&reply["object"], &reply["model"]), (&json!("chat.completion"), &json!("tiny")));
    assert!(reply["id"].as_str().unwrap().starts_with("chatcmpl-"));
    // "user: hello", its end, "assistant: ".
    assert_eq!(reply["usage"]["prompt_tokens"], 11 + 1 + 11);
    let completion = reply["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((1..=40).contains(&completion));
    assert_eq!(reply["usage"]["total_tokens"], 23 + completion);
    let finish = reply["choices"][0]["finish_reason"].as_str().unwrap();
    assert_eq!(finish, if completion == 40 { "length" } else { "stop" });
    let drafts = server.metric("vllm:spec_decode_num_drafts_total").await;
    let drafted = server.metric("vllm:spec_decode_num_draft_tokens_total").await;
    assert!(drafts > 0.0 && drafted == 3.0 * drafts, "{drafts} {drafted}");
    assert_eq!(server.metric("vllm:generation_tokens_total").await, 2.0 * completion as f64);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pieces_of_a_stream_are_the_whole_reply() {
    let server = Running::start(settings());
    let asked = json!({"seed": 7, "max_tokens": 30, "n": 2, "logprobs": true, "top_logprobs": 2});
    let whole = server.chat("tell", asked.clone()).await;
    let mut body = chat_body("tell", asked);
    body["stream_options"] = json!({"include_usage": true});
    let events = server.stream("/v1/chat/completions", body).await;
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    for key in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(usage["usage"][key], whole["usage"][key], "{key}");
    }
    for choice in 0..2 {
        let own: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|c| c["index"] == choice)
            .collect();
        assert!(own.len() > 3, "it came in pieces");
        assert_eq!(own[0]["delta"]["role"], "assistant");
        let content = |c: &&Value| c["delta"]["content"].as_str().unwrap().to_owned();
        assert_eq!(own.iter().map(content).collect::<String>(), text(&whole, choice));
        let logprobs: Vec<&Value> =
            own.iter().flat_map(|c| c["logprobs"]["content"].as_array().unwrap()).collect();
        let expected = whole["choices"][choice]["logprobs"]["content"].as_array().unwrap();
        let tokens = |list: Vec<&Value>| -> Vec<Value> {
            list.iter().map(|entry| entry["token"].clone()).collect()
        };
        assert_eq!(tokens(logprobs), tokens(expected.iter().collect()));
        assert_eq!(expected[0]["top_logprobs"].as_array().unwrap().len(), 2);
        let (last, before) = own.split_last().unwrap();
        assert_eq!(last["finish_reason"], whole["choices"][choice]["finish_reason"]);
        assert!(before.iter().all(|c| c["finish_reason"].is_null()));
    }
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()));
    assert_ne!(text(&whole, 0), text(&whole, 1), "each choice has a seed of its own");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_fixes_a_text_whatever_else_is_decoded() {
    let server = Running::start(settings());
    let ask = |n: usize| {
        let more =
            json!({"seed": n, "temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_tokens": 40});
        let server = &server;
        async move { text(&server.chat(&format!("number {n}"), more).await, 0) }
    };
    let mut alone = Vec::new();
    for n in 0..10 {
        alone.push(ask(n).await);
    }
    assert!(alone.windows(2).all(|pair| pair[0] != pair[1]));
    // Ten at a time, of which four are decoded together.
    assert_eq!(join_all((0..10).map(ask)).await, alone);
    let again = |_| server.chat("x", json!({"seed": null, "temperature": 1.5, "max_tokens": 40}));
    let unseeded = join_all((0..2).map(again)).await;
    assert_ne!(text(&unseeded[0], 0), text(&unseeded[1], 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_ends_before_its_stop_string() {
    let server = Running::start(settings());
    let whole = server.chat("count", json!({"temperature": 0, "max_tokens": 40})).await;
    let all = text(&whole, 0);
    // Three letters that span tokens, since every token is a byte.
    let stop = &all[4..7];
    let at = all.find(stop).unwrap();
    let body = json!({"temperature": 0, "max_tokens": 40, "stop": [stop, "never\n"]});
    let cut = server.chat("count", body.clone()).await;
    assert_eq!(
        (text(&cut, 0).as_str(), &cut["choices"][0]["finish_reason"]),
        (&all[..at], &json!("stop"))
    );
    assert_eq!(cut["usage"]["completion_tokens"], at + 3);
    let events = server.stream("/v1/chat/completions", chat_body("count", body)).await;
    let pieces: String =
        events.iter().map(|e| e["choices"][0]["delta"]["content"].as_str().unwrap()).collect();
    assert_eq!(pieces, all[..at]);
    server.until("vllm:num_requests_running", |found| found == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn logits_are_changed_as_asked_with_the_draft_and_without() {
    let server = Running::start(settings());
    let said = async |more: Value| {
        let mut body = json!({"temperature": 0, "max_tokens": 12});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.complete(json!("count"), body).await
    };
    let text = |reply: &Value| reply["choices"][0]["text"].as_str().unwrap().to_owned();
    // Every token is a byte: 65 is A.
    assert_eq!(text(&said(json!({"logit_bias": {"65": 100}})).await), "A".repeat(12));
    let plain = text(&said(json!({})).await);
    for more in [
        json!({"frequency_penalty": 2}),
        json!({"presence_penalty": 2, "repetition_penalty": 1.5}),
        json!({"temperature": 1, "seed": 3, "min_p": 0.2, "frequency_penalty": -1}),
    ] {
        let mut without = more.clone();
        without["speculative"] = json!(false);
        let (with, without) = (said(more.clone()).await, said(without).await);
        if more["temperature"].is_null() {
            assert_eq!(text(&with), text(&without), "{more}");
            assert_ne!(text(&with), plain, "{more}");
        }
        assert_eq!(with["usage"]["completion_tokens"], 12);
    }
    let end = json!({"logit_bias": {"65": 100}, "stop_token_ids": [65]});
    let ended = said(end.clone()).await;
    assert_eq!(
        (text(&ended).as_str(), &ended["choices"][0]["finish_reason"]),
        ("", &json!("stop"))
    );
    let mut later = end;
    later["min_tokens"] = json!(5);
    let ended = said(later).await;
    assert_eq!(ended["usage"]["completion_tokens"], 6);
    assert!(!text(&ended).contains('A'), "{ended}");
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_take_texts_and_tokens() {
    let server = Running::start(settings());
    let more = json!({"temperature": 0, "max_tokens": 12, "logprobs": 3});
    let one = server.complete(json!("abc"), more.clone()).await;
    let ids = server.complete(json!([97, 98, 99]), more.clone()).await;
    assert_eq!((text(&one, 0), &one["object"]), (text(&ids, 0), &json!("text_completion")));
    let both = server.complete(json!(["abc", "xyz"]), more).await;
    assert_eq!(both["choices"].as_array().unwrap().len(), 2);
    assert_eq!(text(&both, 0), text(&one, 0));
    assert_eq!(both["usage"]["prompt_tokens"], 6);
    let logprobs = &one["choices"][0]["logprobs"];
    let texts: String =
        logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(texts, text(&one, 0));
    assert_eq!(logprobs["text_offset"][2], 2);
    let events = server.stream("/v1/completions", json!({"prompt": "abc", "temperature": 0})).await;
    let pieces: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert!(pieces.starts_with(&text(&one, 0)), "{pieces}");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_that_goes_on_is_not_read_again() {
    let server = Running::start(settings());
    let question = "a rather long first turn, of which nobody wants to read every word twice";
    let more = json!({"temperature": 0, "max_tokens": 20});
    let first = server.chat(question, more.clone()).await;
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let mut body = more.clone();
    body["messages"] = json!([
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": text(&first, 0)}], "refusal": null},
        {"role": "user", "content": "go on"},
    ]);
    let ask = || server.post("/v1/chat/completions", &body).send();
    let warm = crate::running::ok(ask().await.unwrap()).await;
    let cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 75, "{cached}");
    assert_eq!(server.metric("vllm:prefix_cache_hits_total").await, cached as f64);
    let none = Running::start(dflash_settings::ServeSettings { prefix_cache_mib: 0, ..settings() });
    let cold =
        crate::running::ok(none.post("/v1/chat/completions", &body).send().await.unwrap()).await;
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(text(&cold, 0), text(&warm, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_template_sees_the_requests_variables() {
    let server = Running::start(settings());
    let tokens = |more: Value| {
        let server = &server;
        async move { server.chat("hi", more).await["usage"]["prompt_tokens"].as_u64().unwrap() }
    };
    let usual = tokens(json!({"max_tokens": 1})).await;
    let shout = json!({"max_tokens": 1, "chat_template_kwargs": {"shout": true}});
    assert_eq!(tokens(shout).await, usual + 1);
}
