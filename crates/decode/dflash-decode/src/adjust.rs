//! Adjusts the target's logits as a request specifies, before a token is chosen.
//!
//! Every row of a block follows different tokens, so each is adjusted by the tokens before its own
//! position, including proposals: the distribution is that of plain decoding, and verification
//! preserves it. The grammar is applied last: forbidden tokens get probability 0, so proposals of
//! them are rejected. A draft proposes from its own logits, which costs acceptance but does not
//! change the text.

use std::collections::{BTreeMap, BTreeSet};

use tch::{Kind, Tensor};

use crate::grammar::Grammar;

/// Changes of logits, in order of application (as in vLLM).
#[derive(Debug, Clone, PartialEq)]
pub struct LogitAdjustments {
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(i64, f64)>,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer; 1 for none.
    pub repetition_penalty: f64,
    /// Subtracted from logits once per occurrence in the answer.
    pub frequency_penalty: f64,
    /// Subtracted from logits of tokens that occur in the answer.
    pub presence_penalty: f64,
    /// Minimum answer length before an end token is allowed.
    pub min_tokens: usize,
}

impl Default for LogitAdjustments {
    fn default() -> Self {
        Self {
            logit_bias: Vec::new(),
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            min_tokens: 0,
        }
    }
}

/// Adjustments of one text, with its state so far.
#[derive(Debug)]
pub(crate) struct Adjuster {
    asked: LogitAdjustments,
    /// Bias by token id.
    bias: BTreeMap<i64, f64>,
    stop_ids: Vec<i64>,
    prompt: BTreeSet<i64>,
    /// Occurrences of each token in the answer.
    answer: BTreeMap<i64, usize>,
    tokens: usize,
    grammar: Option<Grammar>,
}

impl Adjuster {
    /// `None` if no adjustment is requested.
    pub(crate) fn new(
        asked: LogitAdjustments,
        grammar: Option<Grammar>,
        prompt: &[i64],
        stop_ids: &[i64],
    ) -> Option<Self> {
        if asked == LogitAdjustments::default() && grammar.is_none() {
            return None;
        }
        let counts_prompt = asked.repetition_penalty != 1.0;
        let mut bias = BTreeMap::new();
        for &(id, more) in &asked.logit_bias {
            *bias.entry(id).or_default() += more;
        }
        Some(Self {
            bias,
            prompt: prompt.iter().copied().filter(|_| counts_prompt).collect(),
            asked,
            stop_ids: stop_ids.to_vec(),
            answer: BTreeMap::new(),
            tokens: 0,
            grammar,
        })
    }

    /// Appends `tokens` to the answer.
    pub(crate) fn take(&mut self, tokens: &[i64]) {
        tokens.iter().for_each(|&id| *self.answer.entry(id).or_default() += 1);
        self.tokens += tokens.len();
        if let Some(grammar) = &mut self.grammar {
            let text = tokens.iter().take_while(|id| !self.stop_ids.contains(id));
            let text: Vec<u32> = text.map(|&id| id as u32).collect();
            grammar.take(&text);
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.grammar.as_ref().is_some_and(Grammar::has_failed)
    }

    /// Logits [B, V] for the position after the answer so far and after each of `proposed`, up to
    /// the first of these that is not allowed.
    pub(crate) fn adjusted(&mut self, logits_bv: &Tensor, proposed: &[i64]) -> Tensor {
        // A copy, since requested log-probabilities refer to the original logits.
        let adjusted_bv = logits_bv.to_kind(Kind::Float).copy();
        let mut answer = self.answer.clone();
        let grammar = self.grammar.as_mut();
        let allowed = grammar.map(|grammar| grammar.allowed(proposed, &self.stop_ids));
        let allowed = allowed.unwrap_or_default();
        for row in 0..adjusted_bv.size()[0] {
            let (logits_v, allowed) = (adjusted_bv.get(row), allowed.get(row as usize));
            let is_end = allowed.is_some_and(|allowed| allowed.is_end(&self.stop_ids));
            // If only an end token is allowed, the text may end at any length.
            let tokens = if is_end { usize::MAX } else { self.tokens + row as usize };
            self.adjust(&logits_v, &answer, tokens);
            if let Some(allowed) = allowed {
                allowed.forbid_others(&logits_v);
            }
            if let Some(&id) = proposed.get(row as usize) {
                *answer.entry(id).or_default() += 1;
            }
        }
        adjusted_bv
    }

    /// Changes the logits `[V]` after an answer of `tokens` tokens.
    fn adjust(&self, logits_v: &Tensor, answer: &BTreeMap<i64, usize>, tokens: usize) {
        let repetition = self.asked.repetition_penalty;
        let ends = self.stop_ids.iter().filter(|_| tokens < self.asked.min_tokens);
        let ids: BTreeSet<i64> = self
            .prompt
            .iter()
            .chain(answer.keys())
            .chain(ends.clone())
            .copied()
            .chain(self.bias.keys().copied())
            .collect();
        let ids: Vec<i64> = ids.into_iter().collect();
        if ids.is_empty() {
            return;
        }
        let ids_k = Tensor::from_slice(&ids).to_device(logits_v.device());
        let logits = logits_v.index_select(0, &ids_k).to_kind(Kind::Double);
        let mut logits: Vec<f64> = Vec::try_from(logits).expect("logits are numbers");
        for (id, logit) in ids.iter().zip(&mut logits) {
            *logit += self.bias.get(id).copied().unwrap_or_default();
            let times = answer.get(id).copied().unwrap_or_default();
            if times > 0 || self.prompt.contains(id) {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
            *logit -= times as f64 * self.asked.frequency_penalty;
            *logit -= if times > 0 { self.asked.presence_penalty } else { 0.0 };
            if ends.clone().any(|end| end == id) {
                *logit = f64::NEG_INFINITY;
            }
        }
        let logits_k =
            Tensor::from_slice(&logits).to_kind(Kind::Float).to_device(logits_v.device());
        let _ = logits_v.shallow_clone().index_copy_(0, &ids_k, &logits_k);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_adjusted_by_what_stands_before_it() {
        let asked = LogitAdjustments {
            logit_bias: vec![(4, 10.0)],
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            min_tokens: 4,
        };
        // The prompt has 0 and 1, the answer 1 twice; 5 is the end token.
        let mut adjuster = Adjuster::new(asked, None, &[0, 1], &[5]).unwrap();
        adjuster.take(&[1]);
        adjuster.take(&[1]);
        let logits = Tensor::from_slice(&[3.0f32, -3.0, 1.0, 2.0, 0.0, 9.0]).expand([3, 6], false);
        let found = adjuster.adjusted(&logits, &[2, 3]);
        let found: Vec<f32> = Vec::try_from(found.flatten(0, -1)).unwrap();
        let none = f32::NEG_INFINITY;
        assert_eq!(found[..6], [1.5, -7.25, 1.0, 2.0, 10.0, none]);
        assert_eq!(found[6..12], [1.5, -7.25, -0.25, 2.0, 10.0, none]);
        // The minimum of four tokens is reached.
        assert_eq!(found[12..], [1.5, -7.25, -0.25, 0.25, 10.0, 9.0]);
        assert_eq!(logits.double_value(&[0, 0]), 3.0);
        assert!(Adjuster::new(LogitAdjustments::default(), None, &[0], &[5]).is_none());
    }
}
