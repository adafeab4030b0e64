//! A report as Markdown, and as one HTML page with plots.

use std::fmt::Write;

use dflash_report::chart::{BarChart, Chart, STYLE, escape};

use crate::figures::mean;
use crate::report::{EvalReport, Measured};
use crate::table::{self, Table};
use dflash_run::EvalMode;

/// Maximum number of points of a line over prompt lengths: each is the mean over equally many
/// answers.
const BINS: usize = 8;
/// Minimum number of answers per point.
const LEAST_IN_BIN: usize = 4;

/// Everything but the plots.
pub(crate) fn markdown(report: &EvalReport) -> String {
    let mut text = "# Evaluation\n\n".to_owned();
    for (name, value) in facts(report) {
        let _ = writeln!(text, "- {name}: {value}");
    }
    for table in tables(report) {
        let _ = write!(text, "\n## {}\n\n{}", table.title, markdown_table(&table));
    }
    if report.comparison.is_some() {
        let _ = write!(text, "\n{}\n", report.legend());
    }
    text
}

/// The page, which needs no other file.
pub(crate) fn html(report: &EvalReport) -> String {
    let facts: String = facts(report)
        .iter()
        .map(|(name, value)| format!("<tr><td>{name}</td><td>{}</td></tr>\n", escape(value)))
        .collect();
    let tables: String = tables(report).iter().map(html_table).collect();
    let charts: String = report.modes().into_iter().map(|mode| charts(report, mode)).collect();
    let legend = escape(&report.legend());
    let target = escape(&report.target);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <title>dflash eval: {target}</title><style>{STYLE}</style></head><body>\n\
         <h1>Evaluation of {target}</h1>\n<table>\n{facts}</table>\n{charts}{tables}\
         <p>{legend}</p>\n</body></html>\n"
    )
}

fn facts(report: &EvalReport) -> Vec<(&'static str, String)> {
    let mib = |mib: f64| format!("{mib:.0} MiB");
    let mut facts = vec![("target", report.target.clone())];
    facts.extend(report.endpoint.clone().map(|endpoint| ("endpoint", endpoint)));
    facts.extend(report.drafts.iter().map(|draft| ("draft", draft.name.clone())));
    facts.extend(report.prompts_facts().into_iter().map(|prompts| ("prompts", prompts)));
    facts.push(("longest answer", format!("{} tokens", report.max_new_tokens)));
    facts.push(("seed", report.seed.to_string()));
    if !report.device.is_empty() {
        facts.push(("device", report.device.clone()));
    }
    facts.extend(report.memory.process_mib.map(|peak| ("peak memory of the process", mib(peak))));
    facts.extend(report.memory.device_mib.map(|peak| ("peak memory of the GPU", mib(peak))));
    for fact in report.repetition_facts() {
        facts.push((if fact.is_grave { "warning" } else { "note" }, fact.text));
    }
    for fact in report.lossless_facts() {
        facts.push(("lossless", fact.text));
        facts.extend(fact.differences.into_iter().map(|difference| ("difference", difference)));
    }
    facts.extend(report.notes().into_iter().map(|note| ("note", note)));
    facts
}

fn tables(report: &EvalReport) -> Vec<Table> {
    let mut tables = table::summary(report);
    tables.push(table::details(report));
    tables.push(table::slots(report));
    tables.extend(report.comparison.as_ref().map(|other| table::changes(report, other)));
    tables.retain(|table| !table.rows.is_empty());
    tables
}

fn markdown_table(table: &Table) -> String {
    let line = |cells: &[String]| {
        let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let rule = |column: usize| if column < table.text_columns { "---" } else { "---:" };
    let rules: Vec<&str> = (0..table.columns.len()).map(rule).collect();
    let rows: String = table.rows.iter().map(|row| line(row)).collect();
    format!("{}| {} |\n{rows}", line(&table.columns), rules.join(" | "))
}

fn html_table(table: &Table) -> String {
    let row = |cells: &[String], tag: &str| {
        let cell = |(column, cell): (usize, &String)| {
            let class = if column < table.text_columns { "" } else { " class=\"n\"" };
            format!("<{tag}{class}>{}</{tag}>", escape(cell))
        };
        let cells: String = cells.iter().enumerate().map(cell).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let rows: String = table.rows.iter().map(|cells| row(cells, "td")).collect();
    let title = escape(&table.title);
    format!("<h2>{title}</h2>\n<table>\n{}{rows}</table>\n", row(&table.columns, "th"))
}

/// The plots of one mode.
fn charts(report: &EvalReport, mode: EvalMode) -> String {
    let drafted: Vec<&Measured> =
        report.results.iter().filter(|one| one.mode == mode && !one.is_plain()).collect();
    let plots = [by_position(report, &drafted).html(), by_set(report, &drafted).html()];
    let plots = plots.concat() + &by_prompt_length(&drafted).html();
    match plots.is_empty() {
        true => String::new(),
        false => {
            let mode = escape(&mode.to_string());
            format!("<h2>Plots, {mode}</h2>\n<div class=\"charts\">\n{plots}</div>\n")
        }
    }
}

fn by_position(report: &EvalReport, drafted: &[&Measured]) -> Chart {
    let one_set = drafted.iter().all(|one| one.set == drafted[0].set);
    let lines = drafted.iter().map(|one| {
        let name = match one_set {
            true => one.draft.clone(),
            false => format!("{}, {}", report.title(&one.set), one.draft),
        };
        let shares = one.figures.acceptance_by_slot.iter().enumerate();
        let points = shares.filter_map(|(slot, share)| Some((slot as f64, 100.0 * (*share)?)));
        (name, points.collect::<Vec<_>>())
    });
    Chart {
        title: "Acceptance by position, % of steps".into(),
        axis: "position",
        lines: lines.filter(|(_, points)| !points.is_empty()).collect(),
    }
}

fn by_set(report: &EvalReport, drafted: &[&Measured]) -> BarChart {
    let mut sets: Vec<&str> = Vec::new();
    let mut drafts: Vec<&str> = Vec::new();
    for one in drafted {
        if !sets.contains(&one.set.as_str()) {
            sets.push(&one.set);
        }
        if !drafts.contains(&one.draft.as_str()) {
            drafts.push(&one.draft);
        }
    }
    let value = |draft: &str, set: &str| {
        let found = drafted.iter().find(|one| one.draft == draft && one.set == set);
        found.and_then(|one| one.table_speed_up())
    };
    let series = drafts.iter().map(|draft| {
        (draft.to_string(), sets.iter().map(|set| value(draft, set)).collect::<Vec<_>>())
    });
    BarChart {
        title: "Speed-up by set (plain decoding is 1)".into(),
        categories: sets.iter().map(|set| report.title(set).to_owned()).collect(),
        series: series.collect(),
        mark: 1.0,
    }
}

/// Mean tau of answers to prompts of about the same length, over all sets.
fn by_prompt_length(drafted: &[&Measured]) -> Chart {
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for one in drafted {
        let points = one.answers.iter().filter_map(|answer| {
            let tau = answer.verification.as_ref()?.acceptance_length()?;
            Some((answer.prompt_tokens as f64, tau))
        });
        match lines.iter_mut().find(|(name, _)| *name == one.draft) {
            Some((_, known)) => known.extend(points),
            None => lines.push((one.draft.clone(), points.collect())),
        }
    }
    lines.iter_mut().for_each(|(_, points)| *points = binned(std::mem::take(points)));
    lines.retain(|(_, points)| !points.is_empty());
    Chart { title: "Tau by prompt length".into(), axis: "tokens of the prompt", lines }
}

/// Means over equally many points, in order.
fn binned(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let size = points.len().div_ceil(BINS).max(LEAST_IN_BIN);
    let middle = |bin: &[(f64, f64)]| {
        let x = mean(bin.iter().map(|point| point.0))?;
        Some((x, mean(bin.iter().map(|point| point.1))?))
    };
    points.chunks(size).filter_map(middle).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn markdown_has_a_table_for_each_way() {
        let text = markdown(&report(4.0));
        for line in [
            "## Speed-up and tau, greedy\n\n| set | baseline | run speed-up | tau |\n| --- | ---: | ---: | ---: |\n| GSM8K | 1.00x | 4.00x | 2.83 |\n",
            "## Acceptance by position",
            "- lossless: yes: 8 of 8 answers identical to plain greedy decoding, 0 tied, 0 differ (alpaca, run, greedy)\n",
        ] {
            assert!(text.contains(line), "{line}\n---\n{text}");
        }
    }

    #[test]
    fn the_page_draws_three_plots_for_each_way_and_escapes_names() {
        let mut report = report(4.0);
        report.target = "<b>".into();
        let page = html(&report);
        assert_eq!(page.matches("<svg").count(), 6);
        for title in ["Acceptance by position", "Speed-up by set", "Tau by prompt length"] {
            assert_eq!(page.matches(&format!("<b>{title}")).count(), 2, "{title}");
        }
        assert!(page.contains("Evaluation of &lt;b&gt;") && !page.contains("<b></h1>"));
        assert!(!page.contains("http://") || page.contains("http://www.w3.org/2000/svg"));
        assert!(!page.contains("<script") && !page.contains("src="));
    }

    #[test]
    fn lengths_are_binned_in_order() {
        let points: Vec<(f64, f64)> = (0..80).rev().map(|x| (f64::from(x), 2.0)).collect();
        let bins = binned(points);
        assert_eq!((bins.len(), bins[0], bins[7]), (8, (4.5, 2.0), (74.5, 2.0)));
        assert_eq!(binned(vec![(1.0, 3.0)]), [(1.0, 3.0)]);
        assert_eq!(binned(Vec::new()), []);
    }
}
