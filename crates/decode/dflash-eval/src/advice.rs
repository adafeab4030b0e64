//! Advice from the results: how many tokens to propose, and where a draft costs time.

use std::collections::BTreeMap;

use serde_json::json;

use crate::report::{DraftFacts, EvalReport, Measured};

/// Suffix of a draft's name if its length was chosen in each step.
pub const AUTO_SUFFIX: &str = " auto";
/// A speed-up below this is slower by more than noise.
const COSTS: f64 = 0.98;

/// A draft's best length at one concurrency, over all sets.
#[derive(Debug, Clone, PartialEq)]
struct Best {
    concurrency: usize,
    tokens: usize,
    /// Relative to plain decoding, by the times of single steps.
    speed_up: f64,
}

impl EvalReport {
    /// Sentences about every draft whose steps were timed.
    pub fn advice(&self) -> Vec<String> {
        let drafts = self.drafts.iter().filter(|draft| !draft.label.ends_with(AUTO_SUFFIX));
        drafts.flat_map(|draft| self.advice_on(&draft.label, &draft.name)).collect()
    }

    fn advice_on(&self, label: &str, name: &str) -> Vec<String> {
        let best = self.best_lengths(label);
        if best.is_empty() {
            return Vec::new();
        }
        let mut lines: Vec<String> = best.iter().map(|best| best.to_line(label)).collect();
        for one in self.results.iter().filter(|one| one.draft == label) {
            if let Some(speed_up) = one.table_speed_up().filter(|&speed_up| speed_up < COSTS) {
                let (set, mode) = (self.title(&one.set), one.mode);
                lines.push(format!(
                    "{label}: costs time on {set}, {mode}: {speed_up:.2} times plain decoding with \
                     whole blocks"
                ));
            }
        }
        let draft = self.drafts.iter().find(|draft| draft.label == label);
        let most = best.iter().map(|best| best.tokens).max().unwrap_or(0);
        match draft.filter(|draft| draft.weights.is_some() && most > 0) {
            Some(DraftFacts { head: Some(head), .. }) => lines.push(format!(
                "{label}: no other engine serves a draft whose head is {head} yet; dflash serve does"
            )),
            Some(_) => {
                let config = vllm_config(name, &best);
                lines.push(format!("{label}: for vLLM, --speculative-config '{config}'"));
            }
            None => {}
        }
        lines
    }

    /// One entry per concurrency, the smallest first.
    fn best_lengths(&self, label: &str) -> Vec<Best> {
        let mut timed: BTreeMap<usize, &[f64]> = BTreeMap::new();
        let auto = format!("{label}{AUTO_SUFFIX}");
        for one in self.results.iter().filter(|one| one.draft == auto) {
            timed.insert(one.mode.concurrency, &one.step_seconds);
        }
        let best = |(concurrency, seconds): (usize, &[f64])| {
            let shares = self.shares(label, concurrency);
            let (tokens, speed_up) = best_length(&shares, seconds)?;
            Some(Best { concurrency, tokens, speed_up })
        };
        timed.into_iter().filter_map(best).collect()
    }

    /// The share of steps that accepted each slot, over all sets.
    fn shares(&self, label: &str, concurrency: usize) -> Vec<f64> {
        let with_slots = |one: &&Measured| {
            one.draft == label
                && one.mode.concurrency == concurrency
                && one.figures.acceptance_by_slot.len() > 1
        };
        let all: Vec<&Measured> = self.results.iter().filter(with_slots).collect();
        let slots = all.iter().map(|one| one.figures.acceptance_by_slot.len()).min().unwrap_or(1);
        let share = |slot: usize| {
            let of = |one: &&Measured| one.figures.acceptance_by_slot[slot].unwrap_or_default();
            all.iter().map(of).sum::<f64>() / all.len() as f64
        };
        (1..slots).map(share).collect()
    }
}

impl Best {
    fn to_line(&self, label: &str) -> String {
        let Self { concurrency, tokens, speed_up } = self;
        let at = match concurrency {
            1 => "one answer at a time".to_owned(),
            count => format!("{count} answers at a time"),
        };
        match tokens {
            0 => format!("{label}, {at}: no proposals; every length costs time here"),
            _ => format!(
                "{label}, {at}: {tokens} proposals; by the times of single steps {speed_up:.2} times \
                 plain decoding"
            ),
        }
    }
}

/// The number of proposals with the most tokens per second, and its speed-up over plain decoding.
/// `shares` of steps accept each slot; `seconds` are those of a step with no proposals, with one
/// and so on.
fn best_length(shares: &[f64], seconds: &[f64]) -> Option<(usize, f64)> {
    let plain = *seconds.first().filter(|seconds| **seconds > 0.0)?;
    let mut tokens = 1.0;
    let mut best = (0, 1.0);
    for (slot, (share, seconds)) in shares.iter().zip(&seconds[1..]).enumerate() {
        tokens += share;
        let speed_up = tokens * plain / seconds;
        if speed_up > best.1 {
            best = (slot + 1, speed_up);
        }
    }
    (!shares.is_empty()).then_some(best)
}

/// vLLM's settings, with a schedule by number of requests if the best length changes.
fn vllm_config(model: &str, best: &[Best]) -> String {
    let most = best.iter().map(|best| best.tokens).max().unwrap_or(0);
    let mut ranges: Vec<[usize; 3]> = Vec::new();
    for Best { concurrency, tokens, .. } in best {
        match ranges.last_mut() {
            Some([_, end, length]) if length == tokens => *end = *concurrency,
            Some([_, end, _]) => {
                let start = *end + 1;
                ranges.push([start, *concurrency, *tokens]);
            }
            None => ranges.push([1, *concurrency, *tokens]),
        }
    }
    let mut config = json!({ "method": "dflash", "model": model, "num_speculative_tokens": most });
    if ranges.len() > 1 {
        config["num_speculative_tokens_per_batch_size"] = json!(ranges);
    }
    config.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{GREEDY, report};

    #[test]
    fn the_best_length_is_where_tokens_a_second_are_most() {
        let check = |seconds: &[f64], expect: Option<(usize, f64)>| {
            let found = best_length(&[0.9, 0.8, 0.1], seconds);
            assert_eq!(found.map(|(length, _)| length), expect.map(|(length, _)| length));
            if let (Some((_, found)), Some((_, expect))) = (found, expect) {
                assert!((found - expect).abs() < 1e-9, "{found} {expect}");
            }
        };
        check(&[1.0, 1.2, 1.3, 1.4], Some((2, 2.7 / 1.3)));
        check(&[1.0, 1.2, 1.9, 2.6], Some((1, 1.9 / 1.2)));
        check(&[1.0, 2.0, 3.0, 4.0], Some((0, 1.0)));
        check(&[0.0, 2.0, 3.0, 4.0], None);
        check(&[], None);
    }

    #[test]
    fn vllm_gets_a_schedule_where_lengths_differ() {
        let best = |concurrency, tokens| Best { concurrency, tokens, speed_up: 2.0 };
        assert_eq!(
            vllm_config("d", &[best(1, 7), best(4, 7), best(16, 3), best(64, 0)]),
            r#"{"method":"dflash","model":"d","num_speculative_tokens":7,"num_speculative_tokens_per_batch_size":[[1,4,7],[5,16,3],[17,64,0]]}"#
        );
        let config = vllm_config("d", &[best(1, 5), best(8, 5)]);
        assert!(config.ends_with(r#""num_speculative_tokens":5}"#), "{config}");
    }

    #[test]
    fn advice_is_on_drafts_whose_steps_were_timed() {
        let mut report = report(0.5);
        assert_eq!(report.advice(), Vec::<String>::new());
        let mut auto = report.results[1].clone();
        auto.draft = "run auto".into();
        auto.step_seconds = vec![1.0, 1.1, 1.2, 1.3];
        assert_eq!(auto.mode, GREEDY);
        report.results.push(auto);
        let advice = report.advice();
        let says = |part: &str| advice.iter().any(|line| line.contains(part));
        assert!(says("run, one answer at a time: 3 proposals"), "{advice:?}");
        assert!(says("run: costs time on GSM8K, greedy: 0.50 times plain"), "{advice:?}");
        assert!(
            says(r#"--speculative-config '{"method":"dflash","model":"drafts/run""#),
            "{advice:?}"
        );
        assert!(report.to_string().contains("advice  run, one answer"));
        report.drafts[0].head = Some("markov".into());
        let advice = report.advice().join("\n");
        assert!(!advice.contains("--speculative-config"), "{advice}");
        assert!(advice.contains("head is markov yet; dflash serve does"), "{advice}");
    }
}
