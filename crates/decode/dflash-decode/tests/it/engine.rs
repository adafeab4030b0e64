//! Sequences decoded together: the same results as alone, sampled from the target's distribution.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use dflash_decode::LogitAdjustments;
use dflash_decode::{
    Engine, EngineOptions, Finish, Limits, NewToken, Output, Proposals, Request, Sampling,
    SequenceId, compare,
};
use dflash_draft::LoadedDraft;
use dflash_settings::Speculate;
use dflash_target::Target;

use crate::distributions::log_shares;
use crate::models::{Decoder, draft_config, random_draft, random_target};

pub(crate) const OPTIONS: EngineOptions = EngineOptions {
    max_sequences: 8,
    max_model_len: 400,
    prefill_tokens: 24,
    prefix_bytes: 1 << 20,
    speculate: Speculate::Tokens(1024),
};

pub(crate) fn prompt(length: usize, seed: usize, vocab: i64) -> Vec<i64> {
    (0..length).map(|at| ((at * 7 + seed * 13 + at * at) as i64) % vocab).collect()
}

pub(crate) fn request(prompt: Vec<i64>, max_new_tokens: usize) -> Request {
    Request {
        prompt,
        max_new_tokens,
        stop_ids: vec![],
        sampling: Sampling::GREEDY,
        adjustments: LogitAdjustments::default(),
        grammar: None,
        seed: 0,
        logprobs: None,
        prompt_logprobs: false,
        speculative: true,
    }
}

pub(crate) fn models(vocab: i64, seed: i64) -> (Target, LoadedDraft) {
    let target = random_target(vocab, seed);
    let draft = random_draft(draft_config(&target, 4), seed);
    (target, draft)
}

pub(crate) fn engine<'a>(
    (target, draft): &'a (Target, LoadedDraft),
    options: EngineOptions,
) -> Engine<'a> {
    Engine::new(target, Proposals::Draft(draft), options).unwrap()
}

/// The result of a request.
#[derive(Debug, Default, Clone)]
pub(crate) struct Answer {
    tokens: Vec<NewToken>,
    pub(crate) finish: Option<Finish>,
    pub(crate) prompt: Vec<dflash_decode::Logprob>,
    pub(crate) cached: usize,
    pub(crate) accepted: usize,
    pub(crate) rejected: usize,
}

impl Answer {
    pub(crate) fn ids(&self) -> Vec<i64> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    fn add(&mut self, output: Output) {
        assert!(self.finish.is_none(), "nothing comes after the end");
        if let Some(block) = output.block {
            self.accepted += block.accepted;
            self.rejected += block.proposed.len() - block.accepted;
        }
        self.tokens.extend(output.tokens);
        self.prompt.extend(output.prompt);
        (self.finish, self.cached) = (output.finish, output.cached_tokens);
    }
}

/// Answers all requests, each as soon as there is room; requests arrive `stagger` steps apart.
pub(crate) fn answers(
    engine: &mut Engine<'_>,
    requests: &[Request],
    stagger: usize,
) -> Vec<Answer> {
    let mut asked: HashMap<SequenceId, usize> = HashMap::new();
    let mut answers = vec![Answer::default(); requests.len()];
    let (mut next, mut step) = (0, 0);
    while next < requests.len() || !engine.is_empty() {
        let due = |next: usize| next < requests.len() && step >= next * stagger;
        while due(next) && engine.has_room() {
            asked.insert(engine.add(requests[next].clone()), next);
            next += 1;
        }
        for output in engine.step().unwrap() {
            answers[asked[&output.id]].add(output);
        }
        step += 1;
    }
    answers
}

#[test]
fn every_text_is_that_of_plain_decoding() {
    let (mut accepted, mut rejected) = (0, 0);
    for (case, stagger) in [(1, 0), (2, 3), (3, 7)] {
        let models = models(5, case);
        let mut engine = engine(&models, OPTIONS);
        let requests: Vec<Request> = (0..20)
            .map(|n| Request {
                stop_ids: if n % 4 == 0 { vec![2] } else { vec![] },
                speculative: n % 5 != 1,
                ..request(prompt(1 + n * 5 % 67, n, 5), 1 + n * 7 % 40)
            })
            .collect();
        let mut plain = Decoder::plain(&models.0, Sampling::GREEDY);
        let answers = answers(&mut engine, &requests, stagger);
        for (request, answer) in requests.iter().zip(&answers) {
            let limits = Limits {
                max_new_tokens: request.max_new_tokens,
                stop_ids: request.stop_ids.clone(),
            };
            let go = AtomicBool::new(false);
            let expected = plain.generate(&request.prompt, &limits, &go).unwrap();
            let texts = [expected.tokens.as_slice(), &answer.ids()];
            let difference = compare(&models.0, &request.prompt, texts, None);
            assert!(difference.as_ref().is_none_or(|d| d.is_tie()), "{case}: {difference:?}");
            if difference.is_none() {
                let finish = if expected.finished { Finish::Stop } else { Finish::Length };
                assert_eq!(answer.finish, Some(finish));
            }
            assert_eq!(
                answer.accepted + answer.rejected > 0,
                request.speculative && answer.tokens.len() > 1
            );
        }
        accepted += answers.iter().map(|answer| answer.accepted).sum::<usize>();
        rejected += answers.iter().map(|answer| answer.rejected).sum::<usize>();
    }
    assert!(accepted > 60 && rejected > 60, "{accepted} accepted, {rejected} rejected");
}

#[test]
fn a_request_is_answered_alike_alone_and_in_company() {
    let models = models(30, 4);
    let sampled = |n: usize| Request {
        sampling: Sampling { temperature: 0.8, top_p: 0.9, top_k: Some(12), min_p: 0.0 },
        seed: n as u64,
        logprobs: Some(3),
        ..request(prompt(3 + n * 11, n, 30), 30)
    };
    let requests: Vec<Request> = (0..12).map(sampled).collect();
    let together = answers(&mut engine(&models, OPTIONS), &requests, 1);
    let texts: Vec<Vec<i64>> = together.iter().map(Answer::ids).collect();
    assert!(texts.windows(2).all(|pair| pair[0] != pair[1]), "seeds and prompts differ");
    for (request, text) in requests.iter().zip(&texts) {
        let alone = answers(&mut engine(&models, OPTIONS), std::slice::from_ref(request), 0);
        assert_eq!(alone[0].ids(), *text);
    }
}

/// Texts do not depend on what proposes tokens, how many, or how that number is chosen.
#[test]
fn what_is_proposed_changes_no_text() {
    let models = models(30, 5);
    let (target, draft) = &models;
    let requests: Vec<Request> = (0..10)
        .map(|n| Request {
            sampling: if n % 2 == 0 { Sampling::GREEDY } else { Sampling::at(0.7) },
            seed: n as u64,
            ..request(prompt(3 + n * 9, n, 30), 40)
        })
        .collect();
    let texts = |proposals, speculate, max_sequences| -> Vec<Vec<i64>> {
        let options = EngineOptions { speculate, max_sequences, ..OPTIONS };
        let mut engine = Engine::new(target, proposals, options).unwrap();
        answers(&mut engine, &requests, 1).iter().map(Answer::ids).collect()
    };
    let plain = texts(Proposals::None, Speculate::Auto, 1);
    assert!(plain.windows(2).all(|pair| pair[0] != pair[1]), "seeds and prompts differ");
    for proposals in [Proposals::Draft(draft), Proposals::Ngram { size: 2, tokens: 5 }] {
        for speculate in
            [Speculate::Auto, Speculate::Off, Speculate::Tokens(1), Speculate::Tokens(9)]
        {
            for max_sequences in [1, 8] {
                let found = texts(proposals, speculate, max_sequences);
                let rejects = matches!(proposals, Proposals::Draft(..))
                    && matches!(speculate, Speculate::Tokens(_));
                for (number, (found, plain)) in found.iter().zip(&plain).enumerate() {
                    if number % 2 == 0 || !rejects {
                        assert_eq!(found, plain, "{proposals:?} {speculate} {max_sequences}");
                    }
                }
            }
        }
    }
    // With a fixed number of tokens, a draft's sampled texts differ from plain ones but do not
    // depend on other sequences.
    let fixed = |sequences| texts(Proposals::Draft(draft), Speculate::Tokens(9), sequences);
    let (alone, together) = (fixed(1), fixed(8));
    assert_eq!(alone, together);
    assert!(alone.iter().zip(&plain).skip(1).step_by(2).all(|(text, plain)| text != plain));
}

#[test]
fn logprobs_are_the_targets_own() {
    let models = models(12, 6);
    let asked = Request {
        sampling: Sampling { top_k: Some(2), ..Sampling::at(1.5) },
        logprobs: Some(4),
        ..request(prompt(9, 1, 12), 25)
    };
    let answer = answers(&mut engine(&models, OPTIONS), std::slice::from_ref(&asked), 0).remove(0);
    let mut ids = asked.prompt.clone();
    for token in &answer.tokens {
        let expected = log_shares(&models.0, &ids);
        let found = token.logprob.as_ref().unwrap();
        assert!((found.chosen - expected[token.id as usize]).abs() < 1e-4, "{token:?}");
        let mut best: Vec<f64> = expected.clone();
        best.sort_by(|a, b| b.total_cmp(a));
        assert_eq!(found.top.len(), 4);
        for (rank, (id, share)) in found.top.iter().enumerate() {
            assert!(
                (share - best[rank]).abs() < 1e-4 && (share - expected[*id as usize]).abs() < 1e-4
            );
        }
        ids.push(token.id);
    }
}

/// In pieces, next to other sequences, and even if another sequence has the same prompt.
#[test]
fn a_prompt_is_told_with_the_targets_own_shares() {
    let models = models(12, 6);
    let plain = request(prompt(90, 1, 12), 6);
    let told = |prompt: Vec<i64>, max_new_tokens| Request {
        logprobs: Some(3),
        prompt_logprobs: true,
        ..request(prompt, max_new_tokens)
    };
    let requests = [
        plain.clone(),
        told(plain.prompt.clone(), 6),
        told(plain.prompt.clone(), 0),
        told(prompt(1, 2, 12), 0),
        told(prompt(33, 2, 12), 1),
    ];
    let mut warm = engine(&models, OPTIONS);
    answers(&mut warm, std::slice::from_ref(&plain), 0);
    let found = answers(&mut warm, &requests, 1);
    assert!(found[0].cached > 80 && found[0].prompt.is_empty());
    assert_eq!(found[1].ids(), found[0].ids());
    for (asked, answer) in requests.iter().zip(&found).skip(1) {
        assert_eq!((answer.cached, answer.ids().len()), (0, asked.max_new_tokens));
        assert_eq!(answer.finish, Some(Finish::Length));
        assert_eq!(answer.prompt.len(), asked.prompt.len() - 1);
        for (at, token) in answer.prompt.iter().enumerate() {
            let expected = log_shares(&models.0, &asked.prompt[..=at]);
            let of_token = expected[asked.prompt[at + 1] as usize];
            assert!((token.chosen - of_token).abs() < 1e-4, "{at}: {token:?}, {of_token}");
            assert_eq!(token.top.len(), 3);
            for (id, share) in &token.top {
                assert!((share - expected[*id as usize]).abs() < 1e-4, "{at}: {token:?}");
            }
        }
    }
}

#[test]
fn a_prompt_that_begins_alike_is_not_read_again() {
    let models = models(40, 7);
    let long = prompt(90, 3, 40);
    let follow_up = |answer: &Answer| {
        let turn = [long.clone(), answer.ids(), prompt(10, 5, 40)].concat();
        request(turn, 30)
    };
    let mut warm = engine(&models, OPTIONS);
    let first = answers(&mut warm, &[request(long.clone(), 20)], 0).remove(0);
    assert_eq!(first.cached, 0);
    assert!(warm.cache_bytes().1 > 0);
    let next = follow_up(&first);
    let second = answers(&mut warm, std::slice::from_ref(&next), 0).remove(0);
    // The prompt and all of the answer except its last token.
    assert!((109..=110).contains(&second.cached), "{}", second.cached);
    let cold = answers(&mut engine(&models, OPTIONS), std::slice::from_ref(&next), 0).remove(0);
    assert_eq!((cold.cached, cold.ids()), (0, second.ids()));
    // An identical prompt still has to read its last token.
    let again = answers(&mut warm, &[request(long.clone(), 20)], 0).remove(0);
    assert_eq!((again.cached, again.ids()), (89, first.ids()));
    let other = answers(&mut warm, &[request(prompt(90, 4, 40), 20)], 0).remove(0);
    assert_eq!(other.cached, 0);
    // A sequence that drafts cannot reuse a prefix without the draft's cache.
    let mut plain_first = engine(&models, OPTIONS);
    let plain = Request { speculative: false, ..request(long.clone(), 20) };
    answers(&mut plain_first, &[plain], 0);
    let drafted = answers(&mut plain_first, std::slice::from_ref(&next), 0).remove(0);
    assert_eq!((drafted.cached, drafted.ids()), (0, cold.ids()));
}

#[test]
fn sequences_that_come_together_share_the_beginning_of_their_prompts() {
    let models = models(40, 8);
    let shared = prompt(70, 3, 40);
    let requests: Vec<Request> =
        (0..4).map(|n| request([shared.clone(), prompt(4, n, 40)].concat(), 12)).collect();
    let answers_of = |options| answers(&mut engine(&models, options), &requests, 0);
    let warm = answers_of(OPTIONS);
    assert_eq!(warm[0].cached, 0);
    assert!(warm[1..].iter().all(|answer| answer.cached >= 70), "{warm:?}");
    let alone: Vec<Vec<i64>> = requests
        .iter()
        .map(|request| answers(&mut engine(&models, OPTIONS), std::slice::from_ref(request), 0))
        .map(|answers| answers[0].ids())
        .collect();
    assert_eq!(warm.iter().map(Answer::ids).collect::<Vec<_>>(), alone);
}

#[test]
fn kept_caches_stay_within_their_bytes() {
    let models = models(20, 9);
    let most = 200_000;
    let mut engine = engine(&models, EngineOptions { prefix_bytes: most, ..OPTIONS });
    let mut held = Vec::new();
    for n in 0..30 {
        answers(&mut engine, &[request(prompt(20 + 9 * n, n, 20), 5)], 0);
        let (live, kept) = engine.cache_bytes();
        assert!(live == 0 && kept <= most, "{live} {kept}");
        held.push(kept);
    }
    assert!(held[29] > most / 2, "{held:?}");
    let mut none = self::engine(&models, EngineOptions { prefix_bytes: 0, ..OPTIONS });
    answers(&mut none, &[request(prompt(60, 1, 20), 5)], 0);
    assert_eq!(none.cache_bytes(), (0, 0));
}

#[test]
fn a_dropped_sequence_frees_its_place_and_leaves_the_others_alone() {
    let models = models(20, 10);
    let options = EngineOptions { max_sequences: 3, ..OPTIONS };
    let mut engine = engine(&models, options);
    let requests: Vec<Request> = (0..3).map(|n| request(prompt(30, n, 20), 60)).collect();
    let ids: Vec<SequenceId> = requests.iter().map(|r| engine.add(r.clone())).collect();
    assert!(!engine.has_room());
    let mut kept: HashMap<SequenceId, Answer> = HashMap::new();
    for step in 0.. {
        if step == 2 {
            // One is in the middle of its prompt, another in the middle of its answer.
            engine.remove(ids[2]);
            engine.remove(ids[0]);
            assert!(engine.has_room() && engine.len() == 1);
        }
        for output in engine.step().unwrap() {
            kept.entry(output.id).or_default().add(output);
        }
        if engine.is_empty() {
            break;
        }
    }
    engine.remove(ids[0]);
    assert!(kept.get(&ids[2]).is_none_or(|answer| answer.finish.is_none()));
    let alone = answers(&mut self::engine(&models, OPTIONS), &requests[1..2], 0);
    assert_eq!(kept[&ids[1]].ids(), alone[0].ids());
}

#[test]
fn a_long_prompt_does_not_stall_the_others() {
    let models = models(20, 11);
    let mut engine = engine(&models, OPTIONS);
    let short = engine.add(request(prompt(5, 1, 20), 60));
    engine.step().unwrap();
    engine.add(request(prompt(300, 2, 20), 5));
    // 300 tokens in pieces of 24: a dozen steps, in each of which the other sequence advances.
    for _ in 0..12 {
        let outputs = engine.step().unwrap();
        assert_eq!(outputs.iter().map(|output| output.id).collect::<Vec<_>>(), [short]);
    }
}

#[test]
fn a_short_prompt_does_not_wait_for_the_long_ones_before_it() {
    let models = models(20, 11);
    let mut engine = engine(&models, OPTIONS);
    for n in 0..7 {
        engine.add(request(prompt(300, n, 20), 5));
    }
    engine.step().unwrap();
    let short = engine.add(request(prompt(3, 9, 20), 5));
    let outputs = engine.step().unwrap();
    assert_eq!(outputs.iter().map(|output| output.id).collect::<Vec<_>>(), [short]);
}

#[test]
fn a_sequence_that_rests_says_what_it_would_have_said() {
    let models = models(20, 12);
    let options = EngineOptions { max_sequences: 1, ..OPTIONS };
    let requests: Vec<Request> = (0..3).map(|n| request(prompt(30, n, 20), 40)).collect();
    let mut engine = engine(&models, options);
    let ids: Vec<SequenceId> = requests
        .iter()
        .map(|request| {
            let id = engine.add(request.clone());
            engine.rest(id);
            assert!(engine.has_room() && engine.cache_bytes().0 > 0);
            id
        })
        .collect();
    let mut found: HashMap<SequenceId, Answer> = HashMap::new();
    let mut left = ids.clone();
    for turn in 0.. {
        let Some(&id) = left.get(turn % left.len().max(1)) else { break };
        engine.wake(id);
        // In the middle of prompts and of answers.
        for output in engine.step().unwrap() {
            assert_eq!(output.id, id);
            found.entry(id).or_default().add(output);
        }
        engine.rest(id);
        left.retain(|id| found.get(id).is_none_or(|answer| answer.finish.is_none()));
    }
    let alone = answers(&mut self::engine(&models, options), &requests, 0);
    for (id, alone) in ids.iter().zip(&alone) {
        assert_eq!(found[id].ids(), alone.ids());
    }
    assert_eq!(engine.cache_bytes().0, 0);
    let dropped = engine.add(requests[0].clone());
    engine.rest(dropped);
    engine.remove(dropped);
    assert_eq!(engine.cache_bytes().0, 0);
}
