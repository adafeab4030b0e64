//! Speed of two decoding modes on the same prompts.

use serde::{Deserialize, Serialize};

use crate::answer::Answer;
use crate::report::{Measured, Pairs, plain_side};

/// Tokens per second of both decoding modes, over the same prompts. A value is `None` if there were
/// no tokens or no time to divide by.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// All tokens divided by all seconds, speculative.
    pub speculative: Option<f64>,
    /// The same, plain. This and the values derived from it are `None` if nothing was decoded
    /// plainly.
    pub plain: Option<f64>,
    /// `speculative / plain`.
    pub speed_up: Option<f64>,
    /// Median over answers, speculative.
    pub median_speculative: Option<f64>,
    /// Median over answers, plain.
    pub median_plain: Option<f64>,
    /// Median over answers of their own ratio.
    pub median_speed_up: Option<f64>,
}

/// The part of an answer that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Span {
    /// From the prompt to the last token.
    Whole,
    /// From the first token to the last.
    Decode,
}

impl Span {
    /// Tokens and seconds of an answer. One that came in a single piece has no decoding time.
    fn of(self, answer: &Answer) -> (f64, f64) {
        match self {
            Self::Whole => (answer.tokens as f64, answer.total_s),
            Self::Decode => {
                let (tokens, seconds) = (answer.decode_tokens(), answer.decode_s());
                if rate(tokens, seconds).is_some() { (tokens, seconds) } else { (0.0, 0.0) }
            }
        }
    }

    /// Tokens per second of an answer.
    pub(crate) fn rate(self, answer: &Answer) -> Option<f64> {
        let (tokens, seconds) = self.of(answer);
        rate(tokens, seconds)
    }

    /// Tokens and seconds of all answers.
    pub(crate) fn total<'a>(self, answers: impl Iterator<Item = &'a Answer>) -> (f64, f64) {
        sum(answers.map(|answer| self.of(answer)))
    }
}

/// Tokens per second; `None` without tokens or without time.
pub(crate) fn rate(tokens: f64, seconds: f64) -> Option<f64> {
    (tokens > 0.0 && seconds > 0.0).then(|| tokens / seconds)
}

fn sum(timed: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
    timed.fold((0.0, 0.0), |(tokens, seconds), (more, longer)| (tokens + more, seconds + longer))
}

pub(crate) fn ratio(above: f64, below: f64) -> Option<f64> {
    (below > 0.0).then(|| above / below)
}

impl Speed {
    /// Speed of results, each with plain decoding of the same set in the same mode; with one result
    /// the totals are those of its [`Figures`](crate::Figures). Nothing is compared with plain
    /// decoding unless plain decoding answered every set.
    pub(crate) fn of(pooled: &[(&Measured, Option<&Measured>)], span: Span) -> Self {
        let answered = pooled.iter().filter(|(own, _)| !own.answers.is_empty());
        let own = || answered.clone().map(|(own, _)| *own);
        let both: Option<Vec<(&Measured, &Measured)>> = answered
            .clone()
            .map(|(own, plain)| Some((*own, plain.filter(|plain| !plain.answers.is_empty())?)))
            .collect();
        let both = both.unwrap_or_default();
        let total = |one: &Measured| one.whole.total(one.answers.iter(), span);
        let total_plain = |(own, plain): &(&Measured, &Measured)| {
            plain.whole.total(plain_side(own, plain).into_iter(), span)
        };
        let (tokens, seconds) = sum(own().map(total));
        let speculative = rate(tokens, seconds);
        let (tokens, seconds) = sum(both.iter().map(total_plain));
        let plain = rate(tokens, seconds);
        let rates = own().flat_map(|one| &one.answers).filter_map(|answer| span.rate(answer));
        let plain_rates = both.iter().flat_map(|(own, plain)| plain_side(own, plain));
        let ratios = both.iter().flat_map(|(own, plain)| ratios(own, plain, span));
        Self {
            speculative,
            plain,
            speed_up: speculative.zip(plain).and_then(|(own, plain)| ratio(own, plain)),
            median_speculative: median(rates.collect()),
            median_plain: median(plain_rates.filter_map(|answer| span.rate(answer)).collect()),
            median_speed_up: median(ratios.collect()),
        }
    }
}

/// How much faster each answer was than the plain one to the same prompt.
fn ratios(own: &Measured, plain: &Measured, span: Span) -> Vec<f64> {
    let Some(pairs) = Pairs::new(own, plain) else { return Vec::new() };
    let pairs = own.answers.iter().zip(pairs.answers());
    pairs.filter_map(|(own, plain)| ratio(span.rate(own)?, span.rate(plain)?)).collect()
}

/// The middle value, or the mean of the two in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    (count > 0).then(|| (values[(count - 1) / 2] + values[count / 2]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Whole;
    use crate::report::tests::GREEDY;

    fn measured(draft: &str, answers: &[(usize, f64)], plain: Option<&Measured>) -> Measured {
        let answer = |(row, &(tokens, total_s)): (usize, &(usize, f64))| Answer {
            row,
            tokens,
            total_s,
            ..Answer::default()
        };
        let answers = answers.iter().enumerate().map(answer).collect();
        Measured::new("s", GREEDY, draft, answers, Whole::default(), None, plain)
    }

    #[test]
    fn totals_weigh_long_answers_and_medians_do_not() {
        let plain = measured("none", &[(10, 2.0), (90, 18.0), (10, 5.0)], None);
        let drafted = measured("run", &[(10, 1.0), (90, 1.0), (10, 1.0)], Some(&plain));
        let speed = Speed::of(&[(&drafted, Some(&plain))], Span::Whole);
        assert!((speed.speculative.unwrap() - 110.0 / 3.0).abs() < 1e-9);
        assert!((speed.plain.unwrap() - 4.4).abs() < 1e-9);
        assert_eq!(speed.speed_up, drafted.figures.speed_up);
        assert_eq!((speed.median_speculative, speed.median_plain), (Some(10.0), Some(5.0)));
        assert_eq!(speed.median_speed_up, Some(5.0));
        assert_eq!(Speed::of(&[(&drafted, None)], Span::Whole).speed_up, None);
        assert_eq!(Speed::of(&[], Span::Whole), Speed::default());
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn a_set_without_a_plain_answer_is_not_compared() {
        let plain = measured("none", &[(10, 2.0)], None);
        let drafted = measured("run", &[(10, 1.0)], Some(&plain));
        let unanswered = measured("none", &[], None);
        let both = [(&drafted, Some(&plain)), (&drafted, Some(&unanswered))];
        let speed = Speed::of(&both, Span::Whole);
        assert_eq!((speed.speculative, speed.plain, speed.speed_up), (Some(10.0), None, None));
    }

    #[test]
    fn answers_in_one_piece_have_no_decode_rate() {
        let check = |tokens, first_token_s, total_s, expect| {
            let answer = Answer { tokens, first_token_s, total_s, ..Answer::default() };
            assert_eq!(Span::Decode.rate(&answer), expect, "{answer:?}");
        };
        check(5, 1.0, 3.0, Some(2.0));
        check(1, 1.0, 3.0, None);
        check(7, 1.0, 1.0, None);
        let pieces = [(5, 1.0, 3.0), (7, 1.0, 1.0)].map(|(tokens, first_token_s, total_s)| {
            Answer { tokens, first_token_s, total_s, ..Answer::default() }
        });
        assert_eq!(Span::Decode.total(pieces.iter()), (4.0, 2.0));
    }
}
