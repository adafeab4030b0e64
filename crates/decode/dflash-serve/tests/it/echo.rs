//! Log-probabilities of prompts, as benchmarks request them.

use dflash_target::{Target, TargetOptions};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::models::save_models;
use crate::running::{Running, refusal, settings};

const PATH: &str = "/v1/completions";

/// The target's log-probabilities, one row per position of each of `ids`.
fn log_shares(ids: &[i64]) -> Vec<Vec<f64>> {
    let dir = tempfile::tempdir().unwrap();
    save_models(dir.path());
    let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
    let target = Target::load(&dir.path().join("target"), &options).unwrap();
    let (length, last) = (ids.len() as i64, [target.num_layers() as u32]);
    let hidden = &target.forward_packed(&Tensor::from_slice(ids), &[0, length], &last)[0];
    let log_tv = target.logits(hidden).log_softmax(-1, Kind::Double);
    (0..length).map(|row| Vec::try_from(log_tv.get(row)).unwrap()).collect()
}

/// Checks that `logprobs` match the target for the tokens of `text`, one per byte.
fn check(logprobs: &Value, text: &str) {
    let ids: Vec<i64> = text.bytes().map(i64::from).collect();
    let expected = log_shares(&ids);
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[key].as_array().unwrap().len(), ids.len(), "{key}");
    }
    for (at, &id) in ids.iter().enumerate() {
        let letter = &text[at..=at];
        assert_eq!(
            (&logprobs["tokens"][at], &logprobs["text_offset"][at]),
            (&json!(letter), &json!(at))
        );
        if at == 0 {
            assert!(
                logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null()
            );
            continue;
        }
        let found = logprobs["token_logprobs"][at].as_f64().unwrap();
        assert!((found - expected[at - 1][id as usize]).abs() < 1e-3, "{at}: {found}");
        let top = logprobs["top_logprobs"][at].as_object().unwrap();
        let best = expected[at - 1].iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let found = top.values().map(|share| share.as_f64().unwrap());
        let found = found.fold(f64::NEG_INFINITY, f64::max);
        assert!((found - best).abs() < 1e-3, "{at}: {found}, {best}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_told_token_by_token_with_its_log_probabilities() {
    let server = Running::start(settings());
    // Longer than one piece, and stored in the prefix cache.
    let prompt = "the quick brown fox jumps over the lazy dog ".repeat(3);
    server.complete(json!(prompt), json!({"max_tokens": 2})).await;
    let more = json!({"echo": true, "logprobs": 1, "max_tokens": 0, "temperature": 0});
    let reply = server.complete(json!(prompt), more).await;
    let choice = &reply["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(prompt), &json!("length")));
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    check(&choice["logprobs"], &prompt);
    // In the form of lm-evaluation-harness: ids, and one token.
    let ids: Vec<Vec<i64>> =
        ["one two", "three"].iter().map(|text| text.bytes().map(i64::from).collect()).collect();
    let more = json!({"echo": true, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1});
    let reply = server.complete(json!(ids), more.clone()).await;
    for (choice, prompt) in reply["choices"].as_array().unwrap().iter().zip(["one two", "three"]) {
        let text = choice["text"].as_str().unwrap();
        assert!(text.starts_with(prompt) && text.len() == prompt.len() + 1, "{text}");
        check(&choice["logprobs"], text);
    }
    let mut body = more;
    body["prompt"] = json!("one two");
    let events = server.stream(PATH, body).await;
    let pieces: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(pieces, reply["choices"][0]["text"]);
    assert_eq!(events[0]["choices"][0]["logprobs"]["token_logprobs"][0], Value::Null);
    let without = server.complete(json!("abc"), json!({"echo": true, "max_tokens": 0})).await;
    assert_eq!(
        (&without["choices"][0]["text"], &without["choices"][0]["logprobs"]),
        (&json!("abc"), &Value::Null)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_told_of_prompts_is_bounded() {
    let server = Running::start(settings());
    let check = async |body: Value, param: &str, words: &str| {
        let (status, error) = refusal(server.post(PATH, &body).send().await.unwrap()).await;
        let message = error["message"].as_str().unwrap();
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{message}");
        assert!(message.contains(words), "{message}");
    };
    check(json!({"prompt": "a", "max_tokens": 0}), "max_tokens", "without echo").await;
    let prompts = vec!["x".repeat(500); 128];
    let many = json!({"prompt": prompts, "echo": true, "logprobs": 20, "max_tokens": 0});
    check(many, "logprobs", "with echo the prompt's tokens count").await;
    check(json!({"prompt": "a", "echo": "yes"}), "echo", "invalid type").await;
}
