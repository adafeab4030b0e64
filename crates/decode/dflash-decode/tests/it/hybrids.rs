//! Targets other than plain dense layers, such as recurrent layers, latent attention, experts,
//! sinks, chunks and shared keys: the reference vectors' models, decoded together with a random
//! draft.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use dflash_decode::{Engine, EngineOptions, Limits, Proposals, Request, Sampling, compare};
use dflash_draft::{DraftConfig, HeadFields, LayerKind, LoadedDraft};
use dflash_golden::entries;
use dflash_settings::Speculate;
use dflash_target::{Target, TargetOptions};
use tch::{Device, Kind};

use crate::engine::{Answer, answers, request};
use crate::models::{Decoder, random_draft};

const NAMES: [&str; 13] = [
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "deepseek_v3",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "glm4_moe",
    "gpt_oss",
    "llama4",
    "minimax_m2",
    "phi3",
    "qwen3_moe",
];
const OPTIONS: EngineOptions = EngineOptions {
    max_sequences: 8,
    max_model_len: 400,
    prefill_tokens: 24,
    prefix_bytes: 1 << 22,
    speculate: Speculate::Tokens(1024),
};

fn dir(name: &str) -> PathBuf {
    let mut all = ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None));
    let found = all.find(|entry| entry.name == name);
    found.unwrap_or_else(|| panic!("no vectors of {name}")).path
}

fn load(dir: &Path) -> Target {
    tch::set_num_threads(1);
    Target::load(dir, &TargetOptions { device: Device::Cpu, dtype: Kind::Float }).unwrap()
}

fn draft_for(target: &Target, block_size: usize) -> LoadedDraft {
    let config = target.config();
    let draft = DraftConfig {
        hidden_size: config.hidden_size,
        intermediate_size: 48,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        attention_bias: false,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: None,
        layers: vec![LayerKind::Full],
        sliding_window: None,
        block_size,
        mask_token_id: config.vocab_size - 1,
        target_layer_ids: vec![0, 2],
        num_target_layers: Some(target.num_layers()),
        vocab_size: config.vocab_size,
        max_position_embeddings: config.max_position_embeddings,
        initializer_range: 0.3,
        eos_token_id: None,
        head: HeadFields::default(),
    };
    random_draft(draft, 7)
}

fn prompt(length: usize, seed: usize) -> Vec<i64> {
    (0..length).map(|at| ((at * 7 + seed * 13 + at * at) % 96) as i64).collect()
}

/// The answers equal those of plain decoding, except for ties.
fn check(target: &Target, requests: &[Request], answers: &[Answer]) {
    let mut plain = Decoder::plain(target, Sampling::GREEDY);
    for (request, answer) in requests.iter().zip(answers) {
        let limits = Limits { max_new_tokens: request.max_new_tokens, stop_ids: vec![] };
        let expected = plain.generate(&request.prompt, &limits, &AtomicBool::new(false)).unwrap();
        let texts = [expected.tokens.as_slice(), &answer.ids()];
        let difference = compare(target, &request.prompt, texts, None);
        assert!(difference.as_ref().is_none_or(|d| d.is_tie()), "{difference:?}");
    }
}

#[test]
fn every_text_is_that_of_plain_decoding() {
    for name in NAMES {
        let target = load(&dir(name));
        let draft = draft_for(&target, 5);
        let mut engine = Engine::new(&target, Proposals::Draft(&draft), OPTIONS).unwrap();
        let requests: Vec<Request> = (0..8)
            .map(|n| Request {
                speculative: n % 4 != 1,
                ..request(prompt(1 + n * 11, n), 3 + n * 3)
            })
            .collect();
        let answers = answers(&mut engine, &requests, 2);
        check(&target, &requests, &answers);
        let rejected: usize = answers.iter().map(|answer| answer.rejected).sum();
        assert!(rejected > 20, "{name}: {rejected} proposals were taken back");
    }
}

#[test]
fn one_sequence_at_a_time_by_draft_and_by_look_up() {
    for name in NAMES {
        let target = load(&dir(name));
        let draft = draft_for(&target, 6);
        let greedy = || Sampling::GREEDY;
        let mut speculator = Decoder::speculative(&target, &draft, greedy()).unwrap();
        let mut ngram = Decoder::ngram(&target, (2, 8), greedy());
        let mut plain = Decoder::plain(&target, greedy());
        let (limits, go) =
            (Limits { max_new_tokens: 40, stop_ids: vec![] }, AtomicBool::new(false));
        for (length, seed) in [(1, 3), (17, 1), (90, 2)] {
            let prompt = prompt(length, seed);
            let expected = plain.generate(&prompt, &limits, &go).unwrap().tokens;
            let drafted = speculator.generate(&prompt, &limits, &go).unwrap().tokens;
            let looked_up = ngram.generate(&prompt, &limits, &go).unwrap().tokens;
            for tokens in [drafted, looked_up] {
                let difference = compare(&target, &prompt, [&expected, &tokens], None);
                assert!(difference.as_ref().is_none_or(|d| d.is_tie()), "{name}: {difference:?}");
            }
        }
    }
}

/// A common prefix, such as a system prompt: at once, one after the other, and in a continued
/// dialogue. What cannot be copied is read again, and then kept.
#[test]
fn what_prompts_begin_with_is_read_once_or_again_but_never_wrongly() {
    for name in NAMES {
        let target = load(&dir(name));
        let draft = draft_for(&target, 4);
        let start = || Engine::new(&target, Proposals::Draft(&draft), OPTIONS).unwrap();
        let behind = |n: usize| [prompt(50, 5), prompt(9 + n, 6 + n)].concat();
        let ask = |n: usize| request(behind(n), 12);
        // At once: the first sequence stops at the point of divergence, and the others start there,
        // or at the end of a slightly earlier piece if waiting is not worthwhile.
        let together: Vec<Request> = (0..4).map(ask).collect();
        let mut engine = start();
        let found = answers(&mut engine, &together, 0);
        check(&target, &together, &found);
        let cached: Vec<usize> = found.iter().map(|answer| answer.cached).collect();
        assert!(cached[1..].iter().all(|&cached| cached >= 48), "{name}: {cached:?}");
        // One by one: the second reads the prefix again where no state is stored, the third does
        // not.
        let mut engine = start();
        let one_by_one: Vec<Answer> = together
            .iter()
            .map(|one| answers(&mut engine, std::slice::from_ref(one), 0).remove(0))
            .collect();
        check(&target, &together, &one_by_one);
        let cached: Vec<usize> = one_by_one.iter().map(|answer| answer.cached).collect();
        assert_eq!(cached[0], 0, "{name}");
        assert_eq!(cached[1] >= 50, !target.carries_state(), "{name}: {cached:?}");
        assert!(cached[2] >= 50 && cached[3] >= 50, "{name}: {cached:?}");
        // A dialogue: the next prompt begins with the last one and its answer.
        let next = [behind(2), one_by_one[2].ids(), prompt(11, 3)].concat();
        let next = [request(next, 12)];
        let found = answers(&mut engine, &next, 0);
        check(&target, &next, &found);
        assert!(found[0].cached >= behind(2).len() + 11, "{name}: {}", found[0].cached);
    }
}

/// The rotary frequencies of a LongRoPE target depend on the prompt's length: a long prompt is read
/// in one pass regardless of the step size, and shares no rows with a shorter one of the same
/// beginning.
#[test]
fn a_prompt_with_frequencies_of_its_own_is_read_whole_and_shares_nothing() {
    let target = load(&dir("phi3_longrope"));
    let longest = target.longest_in_pieces().unwrap();
    assert!((OPTIONS.prefill_tokens..200).contains(&longest), "{longest}");
    assert_eq!(load(&dir("phi3")).longest_in_pieces(), None);
    let draft = draft_for(&target, 5);
    let lengths = [longest, longest + 1, longest - 3, longest + 50, longest + 1];
    let requests: Vec<Request> =
        lengths.iter().map(|&length| request(prompt(length, 1), 8)).collect();
    for at_once in [true, false] {
        let mut engine = Engine::new(&target, Proposals::Draft(&draft), OPTIONS).unwrap();
        let found: Vec<Answer> = match at_once {
            true => answers(&mut engine, &requests, 0),
            false => requests
                .iter()
                .map(|one| answers(&mut engine, std::slice::from_ref(one), 0).remove(0))
                .collect(),
        };
        check(&target, &requests, &found);
        let cached: Vec<usize> = found.iter().map(|answer| answer.cached).collect();
        assert_eq!((cached[1], cached[3], cached[4]), (0, 0, 0), "{cached:?}");
        assert!(cached[2] > 0, "{cached:?}");
    }
}

#[test]
fn a_block_too_long_to_take_back_is_refused() {
    let hybrid = load(&dir("qwen3_5"));
    let draft = draft_for(&hybrid, 129);
    let refused = Decoder::speculative(&hybrid, &draft, Sampling::GREEDY);
    let Err(error) = refused else { panic!("it is taken") };
    let message = error.to_string();
    assert!(message.contains("129 tokens") && message.contains("128"), "{message}");
    let latent = load(&dir("deepseek_v3"));
    let draft = draft_for(&latent, 129);
    assert!(Decoder::speculative(&latent, &draft, Sampling::GREEDY).is_ok());
}
