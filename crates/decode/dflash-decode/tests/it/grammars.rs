//! Answers constrained by a grammar, with and without a draft.

use dflash_chat::ChatTokenizer;
use dflash_decode::{
    EngineOptions, Finish, GrammarSource, GrammarVocabulary, LogitAdjustments, Proposals, Request,
    Sampling,
};
use dflash_settings::Speculate;
use dflash_test_support::{added_token, byte_tokenizer};
use serde_json::{Value, json};

use crate::distributions::check_texts;
use crate::engine::{Answer, OPTIONS, answers, engine, models, prompt, request};

fn tokenizer(json: &Value) -> ChatTokenizer {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    ChatTokenizer::load(dir.path()).unwrap()
}

/// Texts of a small vocabulary; its end token and two unused rows follow.
const TOKENS: [&str; 5] = ["a", "b", "\"", "c", "ab"];
const END: i64 = 5;
const VOCAB: i64 = 8;
const WORDS: [&str; 4] = ["a", "ab", "ba", "cab"];

fn few_words() -> GrammarVocabulary {
    let mut json = byte_tokenizer(&[]);
    let ids = TOKENS.iter().enumerate().map(|(id, text)| ((*text).to_owned(), json!(id)));
    json["model"]["vocab"] = Value::Object(ids.collect());
    json["added_tokens"] = json!([added_token(END as u32, "<|end|>", true)]);
    GrammarVocabulary::new(&tokenizer(&json), VOCAB, &[END]).unwrap()
}

/// An independent implementation of whether `id` may follow `text`.
fn may_follow(text: &[i64], id: i64) -> bool {
    let said: String = text.iter().map(|&id| TOKENS[id as usize]).collect();
    let begins = |more: &str| {
        WORDS.iter().any(|word| format!("\"{word}\"").starts_with(&format!("{said}{more}")))
    };
    match id {
        END => WORDS.iter().any(|word| format!("\"{word}\"") == said),
        id => TOKENS.get(id as usize).is_some_and(|more| begins(more)),
    }
}

#[test]
fn sampled_texts_have_the_targets_distribution_within_the_grammar() {
    let grammar = few_words().compile(&GrammarSource::JsonSchema(json!({"enum": WORDS}))).unwrap();
    let models = models(VOCAB, 21);
    for sampling in [Sampling::at(1.2), Sampling { top_k: Some(2), ..Sampling::at(0.8) }] {
        for speculative in [true, false] {
            let asked = Request {
                sampling,
                grammar: Some(grammar.clone()),
                stop_ids: vec![END],
                speculative,
                ..request(prompt(5, 2, VOCAB), 7)
            };
            check_texts(&models, &asked, |log, text| {
                for (id, log) in log.iter_mut().enumerate() {
                    *log = if may_follow(text, id as i64) { *log } else { f64::NEG_INFINITY };
                }
            });
        }
    }
}

/// The byte vocabulary, with end token 256.
fn bytes() -> GrammarVocabulary {
    GrammarVocabulary::new(&tokenizer(&byte_tokenizer(&["<|end|>"])), 260, &[256]).unwrap()
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"enum": ["x", "yes", "é"]},
            "count": {"type": "integer", "minimum": 3, "maximum": 120},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "count", "flags"],
        "additionalProperties": false,
    })
}

/// Whether a whole answer satisfies [`schema`].
fn check_answer(answer: &Answer) {
    assert_eq!(answer.finish, Some(Finish::Stop));
    let mut text: Vec<u8> = answer.ids().iter().map(|&id| id as u8).collect();
    text.pop();
    let text = String::from_utf8(text).unwrap();
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
    assert!(["x", "yes", "é"].contains(&value["name"].as_str().unwrap()), "{text}");
    assert!((3..=120).contains(&value["count"].as_i64().unwrap()), "{text}");
    let flags = value["flags"].as_array().unwrap();
    assert!(flags.len() <= 3 && flags.iter().all(Value::is_boolean), "{text}");
    assert_eq!(value.as_object().unwrap().len(), 3, "{text}");
}

#[test]
fn answers_satisfy_their_schema_and_no_proposal_changes_them() {
    let models = models(260, 5);
    let grammar = bytes().compile(&GrammarSource::JsonSchema(schema())).unwrap();
    let requests: Vec<Request> = (0..10)
        .map(|n| Request {
            sampling: if n % 2 == 0 { Sampling::GREEDY } else { Sampling::at(0.9) },
            seed: n as u64,
            grammar: Some(grammar.clone()),
            stop_ids: vec![256],
            ..request(prompt(3 + n * 9, n, 260), 800)
        })
        .collect();
    let texts = |proposals, speculate| {
        let options = EngineOptions { max_sequences: 8, max_model_len: 1000, speculate, ..OPTIONS };
        let mut engine = dflash_decode::Engine::new(&models.0, proposals, options).unwrap();
        let found = answers(&mut engine, &requests, 1);
        found.iter().for_each(check_answer);
        found.iter().map(Answer::ids).collect::<Vec<_>>()
    };
    let plain = texts(Proposals::None, Speculate::Auto);
    for proposals in [Proposals::Draft(&models.1), Proposals::Ngram { size: 2, tokens: 5 }] {
        for speculate in [Speculate::Auto, Speculate::Tokens(3)] {
            let found = texts(proposals, speculate);
            let rejects =
                matches!((proposals, speculate), (Proposals::Draft(..), Speculate::Tokens(_)));
            for (number, (found, plain)) in found.iter().zip(&plain).enumerate() {
                // With a fixed number of drafted tokens, sampled texts differ from plain ones.
                if number % 2 == 0 || !rejects {
                    assert_eq!(found, plain, "{proposals:?} {speculate} {number}");
                }
            }
        }
    }
}

#[test]
fn a_grammar_goes_with_what_else_changes_logits() {
    let models = models(260, 5);
    let grammar = bytes().compile(&GrammarSource::JsonSchema(json!({"enum": [12, 34]}))).unwrap();
    let asked = |adjustments: LogitAdjustments| Request {
        adjustments,
        grammar: Some(grammar.clone()),
        stop_ids: vec![256],
        ..request(prompt(9, 1, 260), 20)
    };
    let said = |adjustments| {
        let asked = asked(adjustments);
        answers(&mut engine(&models, OPTIONS), &[asked], 0).remove(0).ids()
    };
    for first in [b'1', b'3'] {
        let bias = vec![(first.into(), 50.0), (b'x'.into(), 100.0)];
        let text = said(LogitAdjustments { logit_bias: bias, ..LogitAdjustments::default() });
        assert_eq!(text[0], i64::from(first));
    }
    // The text is complete before it reaches this many tokens.
    let short = said(LogitAdjustments { min_tokens: 15, ..LogitAdjustments::default() });
    assert!(short.len() <= 15 + 32 && short.last() == Some(&256), "{short:?}");
    let one = Request { max_new_tokens: 1, ..asked(LogitAdjustments::default()) };
    let cut = answers(&mut engine(&models, OPTIONS), &[one], 0).remove(0);
    assert_eq!((cut.finish, cut.ids().len()), (Some(Finish::Length), 1));
}
