//! Compares this evaluation with an earlier one: changes, and how many standard errors they are.

use std::collections::HashMap;
use std::path::Path;

use dflash_settings::{NGRAM_DRAFT, NO_DRAFT};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::bootstrap::spread;
use crate::figures::Figures;
use crate::report::{EvalReport, Measured, Pairs, plain_of};
use dflash_run::EvalMode;

/// A change of this many standard errors is more than chance: two are exceeded by chance one time
/// in twenty.
const MOVED: f64 = 2.0;

/// Every metric that both evaluations have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The earlier report's file.
    pub baseline: String,
    /// Results of this evaluation that the baseline does not have.
    pub unmatched: usize,
    /// The changes.
    pub changes: Vec<Change>,
}

/// A metric before and now.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Its set.
    pub set: String,
    /// Its mode.
    #[serde(flatten)]
    pub mode: EvalMode,
    /// Its draft.
    pub draft: String,
    /// The draft's name in the earlier report.
    pub draft_before: String,
    /// Name of the metric.
    pub figure: String,
    /// Its earlier value.
    pub before: f64,
    /// Its value now.
    pub now: f64,
    /// `now - before`.
    pub change: f64,
    /// Standard error of the change; `None` if it is not known.
    pub noise: Option<f64>,
    /// `|change| / noise`; `None` if the noise is not known, or 0.
    pub times_noise: Option<f64>,
    /// Whether both evaluations answered the same prompts: then the noise is that of bootstrap
    /// samples with the same prompts for both, otherwise both errors combined.
    pub paired: bool,
}

impl Change {
    /// The change in one word.
    pub(crate) fn verdict(&self) -> &'static str {
        match (self.times_noise, self.noise) {
            (Some(times), _) if times >= MOVED && self.change > 0.0 => "up",
            (Some(times), _) if times >= MOVED => "down",
            (Some(_), _) => "within noise",
            (None, _) if self.change == 0.0 => "same",
            (None, Some(_)) if self.change > 0.0 => "up",
            (None, Some(_)) => "down",
            (None, None) => "noise unknown",
        }
    }
}

/// The part of a report that is compared.
#[derive(Debug, Deserialize)]
struct Earlier {
    results: Vec<Measured>,
}

impl EvalReport {
    /// Compares with the report in `path` and stores the result.
    ///
    /// # Errors
    /// A file that is not a report, or has nothing in common with this one.
    pub fn compare(&mut self, path: &Path) -> Result<(), Error> {
        let text = std::fs::read(path)
            .map_err(|source| Error::ReadBaseline { path: path.into(), source })?;
        let earlier: Earlier = serde_json::from_slice(&text)
            .map_err(|source| Error::BadBaseline { path: path.into(), source })?;
        let comparison = compare(path, &self.results, &earlier.results);
        if comparison.changes.is_empty() {
            let there: Vec<String> =
                earlier.results.iter().map(|one| format!("{}: {}", one.set, one.mode)).collect();
            return Err(Error::NothingInCommon { path: path.into(), there: there.join("; ") });
        }
        self.comparison = Some(comparison);
        Ok(())
    }
}

fn compare(path: &Path, now: &[Measured], before: &[Measured]) -> Comparison {
    let (own, others) = (drafts_of(now), drafts_of(before));
    let mut comparison =
        Comparison { baseline: path.display().to_string(), unmatched: 0, changes: Vec::new() };
    for result in now {
        let counterpart = counterpart(&result.draft, &own, &others).and_then(|draft| {
            let same = |one: &&Measured| one.set == result.set && one.mode == result.mode;
            before.iter().filter(same).find(|one| one.draft == draft)
        });
        match counterpart {
            Some(earlier) => comparison.changes.extend(changes(result, now, earlier, before)),
            None => comparison.unmatched += 1,
        }
    }
    comparison
}

/// The trained drafts, in order; lookup and plain decoding have fixed names.
fn drafts_of(results: &[Measured]) -> Vec<&str> {
    let mut found: Vec<&str> = Vec::new();
    for draft in results.iter().map(|one| one.draft.as_str()) {
        if ![NO_DRAFT, NGRAM_DRAFT].contains(&draft) && !found.contains(&draft) {
            found.push(draft);
        }
    }
    found
}

/// The draft with the same name or, if there is none, the one at the same position among those
/// without a match: a new checkpoint is compared with the old one.
fn counterpart<'a>(draft: &'a str, own: &[&str], others: &[&'a str]) -> Option<&'a str> {
    if !own.contains(&draft) || others.contains(&draft) {
        return Some(draft);
    }
    let place = own.iter().filter(|name| !others.contains(name)).position(|name| *name == draft)?;
    others.iter().filter(|name| !own.contains(name)).nth(place).copied()
}

fn changes(
    now: &Measured,
    all_now: &[Measured],
    before: &Measured,
    all_before: &[Measured],
) -> Vec<Change> {
    let paired = same_prompts(now, before);
    let noise: HashMap<String, f64> = match &paired {
        Some(order) => paired_noise(now, all_now, before, all_before, order),
        None => now
            .noise
            .iter()
            .filter_map(|(name, here)| {
                let there = before.noise.get(name)?;
                // `hypot` would call a symbol of glibc 2.35.
                Some((name.clone(), (here * here + there * there).sqrt()))
            })
            .collect(),
    };
    let earlier: HashMap<String, f64> = before.figures.named().into_iter().collect();
    let change = |(figure, value): (String, f64)| {
        let old = *earlier.get(&figure)?;
        let knows = now.noise.contains_key(&figure) && before.noise.contains_key(&figure);
        let noise = noise.get(&figure).copied().filter(|_| knows);
        let change = difference(value, old);
        Some(Change {
            set: now.set.clone(),
            mode: now.mode,
            draft: now.draft.clone(),
            draft_before: before.draft.clone(),
            figure,
            before: old,
            now: value,
            change,
            noise,
            times_noise: noise.filter(|&noise| noise > 0.0).map(|noise| change.abs() / noise),
            paired: paired.is_some(),
        })
    };
    now.figures.named().into_iter().filter_map(change).collect()
}

/// `now - before`, ignoring differences from reading numbers from a file.
fn difference(now: f64, before: f64) -> f64 {
    let change = now - before;
    if change.abs() <= 1e-12 * now.abs() { 0.0 } else { change }
}

/// For each answer of `now` the index of the answer of `before` to the same prompt; `None` unless
/// the prompts are the same.
fn same_prompts(now: &Measured, before: &Measured) -> Option<Vec<usize>> {
    let key = |answer: &crate::Answer| (answer.row, answer.turn, answer.prompt_tokens);
    let places: HashMap<_, usize> =
        before.answers.iter().enumerate().map(|(index, answer)| (key(answer), index)).collect();
    let order: Option<Vec<usize>> =
        now.answers.iter().map(|answer| places.get(&key(answer)).copied()).collect();
    order.filter(|order| order.len() == before.answers.len())
}

/// The standard error of each metric's change, over bootstrap samples with the same prompts for
/// both.
fn paired_noise(
    now: &Measured,
    all_now: &[Measured],
    before: &Measured,
    all_before: &[Measured],
    order: &[usize],
) -> HashMap<String, f64> {
    let plain_now = plain_of(all_now, now).and_then(|plain| Pairs::new(now, plain));
    let plain_before = plain_of(all_before, before).and_then(|plain| Pairs::new(before, plain));
    let draws = |drawn: &[usize]| {
        let there: Vec<usize> = drawn.iter().map(|&index| order[index]).collect();
        let old: Figures = before.figures_of(&there, plain_before.as_ref());
        let old: HashMap<String, f64> = old.named().into_iter().collect();
        let new = now.figures_of(drawn, plain_now.as_ref()).named();
        new.into_iter()
            .filter_map(|(name, value)| {
                let change = difference(value, *old.get(&name)?);
                Some((name, change))
            })
            .collect()
    };
    spread(now.responses, draws).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{GREEDY, report, two};

    fn file_of(report: &EvalReport) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), serde_json::to_vec(report).unwrap()).unwrap();
        file
    }

    fn change<'a>(report: &'a EvalReport, figure: &str) -> &'a Change {
        let changes = &report.comparison.as_ref().unwrap().changes;
        changes.iter().find(|one| one.draft == "run" && one.figure == figure).unwrap()
    }

    #[test]
    fn a_report_against_itself_moves_nothing() {
        let mut now = report(4.0);
        now.compare(file_of(&report(4.0)).path()).unwrap();
        let comparison = now.comparison.as_ref().unwrap();
        assert_eq!(comparison.unmatched, 0);
        assert_eq!(comparison.changes.len(), 3 * 11 + 3 * 4);
        for change in &comparison.changes {
            assert_eq!((change.change, change.verdict(), change.paired), (0.0, "same", true));
        }
    }

    #[test]
    fn a_faster_draft_has_moved_by_more_than_the_noise() {
        let mut now = report(4.0);
        now.compare(file_of(&report(3.0)).path()).unwrap();
        let faster = change(&now, "tokens_per_second");
        assert_eq!(faster.verdict(), "up");
        assert!(faster.times_noise.unwrap() > 5.0, "{faster:?}");
        assert_eq!(change(&now, "acceptance_length").verdict(), "same");
        let mut back = report(3.0);
        back.compare(file_of(&report(4.0)).path()).unwrap();
        assert_eq!(change(&back, "tokens_per_second").verdict(), "down");
    }

    #[test]
    fn other_prompts_take_both_noises_and_pairs_less() {
        let now = two("s", GREEDY, 4.0);
        let mut before = two("s", GREEDY, 3.0);
        let paired = changes(&now[1], &now, &before[1], &before);
        before.iter_mut().for_each(|one| one.answers.iter_mut().for_each(|a| a.row += 1));
        let apart = changes(&now[1], &now, &before[1], &before);
        let of = |changes: &[Change]| {
            let found = changes.iter().find(|one| one.figure == "tokens_per_second").unwrap();
            (found.paired, found.noise.unwrap())
        };
        assert_eq!((of(&paired).0, of(&apart).0), (true, false));
        assert!(of(&paired).1 < of(&apart).1, "{:?} {:?}", of(&paired), of(&apart));
    }

    #[test]
    fn a_new_checkpoint_is_compared_with_the_old_one() {
        let check = |draft: &str, own: &[&str], others: &[&str], expect: Option<&str>| {
            assert_eq!(counterpart(draft, own, others), expect, "{draft} {own:?} {others:?}");
        };
        check("new", &["new"], &["old"], Some("old"));
        check("ngram", &["new"], &["old"], Some("ngram"));
        check("old", &["new", "old"], &["old", "older"], Some("old"));
        check("new", &["new", "old"], &["old", "older"], Some("older"));
        check("new", &["new"], &[], None);
    }

    #[test]
    fn files_that_are_no_baseline_are_named_with_the_remedy() {
        let mut now = report(4.0);
        let missing = now.compare(Path::new("/nowhere/b.json")).unwrap_err().to_string();
        assert!(missing.contains("/nowhere/b.json") && missing.contains("--json"), "{missing}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{\"acceptance_length\": 2.0}").unwrap();
        let other = now.compare(file.path()).unwrap_err().to_string();
        assert!(other.contains("missing field `results`"), "{other}");
        let mut foreign = report(4.0);
        foreign.results.iter_mut().for_each(|one| one.set = "other".into());
        let nothing = now.compare(file_of(&foreign).path()).unwrap_err().to_string();
        assert!(nothing.contains("nothing in common"), "{nothing}");
    }
}
