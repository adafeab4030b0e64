//! Tables of a report, independent of their output format.

use crate::baseline::Comparison;
use crate::report::{EvalReport, Measured};
use dflash_run::EvalMode;

/// Rows of cells under names of columns. The first columns are text, the rest numbers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) columns: Vec<String>,
    /// Number of text columns at the left.
    pub(crate) text_columns: usize,
    pub(crate) rows: Vec<Vec<String>>,
}

/// Shown for an unknown metric.
const UNKNOWN: &str = "-";

impl Table {
    fn new(title: impl Into<String>, columns: &[&str], text_columns: usize) -> Self {
        let columns = columns.iter().map(|&column| column.to_owned()).collect();
        Self { title: title.into(), columns, text_columns, rows: Vec::new() }
    }
}

/// The paper's table for each mode: a row per set, speed-up and tau of each draft, plain decoding
/// as 1.
pub(crate) fn summary(report: &EvalReport) -> Vec<Table> {
    report.modes().into_iter().map(|mode| summary_of(report, mode)).collect()
}

fn summary_of(report: &EvalReport, mode: EvalMode) -> Table {
    let of_way: Vec<&Measured> = report.results.iter().filter(|one| one.mode == mode).collect();
    let drafts = distinct(of_way.iter().map(|one| one.draft.as_str()));
    let sets = distinct(of_way.iter().map(|one| one.set.as_str()));
    let mut table = Table::new(format!("Speed-up and tau, {mode}"), &["set"], 1);
    for draft in &drafts {
        let plain = of_way.iter().any(|one| one.draft == *draft && one.is_plain());
        table.columns.push(if plain { "baseline".into() } else { format!("{draft} speed-up") });
        table.columns.extend((!plain).then(|| "tau".to_owned()));
    }
    let find =
        |set: &str, draft: &str| of_way.iter().find(|one| one.set == set && one.draft == draft);
    for set in &sets {
        let cells = drafts.iter().flat_map(|draft| cells(find(set, draft).copied()));
        table.rows.push(std::iter::once(report.title(set).to_owned()).chain(cells).collect());
    }
    if sets.len() > 1 {
        let cells = drafts.iter().flat_map(|draft| {
            let of_draft: Vec<&Measured> =
                sets.iter().filter_map(|set| find(set, draft).copied()).collect();
            mean_cells(&of_draft)
        });
        table.rows.push(std::iter::once("mean".to_owned()).chain(cells).collect());
    }
    table
}

fn cells(measured: Option<&Measured>) -> Vec<String> {
    let Some(measured) = measured else { return vec![UNKNOWN.into(), UNKNOWN.into()] };
    let tau = (!measured.is_plain()).then(|| fixed(measured.table_tau(), 2));
    std::iter::once(times(measured.table_speed_up())).chain(tau).collect()
}

/// The mean over sets, if every set has the metric.
fn mean_cells(of_draft: &[&Measured]) -> Vec<String> {
    let mean = |of: fn(&Measured) -> Option<f64>| {
        let values: Option<Vec<f64>> = of_draft.iter().map(|one| of(one)).collect();
        values.and_then(|values| crate::figures::mean(values.into_iter()))
    };
    let plain = of_draft.iter().any(|one| one.is_plain());
    let tau = (!plain).then(|| fixed(mean(Measured::table_tau), 2));
    std::iter::once(times(mean(Measured::table_speed_up))).chain(tau).collect()
}

/// Every result with its main metrics and their standard errors.
pub(crate) fn details(report: &EvalReport) -> Table {
    let columns = [
        "set",
        "way",
        "draft",
        "answers",
        "tokens",
        "tau per step",
        "tau per response",
        "tokens/s",
        "tokens/s after the first",
        "speed-up",
        "after the first token",
        "first token, ms",
    ];
    let mut table = Table::new("Figures, \u{b1} standard error", &columns, 3);
    for one in &report.results {
        let with_noise = |name: &str, value: Option<f64>, digits: usize| {
            let noise = one.noise.get(name);
            match (value, noise) {
                (Some(_), Some(noise)) => {
                    format!("{} \u{b1}{noise:.digits$}", fixed(value, digits))
                }
                _ => fixed(value, digits),
            }
        };
        let figures = &one.figures;
        let milliseconds = figures.median_time_to_first_token_s.map(|seconds| 1e3 * seconds);
        table.rows.push(vec![
            report.title(&one.set).to_owned(),
            one.mode.to_string(),
            one.draft.clone(),
            one.responses.to_string(),
            one.tokens.to_string(),
            with_noise("acceptance_length", figures.acceptance_length, 3),
            with_noise("acceptance_length_per_response", figures.acceptance_length_per_response, 3),
            with_noise("tokens_per_second", figures.tokens_per_second, 1),
            with_noise("decode_tokens_per_second", figures.decode_tokens_per_second, 1),
            with_noise("speed_up", figures.speed_up, 2),
            with_noise("decode_speed_up", figures.decode_speed_up, 2),
            fixed(milliseconds, 1),
        ]);
    }
    table
}

/// The share of all steps in which each slot was accepted, for every result that has it.
pub(crate) fn slots(report: &EvalReport) -> Table {
    let mut table =
        Table::new("Acceptance by position, % of all steps", &["set", "way", "draft"], 3);
    let shown = || report.results.iter().filter(|one| !one.figures.acceptance_by_slot.is_empty());
    let most = shown().map(|one| one.figures.acceptance_by_slot.len()).max().unwrap_or(1);
    table.columns.extend((1..most).map(|slot| slot.to_string()));
    for one in shown() {
        let names = [report.title(&one.set).to_owned(), one.mode.to_string(), one.draft.clone()];
        let share = |slot: usize| {
            let share = one.figures.acceptance_by_slot.get(slot).copied().flatten();
            fixed(share.map(|share| 100.0 * share), 1)
        };
        table.rows.push(names.into_iter().chain((1..most).map(share)).collect());
    }
    table
}

/// The changes since an earlier report.
pub(crate) fn changes(report: &EvalReport, comparison: &Comparison) -> Table {
    let columns = [
        "set",
        "way",
        "draft",
        "figure",
        "",
        "before",
        "now",
        "change",
        "noise",
        "times the noise",
    ];
    let mut table = Table::new(format!("Against {}", comparison.baseline), &columns, 5);
    for change in &comparison.changes {
        let draft = match change.draft == change.draft_before {
            true => change.draft.clone(),
            false => format!("{} (before: {})", change.draft, change.draft_before),
        };
        table.rows.push(vec![
            report.title(&change.set).to_owned(),
            change.mode.to_string(),
            draft,
            change.figure.clone(),
            change.verdict().to_owned(),
            significant(change.before),
            significant(change.now),
            format!("{:+.4}", change.change),
            change.noise.map_or(UNKNOWN.into(), significant),
            change.times_noise.map_or(UNKNOWN.into(), |times| format!("{times:.1}")),
        ]);
    }
    table
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found: Vec<&str> = Vec::new();
    for name in names {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
}

fn times(value: Option<f64>) -> String {
    value.map_or(UNKNOWN.into(), |value| format!("{value:.2}x"))
}

fn fixed(value: Option<f64>, digits: usize) -> String {
    value.map_or(UNKNOWN.into(), |value| format!("{value:.digits$}"))
}

/// Four decimals, more for small values.
fn significant(value: f64) -> String {
    if value.abs() < 0.01 && value != 0.0 { format!("{value:.2e}") } else { format!("{value:.4}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn the_fields_table_has_a_row_for_each_set_and_a_baseline_of_one() {
        let tables = summary(&report(4.0));
        assert_eq!(tables.len(), 2);
        assert_eq!(tables[0].title, "Speed-up and tau, greedy");
        assert_eq!(tables[1].title, "Speed-up and tau, temperature 1, thinking");
        assert_eq!(tables[0].columns, ["set", "baseline", "run speed-up", "tau"]);
        assert_eq!(tables[0].rows[0], ["GSM8K", "1.00x", "4.00x", "2.83"]);
        assert_eq!(tables[0].rows[1], ["Alpaca", "1.00x", "2.00x", "2.83"]);
        assert_eq!(tables[0].rows[2], ["mean", "1.00x", "3.00x", "2.83"]);
        assert_eq!(tables[1].rows.len(), 1);
    }

    #[test]
    fn every_result_has_a_row_of_figures_and_every_draft_one_of_slots() {
        let report = report(4.0);
        let details = details(&report);
        assert_eq!(details.rows.len(), 6);
        assert!(details.rows.iter().all(|row| row.len() == details.columns.len()));
        assert!(details.rows[1][5].starts_with("2.833 \u{b1}0."), "{:?}", details.rows[1]);
        assert_eq!(details.rows[0][5], "-");
        let slots = slots(&report);
        assert_eq!((slots.rows.len(), slots.columns.len()), (3, 6));
        assert_eq!(slots.rows[0][3], "91.7");
    }
}
