//! Answers constrained to a format.

use dflash_settings::{ServeSettings, Speculate};
use serde_json::{Value, json};

use crate::running::{Running, chat_body, refusal, settings};

const CHAT: &str = "/v1/chat/completions";

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Århus"]},
            "degrees": {"type": "integer", "minimum": -40, "maximum": 50},
        },
        "required": ["city", "degrees"],
        "additionalProperties": false,
    })
}

fn format(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": true}})
}

fn check(choice: &Value) {
    let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap();
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
    assert!(value["city"] == "Oslo" || value["city"] == "Århus", "{text}");
    assert!((-40..=50).contains(&value["degrees"].as_i64().unwrap()), "{text}");
    assert_eq!((value.as_object().unwrap().len(), &choice["finish_reason"]), (2, &json!("stop")));
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_satisfy_their_schema_whole_and_in_pieces() {
    for speculate in [Speculate::Tokens(3), Speculate::Auto] {
        let server = Running::start(ServeSettings { speculate, ..settings() });
        let greedy = json!({"temperature": 0, "response_format": format(&schema())});
        let reply = server.chat("weather", greedy.clone()).await;
        check(&reply["choices"][0]);
        let mut plain = greedy.clone();
        plain["speculative"] = json!(false);
        let plain = server.chat("weather", plain).await;
        assert_eq!(plain["choices"], reply["choices"]);
        let drafts = server.metric("vllm:spec_decode_num_drafts_total").await;
        assert!(drafts > 0.0 || matches!(speculate, Speculate::Auto));
        let sampled = json!({"n": 4, "seed": 3, "temperature": 0.8,
            "response_format": format(&schema())});
        let several = server.chat("weather", sampled).await;
        several["choices"].as_array().unwrap().iter().for_each(check);
        let events = server.stream(CHAT, chat_body("weather", greedy.clone())).await;
        let pieces = events.iter().map(|e| e["choices"][0]["delta"]["content"].as_str().unwrap());
        assert_eq!(pieces.collect::<String>(), reply["choices"][0]["message"]["content"]);
        let completion = server.complete(
            json!("weather"),
            json!({"temperature": 0,
            "max_tokens": 300, "response_format": format(&schema())}),
        );
        check(&completion.await["choices"][0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_object_is_an_object_and_a_cut_one_says_so() {
    let server = Running::start(settings());
    let object = json!({"type": "json_object"});
    let more = json!({"temperature": 0, "max_tokens": 3, "response_format": object,
        "logit_bias": {"125": -100}});
    let cut = server.chat("go on", more).await;
    let choice = &cut["choices"][0];
    assert_eq!(choice["finish_reason"], "length", "{choice}");
    assert!(choice["message"]["content"].as_str().unwrap().starts_with('{'), "{choice}");
    // `}` as soon as it is allowed.
    let more = json!({"temperature": 0, "response_format": object, "logit_bias": {"125": 100}});
    let whole = server.chat("go on", more).await;
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}");
    let text = json!({"temperature": 0, "max_tokens": 9, "response_format": {"type": "text"}});
    let free = server.chat("go on", text).await;
    let plain = server.chat("go on", json!({"temperature": 0, "max_tokens": 9})).await;
    assert_eq!(free["choices"], plain["choices"]);
}

/// More requests than allowed grammars, with a schema found too large after the first token.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_whose_format_cannot_be_followed_ends_alone() {
    let server = Running::start(settings());
    let schema = json!({"type": "string", "maxLength": 100_000, "pattern": "(ab|a)*b.*c"});
    let body = chat_body("hi", json!({"response_format": format(&schema)}));
    let asked = (0..40).map(|_| server.post(CHAT, &body).send());
    for response in futures::future::join_all(asked).await {
        let (status, error) = refusal(response.unwrap()).await;
        let message = error["message"].as_str().unwrap();
        assert!(status == 400 && message.contains("simplify its schema"), "{status} {message}");
    }
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let text = server.post(CHAT, &streamed).send().await.unwrap().bytes().await.unwrap();
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("simplify its schema") && text.contains("[DONE]"), "{text}");
    check(
        &server.chat("hi", json!({"response_format": format(&self::schema())})).await["choices"][0],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn formats_that_cannot_be_kept_are_refused_by_name() {
    let server = Running::start(settings());
    let param = "response_format.json_schema.schema";
    let patterns: Vec<Value> =
        (0..200).map(|n| json!({"pattern": format!("a.*b{{{n}}}.*c")})).collect();
    for (schema, words) in [
        (json!({"type": "strin"}), "strin"),
        (json!({"$ref": "#/$defs/none"}), "none"),
        (json!({"type": "string", "pattern": "("}), "cannot be used"),
        (json!({"enum": []}), "cannot be used"),
        (json!({"type": "string", "allOf": patterns}), "200 patterns"),
        (json!({"type": "integer", "multipleOf": 9_999_991}), "multipleOf"),
        (json!({"enum": ["x".repeat(200_000)]}), "may have 131072"),
        (json!({"x-guidance": {}}), "x-guidance"),
    ] {
        let body = chat_body("hi", json!({"response_format": format(&schema)}));
        let (status, error) = refusal(server.post(CHAT, &body).send().await.unwrap()).await;
        let message = error["message"].as_str().unwrap();
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{schema}: {message}");
        assert!(message.starts_with(param) && message.contains(words), "{message}");
    }
    let both = json!({"response_format": format(&schema()), "ignore_eos": true});
    let (status, error) =
        refusal(server.post(CHAT, &chat_body("hi", both)).send().await.unwrap()).await;
    assert_eq!((status, &error["param"]), (400, &json!("ignore_eos")));
    check(&server.chat("hi", json!({"response_format": format(&schema())})).await["choices"][0]);
}
