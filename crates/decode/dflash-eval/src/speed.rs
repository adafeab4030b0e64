//! Speed of two decoding modes on the same prompts.

use serde::{Deserialize, Serialize};

use crate::answer::Answer;

/// Tokens per second of both decoding modes, over the same prompts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// All tokens divided by all seconds, speculative.
    pub speculative: f64,
    /// The same, plain. This and the values derived from it are `None` if nothing was decoded
    /// plainly.
    pub plain: Option<f64>,
    /// `speculative / plain`.
    pub speed_up: Option<f64>,
    /// Median over answers, speculative.
    pub median_speculative: f64,
    /// Median over answers, plain.
    pub median_plain: Option<f64>,
    /// Median over answers of their own ratio.
    pub median_speed_up: Option<f64>,
}

/// Tokens and seconds of an answer, or of a part of it.
pub(crate) type Timing = fn(&Answer) -> (f64, f64);

/// From the prompt to the last token.
pub(crate) const WHOLE: Timing = |answer| (answer.tokens as f64, answer.total_s);
/// From the first token to the last.
pub(crate) const DECODE: Timing = |answer| (answer.decode_tokens(), answer.decode_s());

/// Tokens per second; no answer is so fast that a nanosecond matters.
pub(crate) fn rate((tokens, seconds): (f64, f64)) -> f64 {
    tokens / seconds.max(1e-9)
}

/// All tokens divided by all seconds.
pub(crate) fn total_rate<'a>(answers: impl Iterator<Item = &'a Answer>, timing: Timing) -> f64 {
    rate(
        answers.map(timing).fold((0.0, 0.0), |(tokens, seconds), (more, longer)| {
            (tokens + more, seconds + longer)
        }),
    )
}

pub(crate) fn ratio(above: f64, below: f64) -> Option<f64> {
    (below > 0.0).then(|| above / below)
}

impl Speed {
    /// From `[speculative, plain]` answers, pair by pair; without plain ones if there are none.
    pub(crate) fn of(pairs: &[(&Answer, Option<&Answer>)], timing: Timing) -> Self {
        let plain: Vec<&Answer> = pairs.iter().filter_map(|(_, plain)| *plain).collect();
        let rates =
            |pair: &(&Answer, Option<&Answer>)| ratio(rate(timing(pair.0)), rate(timing(pair.1?)));
        let total = total_rate(pairs.iter().map(|pair| pair.0), timing);
        let total_plain = (!plain.is_empty()).then(|| total_rate(plain.iter().copied(), timing));
        let of_each = |answer: &&Answer| rate(timing(answer));
        Self {
            speculative: total,
            plain: total_plain,
            speed_up: total_plain.and_then(|plain| ratio(total, plain)),
            median_speculative: median(pairs.iter().map(|pair| of_each(&pair.0)).collect())
                .unwrap_or_default(),
            median_plain: median(plain.iter().map(of_each).collect()),
            median_speed_up: median(pairs.iter().filter_map(rates).collect()),
        }
    }
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

    fn answer(tokens: usize, total_s: f64) -> Answer {
        Answer { tokens, total_s, ..Answer::default() }
    }

    #[test]
    fn totals_weigh_long_answers_and_medians_do_not() {
        let timings = [(10, 1.0, 2.0), (90, 1.0, 18.0), (10, 1.0, 5.0)]
            .map(|(tokens, fast, slow)| (answer(tokens, fast), answer(tokens, slow)));
        let pairs: Vec<_> = timings.iter().map(|(fast, slow)| (fast, Some(slow))).collect();
        let speed = Speed::of(&pairs, WHOLE);
        assert!((speed.speculative - 110.0 / 3.0).abs() < 1e-9);
        assert!((speed.plain.unwrap() - 4.4).abs() < 1e-9);
        assert!((speed.speed_up.unwrap() - 25.0 / 3.0).abs() < 1e-9);
        assert_eq!((speed.median_speculative, speed.median_plain), (10.0, Some(5.0)));
        assert_eq!(speed.median_speed_up, Some(5.0));
        let alone: Vec<_> = timings.iter().map(|(fast, _)| (fast, None)).collect();
        assert_eq!(Speed::of(&alone, WHOLE).speed_up, None);
        assert_eq!(Speed::of(&[], WHOLE), Speed::default());
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
