//! Compares frequencies of sampled texts with the target's probabilities.

use std::collections::HashMap;

use dflash_decode::{EngineOptions, LogitAdjustments, Request, Sampling};
use dflash_draft::LoadedDraft;
use dflash_target::Target;

use crate::engine::{OPTIONS, answers, engine, models, prompt, request};

/// The target's log-probabilities after `ids`.
pub(crate) fn log_shares(target: &Target, ids: &[i64]) -> Vec<f64> {
    let logits_1v = logits(target, ids);
    Vec::try_from(logits_1v.log_softmax(-1, tch::Kind::Double).get(0)).unwrap()
}

/// The target's logits [1, V] after `ids`.
fn logits(target: &Target, ids: &[i64]) -> tch::Tensor {
    let (length, last) = (ids.len() as i64, [target.num_layers() as u32]);
    let hidden = &target.forward_packed(&tch::Tensor::from_slice(ids), &[0, length], &last)[0];
    target.logits(&hidden.narrow(0, length - 1, 1))
}

/// An independent implementation of temperature and filters on logits.
fn filtered(logits: &[f64], sampling: Sampling) -> Vec<f64> {
    let weight: Vec<f64> =
        logits.iter().map(|logit| (logit / sampling.temperature).exp()).collect();
    let mut order: Vec<usize> = (0..weight.len()).collect();
    order.sort_by(|&a, &b| weight[b].total_cmp(&weight[a]));
    let least = sampling.min_p * weight[order[0]];
    order.retain(|&id| weight[id] >= least);
    order.truncate(sampling.top_k.unwrap_or(usize::MAX));
    let total: f64 = order.iter().map(|&id| weight[id]).sum();
    let mut before = 0.0;
    order.retain(|&id| {
        let stays = before < sampling.top_p;
        before += weight[id] / total;
        stays
    });
    let total: f64 = order.iter().map(|&id| weight[id]).sum();
    let share = |id: usize| if order.contains(&id) { weight[id] / total } else { 0.0 };
    (0..weight.len()).map(share).collect()
}

/// Samples texts of three tokens and compares their frequencies with the target's probabilities.
fn check_distribution(sampling: Sampling, speculative: bool) {
    check_adjusted(sampling, &LogitAdjustments::default(), speculative);
}

fn check_adjusted(sampling: Sampling, adjustments: &LogitAdjustments, speculative: bool) {
    const VOCAB: i64 = 5;
    let asked = Request {
        sampling,
        adjustments: adjustments.clone(),
        stop_ids: vec![END],
        speculative,
        ..request(prompt(5, 2, VOCAB), 3)
    };
    let prompt = asked.prompt.clone();
    check_texts(&models(VOCAB, 21), &asked, |logits, text| {
        adjust(logits, (&prompt, text), adjustments);
    });
}

/// Samples texts and compares their frequencies with the target's probabilities, whose logits
/// `changed` modifies after each text.
pub(crate) fn check_texts(
    models: &(Target, LoadedDraft),
    asked: &Request,
    changed: impl Fn(&mut [f64], &[i64]),
) {
    let Request { sampling, speculative, prompt: ids, .. } = asked;
    let samples = 3000;
    let requests: Vec<Request> =
        (0..samples).map(|seed| Request { seed, ..asked.clone() }).collect();
    let options = EngineOptions { max_sequences: 100, prefill_tokens: 1000, ..OPTIONS };
    let answers = answers(&mut engine(models, options), &requests, 0);
    let accepted: usize = answers.iter().map(|answer| answer.accepted).sum();
    let rejected: usize = answers.iter().map(|answer| answer.rejected).sum();
    if *speculative {
        assert!(accepted > 300 && rejected > 300, "{accepted} accepted, {rejected} rejected");
    }
    let mut counts: HashMap<Vec<i64>, f64> = HashMap::new();
    answers.iter().for_each(|answer| *counts.entry(answer.ids()).or_default() += 1.0);
    let (mut statistic, mut cells, mut rare) = (0.0, 0.0, (0.0, 0.0));
    let mut texts: Vec<(Vec<i64>, f64)> = vec![(Vec::new(), 1.0)];
    for _ in 0..asked.max_new_tokens {
        let longer = texts.iter().flat_map(|(text, probability)| {
            if text.last().is_some_and(|last| asked.stop_ids.contains(last)) {
                return vec![(text.clone(), *probability)];
            }
            let logits_1v = logits(&models.0, &[&ids[..], text].concat());
            let mut logits: Vec<f64> =
                Vec::try_from(logits_1v.to_kind(tch::Kind::Double).get(0)).unwrap();
            changed(&mut logits, text);
            let shares = filtered(&logits, *sampling);
            let next = move |(id, share)| ([&text[..], &[id as i64]].concat(), probability * share);
            let said = shares.into_iter().enumerate().filter(|(_, share)| *share > 0.0);
            said.map(next).collect()
        });
        texts = longer.collect();
    }
    for (text, probability) in texts {
        let (expected, found) =
            (samples as f64 * probability, counts.remove(&text).unwrap_or_default());
        if expected < 5.0 {
            rare = (rare.0 + expected, rare.1 + found);
        } else {
            statistic += (found - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    assert!(counts.is_empty(), "these cannot be said: {counts:?}");
    if rare.0 > 5.0 {
        statistic += (rare.1 - rare.0).powi(2) / rare.0;
        cells += 1.0;
    }
    // The mean equals the degrees of freedom; five standard deviations above it are rarer than one
    // in 100,000 seeds.
    let freedom: f64 = cells - 1.0;
    let most = freedom + 5.0 * (2.0 * freedom).sqrt() + 8.0;
    println!("{sampling:?} {speculative}: chi-square {statistic:.1}, {freedom} degrees of freedom");
    assert!(statistic < most, "{sampling:?}: chi-square {statistic}, above {most}");
}

/// End token of these tests.
const END: i64 = 4;

/// Applies `adjustments` to the target's logits after `prompt` and `text`.
fn adjust(logits: &mut [f64], (prompt, text): (&[i64], &[i64]), adjustments: &LogitAdjustments) {
    for (id, logit) in logits.iter_mut().enumerate() {
        let times = text.iter().filter(|&&token| token == id as i64).count() as f64;
        let of_token = adjustments.logit_bias.iter().filter(|(of, _)| *of == id as i64);
        *logit += of_token.map(|(_, bias)| bias).sum::<f64>();
        if times > 0.0 || prompt.contains(&(id as i64)) {
            let penalty = adjustments.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        *logit -= adjustments.frequency_penalty * times;
        *logit -= adjustments.presence_penalty * times.min(1.0);
        if id as i64 == END && text.len() < adjustments.min_tokens {
            *logit = f64::NEG_INFINITY;
        }
    }
}

#[test]
fn adjusted_texts_follow_the_adjusted_distribution_with_a_draft_and_without() {
    let all = LogitAdjustments::default();
    for adjustments in [
        LogitAdjustments { frequency_penalty: 0.9, presence_penalty: -0.4, ..all.clone() },
        LogitAdjustments { logit_bias: vec![(1, 0.7), (3, -1.2)], min_tokens: 2, ..all.clone() },
        LogitAdjustments { repetition_penalty: 1.8, ..all.clone() },
        LogitAdjustments { repetition_penalty: 0.6, frequency_penalty: 0.5, ..all },
    ] {
        for speculative in [true, false] {
            check_adjusted(Sampling::at(1.1), &adjustments, speculative);
        }
    }
}

#[test]
fn adjusted_greedy_texts_are_the_same_with_a_draft_and_without() {
    let models = models(30, 5);
    let adjusted = |repetition_penalty, frequency_penalty, speculative| -> Vec<i64> {
        let adjustments = LogitAdjustments {
            repetition_penalty,
            frequency_penalty,
            ..LogitAdjustments::default()
        };
        let asked = Request { adjustments, speculative, ..request(prompt(9, 1, 30), 40) };
        answers(&mut engine(&models, OPTIONS), &[asked], 0)[0].ids()
    };
    let plain = adjusted(1.0, 0.0, true);
    for (repetition, frequency) in [(1.7, 0.0), (1.0, 2.0), (1.3, 0.5)] {
        let text = adjusted(repetition, frequency, true);
        assert_eq!(text, adjusted(repetition, frequency, false), "{repetition} {frequency}");
        assert_ne!(text, plain, "{repetition} {frequency}");
    }
    // No token is repeated if repetition costs more than any logit.
    let mut text = adjusted(1.0, 1e6, true);
    text.truncate(30);
    text.sort_unstable();
    assert!(text.iter().copied().eq(0..30), "all tokens once before any twice: {text:?}");
}

#[test]
fn sampled_texts_follow_the_filtered_distribution_of_the_target() {
    let all = Sampling::at(1.3);
    for sampling in [
        Sampling::at(0.6),
        all,
        Sampling { top_k: Some(3), ..all },
        Sampling { top_p: 0.8, ..all },
        Sampling { top_p: 0.9, top_k: Some(4), ..Sampling::at(2.0) },
        Sampling { min_p: 0.3, ..all },
    ] {
        check_distribution(sampling, true);
    }
    check_distribution(all, false);
}
