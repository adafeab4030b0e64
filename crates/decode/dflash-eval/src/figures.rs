//! The metrics of one set, mode and draft, computed from its answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::answer::{Answer, Verification};
use crate::bootstrap::spread;
use crate::speed::{Span, median, rate, ratio};

/// Measurements of all answers together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Whole {
    /// Seconds from the first request to the last answer, with concurrency above 1: those of `parts`
    /// if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Verify steps of all answers, if they are not known per answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<Verification>,
    /// The parts in which a set was answered, each in all modes in turn, with concurrency above 1:
    /// their spread is the error of the times.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<SetPart>,
}

/// A part of a set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SetPart {
    /// Tokens of its answers.
    pub tokens: usize,
    /// Seconds from its first request to its last answer.
    pub seconds: f64,
}

impl Whole {
    /// Tokens and seconds of `answers`, or of all answers together if these were timed together.
    pub(crate) fn total<'a>(
        &self,
        answers: impl Iterator<Item = &'a Answer>,
        span: Span,
    ) -> (f64, f64) {
        let (tokens, seconds) = span.total(answers);
        match self.seconds.filter(|_| span == Span::Whole) {
            None => (tokens, seconds),
            Some(together) if self.parts.is_empty() => (tokens, together),
            Some(together) => (self.parts.iter().map(|part| part.tokens as f64).sum(), together),
        }
    }

    /// Standard errors of metrics measured over the whole set, by resampling parts; those of
    /// `plain` decoding are the same parts of the set.
    pub(crate) fn noise(&self, plain: Option<&Self>) -> BTreeMap<String, f64> {
        let of_parts = |parts: &[SetPart], drawn: &[usize]| {
            let sum = |of: fn(&SetPart) -> f64| drawn.iter().map(|&at| of(&parts[at])).sum::<f64>();
            rate(sum(|part| part.tokens as f64), sum(|part| part.seconds))
        };
        let plain = plain.filter(|plain| plain.parts.len() == self.parts.len());
        spread(self.parts.len(), |drawn| {
            let own = of_parts(&self.parts, drawn);
            let plain = plain.and_then(|plain| of_parts(&plain.parts, drawn));
            let speed_up = own.zip(plain).and_then(|(own, plain)| ratio(own, plain));
            let named = [("tokens_per_second", own), ("speed_up", speed_up)];
            named.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
        })
    }
}

/// The metrics; `None` if the decoding mode, or the server, does not provide them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Tau over all steps: tokens divided by verify steps.
    pub acceptance_length: Option<f64>,
    /// Tau as papers report it: the mean over answers of each one's tokens divided by its steps.
    pub acceptance_length_per_response: Option<f64>,
    /// Share of all steps in which each slot was accepted, the anchor's first (null).
    pub acceptance_by_slot: Vec<Option<f64>>,
    /// All tokens divided by all seconds, prompts included; with concurrency above 1 by the seconds
    /// from the first request to the last answer.
    pub tokens_per_second: Option<f64>,
    /// Tokens after the first divided by the seconds after it, summed over answers that came in
    /// more than one piece.
    pub decode_tokens_per_second: Option<f64>,
    /// `tokens_per_second` divided by that of plain decoding.
    pub speed_up: Option<f64>,
    /// `decode_tokens_per_second` divided by that of plain decoding.
    pub decode_speed_up: Option<f64>,
    /// Seconds from the prompt to the first token, mean over answers.
    pub time_to_first_token_s: Option<f64>,
    /// The same, median.
    pub median_time_to_first_token_s: Option<f64>,
}

/// Answers to a set, and what was measured over the whole of it.
#[derive(Clone, Copy)]
pub(crate) struct AnsweredSet<'a> {
    pub(crate) answers: &'a [&'a Answer],
    pub(crate) whole: &'a Whole,
}

impl Figures {
    /// The metrics of a set, relative to the `plain` answers to it, if there are any.
    pub(crate) fn of(own: AnsweredSet<'_>, plain: Option<AnsweredSet<'_>>) -> Self {
        let alone = Self::alone(own);
        let plain = plain.map(Self::alone);
        let against = |of: fn(&Self) -> Option<f64>| ratio(of(&alone)?, of(plain.as_ref()?)?);
        Self {
            speed_up: against(|figures| figures.tokens_per_second),
            decode_speed_up: against(|figures| figures.decode_tokens_per_second),
            ..alone
        }
    }

    fn alone(AnsweredSet { answers, whole }: AnsweredSet<'_>) -> Self {
        if answers.is_empty() {
            return Self::default();
        }
        let each: Vec<&Verification> =
            answers.iter().filter_map(|answer| answer.verification.as_ref()).collect();
        let verification =
            whole.verification.clone().unwrap_or_else(|| Verification::sum(each.iter().copied()));
        let lengths: Vec<f64> =
            each.iter().filter_map(|verification| verification.acceptance_length()).collect();
        let per_second = |span| {
            let (tokens, seconds) = whole.total(answers.iter().copied(), span);
            rate(tokens, seconds)
        };
        let first = || answers.iter().map(|answer| answer.first_token_s);
        Self {
            acceptance_length: verification.acceptance_length(),
            acceptance_length_per_response: mean(lengths.iter().copied()),
            acceptance_by_slot: verification.acceptance_by_slot(),
            tokens_per_second: per_second(Span::Whole),
            decode_tokens_per_second: per_second(Span::Decode),
            speed_up: None,
            decode_speed_up: None,
            time_to_first_token_s: mean(first()),
            median_time_to_first_token_s: median(first().collect()),
        }
    }

    /// Every known metric by its name in CSV and JSON; those by slot with the slot's number.
    pub fn named(&self) -> Vec<(String, f64)> {
        let single = [
            ("acceptance_length", self.acceptance_length),
            ("acceptance_length_per_response", self.acceptance_length_per_response),
            ("speed_up", self.speed_up),
            ("decode_speed_up", self.decode_speed_up),
            ("tokens_per_second", self.tokens_per_second),
            ("decode_tokens_per_second", self.decode_tokens_per_second),
            ("time_to_first_token_s", self.time_to_first_token_s),
            ("median_time_to_first_token_s", self.median_time_to_first_token_s),
        ];
        let single = single.into_iter().map(|(name, value)| (name.to_owned(), value));
        let slots = self.acceptance_by_slot.iter().enumerate();
        let slots = slots.map(|(slot, share)| (format!("acceptance_slot_{slot}"), *share));
        single.chain(slots).filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

/// The mean; `None` if there are no values.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(tokens: usize, first_token_s: f64, total_s: f64, accepted: &[usize]) -> Answer {
        let verification = (!accepted.is_empty()).then(|| Verification::of(accepted, 3));
        Answer { tokens, first_token_s, total_s, verification, ..Answer::default() }
    }

    #[test]
    fn figures_follow_from_answers_alone() {
        let drafted = [answer(9, 0.5, 2.5, &[3, 0, 0]), answer(4, 1.5, 2.5, &[2])];
        let plain = [answer(9, 0.5, 4.5, &[]), answer(4, 0.5, 5.5, &[])];
        let (drafted, plain): (Vec<_>, Vec<_>) = (drafted.iter().collect(), plain.iter().collect());
        let none = Whole::default();
        let set = |answers| AnsweredSet { answers, whole: &none };
        let figures = Figures::of(set(&drafted), Some(set(&plain)));
        assert_eq!(figures.acceptance_length, Some(1.0 + 5.0 / 4.0));
        assert_eq!(figures.acceptance_length_per_response, Some((2.0 + 3.0) / 2.0));
        assert_eq!(figures.acceptance_by_slot, [None, Some(0.5), Some(0.5), Some(0.25)]);
        assert_eq!(figures.tokens_per_second, Some(13.0 / 5.0));
        assert_eq!(figures.speed_up, Some(2.0));
        // 8 + 3 tokens in 2 + 1 seconds against 4 + 5.
        assert!((figures.decode_speed_up.unwrap() - 3.0).abs() < 1e-12);
        assert_eq!(figures.time_to_first_token_s, Some(1.0));
        let names: Vec<String> = figures.named().into_iter().map(|(name, _)| name).collect();
        assert!(names.contains(&"acceptance_slot_3".to_owned()), "{names:?}");
        let plain = Figures::of(set(&plain), None);
        assert_eq!((plain.acceptance_length, plain.speed_up), (None, None));
        assert_eq!(Figures::of(set(&[]), None), Figures::default());
    }

    #[test]
    fn parts_of_a_set_tell_the_error_of_its_times() {
        let whole = |seconds: &[f64]| Whole {
            seconds: Some(seconds.iter().sum()),
            verification: None,
            parts: seconds.iter().map(|&seconds| SetPart { tokens: 100, seconds }).collect(),
        };
        let (fast, plain) = (whole(&[1.0, 1.2, 0.8, 1.0]), whole(&[2.0, 2.4, 1.6, 2.0]));
        let noise = fast.noise(Some(&plain));
        // Both are slow in the same parts, so their quotient has a smaller error.
        assert!(noise["tokens_per_second"] > 3.0 && noise["speed_up"] < 1e-9, "{noise:?}");
        assert!(fast.noise(Some(&whole(&[2.0, 1.6, 2.4, 2.0])))["speed_up"] > 0.1);
        assert!(!fast.noise(None).contains_key("speed_up"));
        assert!(whole(&[1.0]).noise(Some(&plain)).is_empty());
    }

    #[test]
    fn what_is_known_of_the_whole_alone_counts() {
        let answers = [answer(10, 0.5, 4.0, &[]), answer(10, 0.5, 4.0, &[])];
        let answers: Vec<_> = answers.iter().collect();
        let verification = Some(Verification { steps: 4, accepted: 12, accepted_by_slot: vec![] });
        let whole = Whole { seconds: Some(5.0), verification, parts: Vec::new() };
        let figures = Figures::of(AnsweredSet { answers: &answers, whole: &whole }, None);
        assert_eq!(figures.tokens_per_second, Some(4.0));
        assert_eq!(figures.acceptance_length, Some(4.0));
        assert_eq!(figures.acceptance_length_per_response, None);
    }
}
