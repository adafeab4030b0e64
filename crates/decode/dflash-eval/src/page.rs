//! A report as Markdown, and as one HTML page with plots.

use std::fmt::Write;

use dflash_report::chart::{Bar, BarChart, Chart, SCRIPT, escape};
use dflash_report::text::{bytes, counted, duration};
use dflash_report::{Page, tile};

use crate::figures::mean;
use crate::report::{EvalReport, Measured};
use crate::speed::Span;
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
        .map(|(name, value)| {
            format!("<tr><th scope=\"row\">{name}</th><td>{}</td></tr>\n", escape(value))
        })
        .collect();
    let tables: String = tables(report).iter().map(html_table).collect();
    let charts: String = report.modes().into_iter().map(|mode| charts(report, mode)).collect();
    let legend = match report.comparison {
        Some(_) => format!("<p class=\"muted\">{}</p>\n", escape(&report.legend())),
        None => String::new(),
    };
    let body = format!(
        "<a class=\"skip\" href=\"#plots\">Skip to the plots</a>\n<div class=\"page\">\n<main>\n{}\
         <div id=\"plots\">{charts}</div>{tables}{legend}\
         <h2>What was measured</h2>\n<div class=\"scroll\"><table class=\"facts\"><tbody>\n{facts}\
         </tbody></table></div>\n</main>\n<footer><p>Written by dflash {}.</p></footer>\n</div>",
        summary(report),
        env!("CARGO_PKG_VERSION")
    );
    let title = format!("dflash eval: {}", report.target);
    Page { title: &title, body: &body, script: SCRIPT, asks_its_server: false }.html()
}

/// The result that the page opens with: the first draft's on the first set.
fn first(report: &EvalReport) -> Option<&Measured> {
    let drafted = || report.results.iter().filter(|one| !one.is_plain());
    drafted().find(|one| !one.is_auto()).or_else(|| drafted().next())
}

/// What the first draft is worth in a sentence, what needs attention, and the few numbers that
/// matter.
fn summary(report: &EvalReport) -> String {
    let known: Vec<bool> =
        report.results.iter().filter_map(|one| Some(one.lossless.as_ref()?.holds)).collect();
    let (word, class) = match known.iter().all(|holds| *holds) {
        _ if known.is_empty() => ("not compared", ""),
        true => ("lossless", "good"),
        false => ("texts differ", "fault"),
    };
    let faults: Vec<String> = report
        .lossless_facts()
        .into_iter()
        .flat_map(|fact| fact.differences)
        .filter(|difference| difference.starts_with("DIFFERS"))
        .collect();
    format!(
        "<header><div class=\"top\"><h1>Evaluation of {}</h1>\
         <span class=\"state {class}\">{word}</span></div>\n<p class=\"lede\">{}</p>\n</header>\n{}{}{}",
        escape(&report.target),
        escape(&sentence(report)),
        alert(&faults, "fault"),
        alert(&report.notes(), ""),
        tiles(report)
    )
}

fn alert(texts: &[String], class: &str) -> String {
    let texts: String = texts.iter().map(|text| format!("<p>{}</p>", escape(text))).collect();
    match texts.is_empty() {
        true => String::new(),
        false => format!("<div class=\"alert {class}\" role=\"note\">{texts}</div>\n"),
    }
}

fn sentence(report: &EvalReport) -> String {
    let Some(one) = first(report) else {
        return "Plain decoding alone was measured: there is no draft to compare.".to_owned();
    };
    let speed = speed_up(one).map(|(value, error)| {
        format!("answers {} as fast as plain decoding", with_error(value, error, "times"))
    });
    let tau = one.table_tau().map(|tau| {
        let most = report.block_size.map(|most| format!(" of at most {most}"));
        let error = one.noise.get("acceptance_length_per_response").copied();
        format!("{}{} per step", with_error(tau, error, "tokens"), most.unwrap_or_default())
    });
    let parts: Vec<String> = [speed, tau].into_iter().flatten().collect();
    let same = match &one.lossless {
        Some(all) if all.holds && all.identical == all.responses => "; every text is the same",
        Some(all) if all.holds => "; every text is the same but for ties",
        Some(_) => "; TEXTS DIFFER from those of plain decoding",
        None => "",
    };
    format!(
        "{} {}, on {} to {} ({}){same}.",
        one.draft,
        if parts.is_empty() { "was not measured".to_owned() } else { parts.join(", with ") },
        counted(one.responses as u64, "answer", "answers"),
        report.title(&one.set),
        one.mode
    )
}

/// The table's speed-up and its standard error.
fn speed_up(one: &Measured) -> Option<(f64, Option<f64>)> {
    let name = if one.mode.concurrency == 1 { "decode_speed_up" } else { "speed_up" };
    Some((one.table_speed_up()?, one.noise.get(name).copied()))
}

fn with_error(value: f64, error: Option<f64>, unit: &str) -> String {
    match error {
        Some(error) => format!("{value:.2} \u{b1} {error:.2} {unit}"),
        None => format!("{value:.2} {unit}"),
    }
}

fn tiles(report: &EvalReport) -> String {
    let Some(one) = first(report) else { return String::new() };
    let rate = |one: &Measured| one.figures.tokens_per_second;
    let plain = crate::report::plain_of(&report.results, one).and_then(rate);
    let same = one.lossless.as_ref().map(|all| format!("{} of {}", all.identical, all.responses));
    let lossless = one.lossless.as_ref().map(|all| match (all.ties.len(), all.failures.len()) {
        (0, 0) => "equal to plain decoding".to_owned(),
        (ties, 0) => format!("equal to plain decoding, {ties} tied"),
        (ties, failures) => format!("equal to plain decoding, {ties} tied, {failures} differ"),
    });
    let tiles = [
        speed_up(one).map(|(value, error)| {
            let text = with_error(value, error, "").trim().to_owned() + "\u{d7}";
            tile("Speed-up", &text, "after the first token")
        }),
        one.table_tau().map(|tau| {
            let error = one.noise.get("acceptance_length_per_response").copied();
            tile("Acceptance length (tau)", with_error(tau, error, "").trim(), "tokens per step")
        }),
        rate(one).map(|rate| {
            let plain = plain.map(|plain| format!("{plain:.1} without the draft"));
            tile("Tokens per second", &format!("{rate:.1}"), &plain.unwrap_or_default())
        }),
        same.map(|same| tile("Identical texts", &same, &lossless.unwrap_or_default())),
        Some(tile("Time", &duration(seconds(report)), "spent on all answers")),
        report
            .memory
            .process_mib
            .map(|mib| tile("Peak memory", &bytes(mib * 1_048_576.0), "of the process")),
    ];
    format!("<dl class=\"tiles\">\n{}</dl>\n", tiles.into_iter().flatten().collect::<String>())
}

/// Seconds spent on the answers of all results, which were made one after the other.
fn seconds(report: &EvalReport) -> f64 {
    let of = |one: &Measured| one.whole.total(one.answers.iter(), Span::Whole).1;
    report.results.iter().map(of).sum()
}

fn facts(report: &EvalReport) -> Vec<(&'static str, String)> {
    let mib = |mib: f64| format!("{mib:.0} MiB");
    let mut facts = vec![("target", report.target.clone())];
    facts.extend(report.endpoint.clone().map(|endpoint| ("endpoint", endpoint)));
    facts.extend(report.drafts.iter().map(|draft| ("draft", draft.name.clone())));
    facts.extend(report.prompts_facts().into_iter().map(|prompts| ("prompts", prompts)));
    facts.push(("longest answer", format!("{} tokens", report.max_new_tokens)));
    facts.push(("seed", report.seed.to_string()));
    facts.push(("time", format!("{} spent on all answers", duration(seconds(report)))));
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
    let class = |column: usize| if column < table.text_columns { "keep" } else { "n" };
    let cell = |(column, cell): (usize, &String)| {
        let (text, class) = (escape(cell), class(column));
        match column {
            0 => format!("<th scope=\"row\" class=\"{class}\">{text}</th>"),
            _ => format!("<td class=\"{class}\">{text}</td>"),
        }
    };
    let head = table.columns.iter().enumerate().map(|(column, name)| {
        format!("<th scope=\"col\" class=\"{}\">{}</th>", class(column), escape(name))
    });
    let row = |cells: &Vec<String>| {
        let cells: String = cells.iter().enumerate().map(cell).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let (head, rows): (String, String) = (head.collect(), table.rows.iter().map(row).collect());
    let title = escape(&table.title);
    format!(
        "<h2>{title}</h2>\n<div class=\"scroll\" tabindex=\"0\" role=\"region\" \
         aria-label=\"{title}\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\
         </table></div>\n"
    )
}

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
        title: "Acceptance by position".into(),
        unit: "% of all steps",
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
        found.and_then(|one| speed_up(one)).map(|(value, error)| Bar { value, error })
    };
    let series = drafts.iter().map(|draft| {
        (draft.to_string(), sets.iter().map(|set| value(draft, set)).collect::<Vec<_>>())
    });
    BarChart {
        title: "Speed-up by set".into(),
        unit: "times; plain decoding is 1",
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
    Chart {
        title: "Tau by prompt length".into(),
        unit: "tokens per step",
        axis: "tokens of the prompt",
        lines,
    }
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
        assert!(
            page.contains(
                "<p class=\"lede\">run answers 4.00 \u{b1} 0.00 times as fast as plain decoding, with \
                 2.83 \u{b1} "
            ),
            "{page}"
        );
        for title in ["Acceptance by position", "Speed-up by set", "Tau by prompt length"] {
            assert_eq!(page.matches(&format!("<h3>{title} ")).count(), 2, "{title}");
        }
        assert!(page.contains("Evaluation of &lt;b&gt;") && !page.contains("<b></h1>"));
        assert!(!page.contains("http://") && !page.contains("src="));
        assert!(page.contains("Content-Security-Policy"));
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
