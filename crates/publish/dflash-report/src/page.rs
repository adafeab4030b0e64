//! The page: how the run stands, its curves, its events, its settings. All text from files is
//! escaped.

mod charts;
mod details;

use std::path::Path;

use dflash_http::{Page, escape};

use crate::chart::{SCRIPT, number};
use crate::run::Run;
use crate::standing::{Phase, Standing, speed_up};
use crate::text::{bytes, duration, percent};

/// The script of a page that keeps itself current.
const FOLLOW: &str = concat!(include_str!("chart/plots.js"), include_str!("page/follow.js"));

/// A part of the page, which a page that is being followed replaces when it changes.
pub(crate) struct Part {
    pub(crate) id: &'static str,
    pub(crate) html: String,
}

/// The parts of the page, in order. `now`: seconds since 1970.
pub(crate) fn parts(run: &Run, now: f64) -> Vec<Part> {
    let standing = Standing::of(run, now);
    let part = |id: &'static str, html: String| Part { id, html };
    vec![
        part("summary", summary(run, &standing)),
        part("learning", section("Learning", charts::learning(run))),
        part("slots", section("By position in the block", charts::slots(run))),
        part("speed", section("Speed and resources", charts::speed(run))),
        part("events", details::events(run)),
        part("checkpoints", details::checkpoints(run)),
        part("requests", details::requests(run)),
        part("provenance", details::provenance(run)),
    ]
}

/// The whole page of `run`, as it is.
pub(crate) fn html(run: &Run, now: f64) -> String {
    let body = body(&run.dir, &parts(run, now), "");
    page(&run.dir, &body, SCRIPT, false).html()
}

/// The page that follows the run in `dir`, and its policy.
pub(crate) fn live_html(dir: &Path, parts: &[Part]) -> (String, String) {
    let link = "<p id=\"link\" class=\"muted\" role=\"status\"></p>\
                <noscript><p class=\"alert\">Without JavaScript the page shows the run as it was when \
                it was loaded: reload it.</p></noscript>\n";
    let body = body(dir, parts, link);
    let page = page(dir, &body, FOLLOW, true);
    (page.html(), page.policy())
}

fn page<'a>(dir: &'a Path, body: &'a str, script: &'a str, asks_its_server: bool) -> Page<'a> {
    let title = dir.file_name().and_then(|name| name.to_str()).unwrap_or("run");
    Page { title, body, script, asks_its_server }
}

fn body(dir: &Path, parts: &[Part], link: &str) -> String {
    let sections: String =
        parts.iter().map(|part| format!("<div id=\"{}\">{}</div>\n", part.id, part.html)).collect();
    format!(
        "<a class=\"skip\" href=\"#learning\">Skip to the curves</a>\n<div class=\"page\">\n<main>\n\
         {sections}</main>\n<footer>{link}<p>Written by dflash {} from {}.</p></footer>\n</div>",
        env!("CARGO_PKG_VERSION"),
        escape(&dir.display().to_string())
    )
}

/// A heading and charts; nothing if there is no chart.
fn section(title: &str, charts: String) -> String {
    match charts.is_empty() {
        true => String::new(),
        false => format!("<h2>{title}</h2>\n<div class=\"charts\">\n{charts}</div>\n"),
    }
}

/// The sentence, what needs attention, how far the run is, and the few numbers that matter.
fn summary(run: &Run, standing: &Standing) -> String {
    let (word, class) = match standing.has_faults() {
        true if standing.phase != Phase::Running => (standing.phase.badge().0, "fault"),
        _ => standing.phase.badge(),
    };
    format!(
        "<header><div class=\"top\"><h1>Training run {}</h1>\
         <span class=\"state {class}\">{word}</span></div>\n<p class=\"lede\">{}</p>\n{}</header>\n\
         {}{}{}",
        escape(&run.dir.display().to_string()),
        escape(&standing.sentence(run)),
        next_step(standing),
        remarks(standing),
        progress(run, standing),
        tiles(run, standing)
    )
}

/// What the reader can do to learn the rest.
fn next_step(standing: &Standing) -> String {
    match (standing.phase, &standing.evaluation) {
        (Phase::Finished, None) => {
            "<p class=\"sub\">The speed-up is not measured yet; <code>dflash eval</code> measures \
             it.</p>\n"
        }
        _ => "",
    }
    .to_owned()
}

fn remarks(standing: &Standing) -> String {
    let of = |is_fault: bool, class: &str| {
        let remarks = standing.remarks.iter().filter(|remark| remark.is_fault == is_fault);
        let texts: String =
            remarks.map(|remark| format!("<p>{}</p>", escape(&remark.text))).collect();
        match texts.is_empty() {
            true => String::new(),
            false => format!("<div class=\"alert {class}\" role=\"note\">{texts}</div>\n"),
        }
    };
    of(true, "fault") + &of(false, "")
}

fn progress(run: &Run, standing: &Standing) -> String {
    let is_under_way = matches!(standing.phase, Phase::Running | Phase::Silent | Phase::Stopped);
    match (run.metrics.last(), run.total_steps()) {
        (Some(line), Some(total)) if is_under_way => format!(
            "<progress max=\"{total}\" value=\"{}\" aria-label=\"steps done\"></progress>\n",
            line.step
        ),
        _ => String::new(),
    }
}

fn tiles(run: &Run, standing: &Standing) -> String {
    let Some(line) = run.metrics.last() else { return String::new() };
    let rows = run.validation.last().and_then(|line| line.rows.as_ref());
    let loss = line.figures.loss.map(number);
    let held_out = rows.and_then(|rows| rows.figures.loss).map(number);
    let evaluation = standing.evaluation.as_ref();
    let wait = charts::wait_share(line).map(percent);
    let first = run.metrics.by_step.values().next();
    let before = first.and_then(|line| line.figures.expected_acceptance_length);
    let tiles = [
        standing.acceptance.as_ref().map(|it| {
            let about = format!(
                "tokens per step{}",
                before.map_or(String::new(), |before| format!("; {before:.2} at the start"))
            );
            tile("Acceptance length", &format!("{:.2}", it.tokens), &about)
        }),
        evaluation.map(|it| {
            let about = format!("plain decoding, {} answers", it.responses);
            tile("Speed-up", &speed_up(it), &about)
        }),
        loss.map(|loss| {
            let about = held_out.map_or("training".to_owned(), |it| format!("{it} held out"));
            tile("Loss, nats", &loss, &about)
        }),
        run.seconds().map(|seconds| {
            let left = line.eta_s.filter(|left| *left > 0.0 && standing.phase == Phase::Running);
            let about = left.map_or(String::new(), |left| format!("{} left", duration(left)));
            tile("Time", &duration(seconds), &about)
        }),
        line.tokens_per_s.map(|rate| {
            let anchors = line.slots_per_s.map(|rate| format!("{rate:.0} slots per second"));
            tile("Tokens per second", &format!("{rate:.0}"), &anchors.unwrap_or_default())
        }),
        wait.map(|wait| tile("Waiting for data", &wait, "of the last interval")),
        line.peak_memory_mib.map(|mib| tile("Peak memory", &bytes(mib * 1_048_576.0), "of rank 0")),
    ];
    format!("<dl class=\"tiles\">\n{}</dl>\n", tiles.into_iter().flatten().collect::<String>())
}

/// A number with its name above it and a word about it below.
pub fn tile(name: &str, value: &str, about: &str) -> String {
    let about = match about.is_empty() {
        true => String::new(),
        false => format!("<span class=\"about\">{}</span>", escape(about)),
    };
    format!("<div><dt>{}</dt><dd>{}{about}</dd></div>\n", escape(name), escape(value))
}
