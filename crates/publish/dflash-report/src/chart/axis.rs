//! Axes: where values lie in a drawing, and their round numbers.

use std::ops::Range;

/// Size of a drawing, in its own units; pages scale it.
pub(super) const WIDTH: f64 = 460.0;
pub(super) const HEIGHT: f64 = 220.0;
/// The plot inside it.
pub(super) const LEFT: f64 = 50.0;
pub(super) const RIGHT: f64 = WIDTH - 14.0;
pub(super) const TOP: f64 = 12.0;
pub(super) const BOTTOM: f64 = HEIGHT - 36.0;

/// With fewer values none of them is an exception.
const LEAST_TO_CAP: usize = 12;
/// A maximum so many times the value that nine in ten do not exceed is left out of the range, which
/// then ends at [`CAP`] times that value.
const OUTLYING: f64 = 2.0;
const CAP: f64 = 1.5;

/// An axis over a range of values, drawn between two positions.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    pub(super) values: Range<f64>,
    ends: (f64, f64),
    /// Distance between two round numbers.
    step: f64,
}

impl Axis {
    /// A horizontal axis with about `count` round numbers, at least 1 apart if it counts.
    pub(super) fn across(values: Range<f64>, count: usize, counts: bool) -> Self {
        let step = round_step((values.end - values.start) / count as f64);
        let step = if counts { step.max(1.0) } else { step };
        Self { values, ends: (LEFT, RIGHT), step }
    }

    /// A vertical axis.
    pub(super) fn up(values: Range<f64>) -> Self {
        let step = round_step((values.end - values.start) / 5.0);
        Self { values, ends: (BOTTOM, TOP), step }
    }

    /// Where `value` lies; what is above the range at its end.
    pub(super) fn at(&self, value: f64) -> f64 {
        let value = value.min(self.values.end);
        let share = (value - self.values.start) / (self.values.end - self.values.start);
        self.ends.0 + share * (self.ends.1 - self.ends.0)
    }

    /// The round numbers and their text.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        let first = (self.values.start / self.step - 1e-9).ceil() as i64;
        let last = (self.values.end / self.step + 1e-9).floor() as i64;
        (first..=last).map(|index| index as f64 * self.step).map(|at| (at, self.text(at))).collect()
    }

    /// As many decimals as tell two neighbours apart.
    fn text(&self, value: f64) -> String {
        let value = if value.abs() < self.step * 1e-6 { 0.0 } else { value };
        let decimals = (-self.step.log10().floor()).max(0.0) as usize;
        match decimals {
            _ if value == 0.0 => "0".to_owned(),
            4.. => format!("{value:.0e}"),
            0 if self.values.end.abs() >= 1e6 => format!("{}M", number(value / 1e6)),
            0 if self.values.end.abs() >= 1e4 => format!("{}k", number(value / 1e3)),
            _ => format!("{value:.decimals$}"),
        }
    }
}

/// The round number (1, 2 or 5 times a power of ten) that is not below `raw`.
fn round_step(raw: f64) -> f64 {
    let power = 10_f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= raw * 0.999)
        .unwrap_or(raw)
}

/// From the least to the greatest value, with a margin above and below; from 0 if that is near.
pub(super) fn range(values: impl Iterator<Item = f64>, with_margin: bool) -> Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    if low == high {
        let margin = if low == 0.0 { 1.0 } else { low.abs() / 2.0 };
        return if low >= 0.0 && with_margin {
            0.0..high + margin
        } else {
            low - margin..high + margin
        };
    }
    if !with_margin {
        return low..high;
    }
    let margin = (high - low) * 0.05;
    let floor = if low >= 0.0 && low < 0.4 * high { 0.0 } else { low - margin };
    floor..high + margin
}

/// The top of an axis for `values`, if a few of them at the start of a run are so high that the rest
/// would lie flat at the bottom: they are then drawn at the top.
pub(super) fn capped(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let most = *values.last()?;
    let usual = values[(values.len() * 9).div_ceil(10).min(values.len() - 1)];
    let is_outlying = values.len() >= LEAST_TO_CAP && usual > 0.0 && most > OUTLYING * usual;
    is_outlying.then_some(CAP * usual)
}

/// A number with four digits that mean something.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        return "0".to_owned();
    }
    if size >= 1e6 {
        return format!("{}M", number(value / 1e6));
    }
    if size < 1e-3 {
        return format!("{value:.2e}");
    }
    let decimals = (3.0 - size.log10().floor()).max(0.0) as usize;
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_a_margin_and_begin_at_zero_where_that_is_near() {
        let of = |values: &[f64], margin| range(values.iter().copied(), margin);
        assert_eq!(of(&[1.0, 9.0], false), 1.0..9.0);
        assert_eq!(of(&[1.0, 11.0], true), 0.0..11.5);
        assert_eq!(of(&[90.0, 100.0], true), 89.5..100.5);
        assert_eq!(of(&[4.0], true), 0.0..6.0);
        assert_eq!(of(&[4.0], false), 2.0..6.0);
        assert_eq!(of(&[-4.0], true), -6.0..-2.0);
    }

    #[test]
    fn a_few_high_values_at_the_start_do_not_flatten_the_rest() {
        let curve = |first: f64| [first].into_iter().chain((0..30).map(|_| 4.0));
        assert_eq!(capped(curve(39.0)), Some(6.0));
        assert_eq!(capped(curve(7.0)), None);
        assert_eq!(capped([39.0, 4.0, 4.0].into_iter()), None);
        assert_eq!(Axis::up(0.0..6.0).at(39.0), TOP);
    }

    #[test]
    fn ticks_are_round_and_told_apart() {
        let check = |range: Range<f64>, expect: &[&str]| {
            let ticks = Axis::up(range.clone()).ticks();
            let texts: Vec<&str> = ticks.iter().map(|(_, text)| text.as_str()).collect();
            assert_eq!(texts, expect, "{range:?}");
        };
        check(0.0..1.05, &["0", "0.5", "1.0"]);
        check(0.0..9.4, &["0", "2", "4", "6", "8"]);
        check(3.475..4.02, &["3.6", "3.8", "4.0"]);
        check(0.0..0.0006, &["0", "2e-4", "4e-4", "6e-4"]);
        check(0.0..25_000.0, &["0", "5k", "10k", "15k", "20k", "25k"]);
        check(-1.0..1.0, &["-1.0", "-0.5", "0", "0.5", "1.0"]);
        let steps = Axis::across(1.0..3.0, 6, true).ticks();
        assert_eq!(steps.iter().map(|tick| tick.0).collect::<Vec<_>>(), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn numbers_have_four_digits() {
        let texts = [0.0, 0.25, 12.0, 6e-4, 3.24159, 123_456.0, 2_500_000.0, -0.5].map(number);
        assert_eq!(texts, ["0", "0.25", "12", "6.00e-4", "3.242", "123456", "2.5M", "-0.5"]);
    }
}
