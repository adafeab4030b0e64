//! Facts that every form of a report states in the same words.

use dflash_settings::NO_DRAFT;

use crate::report::{EvalReport, Measured, SetFacts, plain_of};

/// A comparison with plain decoding in a sentence, and the answers that differ.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LosslessFact {
    pub(crate) text: String,
    pub(crate) differences: Vec<String>,
}

impl EvalReport {
    /// Where the prompts of each set came from, and how many rows have no answer.
    pub(crate) fn prompts_facts(&self) -> Vec<String> {
        self.sets.iter().map(SetFacts::sentence).collect()
    }

    /// Whether each result's texts are those of plain decoding, or why that is not known.
    pub(crate) fn lossless_facts(&self) -> Vec<LosslessFact> {
        let facts: Vec<LosslessFact> =
            self.results.iter().filter_map(Measured::lossless_fact).collect();
        if !facts.is_empty() {
            return facts;
        }
        let reason = if self.endpoint.is_some() {
            "not compared: servers do not return their logits"
        } else if self.drafts.is_empty() {
            "nothing to compare: plain decoding only"
        } else {
            "not compared: sampled texts differ by chance"
        };
        vec![LosslessFact { text: reason.to_owned(), ..LosslessFact::default() }]
    }

    /// What is missing from the results, and the remedy.
    pub(crate) fn notes(&self) -> Vec<String> {
        let cut = self.results.iter().filter_map(|result| self.note_on_length(result));
        self.results.iter().flat_map(Measured::notes).chain(cut).collect()
    }

    /// How many answers of a set ended at the length limit: of plain decoding, whose texts the drafts' are too,
    /// or of a draft where there is none.
    fn note_on_length(&self, result: &Measured) -> Option<String> {
        let cut = result.answers.iter().filter(|answer| answer.cut).count();
        if cut == 0 || plain_of(&self.results, result).is_some() {
            return None;
        }
        let (all, most, described) = (result.responses, self.max_new_tokens, result.described());
        Some(format!("{cut} of {all} answers were cut at --max-new-tokens {most} {described}"))
    }
}

impl SetFacts {
    fn sentence(&self) -> String {
        let Self { source, rows, skipped, failed, .. } = self;
        let revision = self.revision.as_ref().map(|commit| format!(" at {commit}"));
        let title =
            if self.title == *source { String::new() } else { format!("{} of ", self.title) };
        let failed = if *failed == 0 { String::new() } else { format!("; {failed} FAILED") };
        let revision = revision.unwrap_or_default();
        format!("{title}{source}{revision}: {rows} rows; {skipped} skipped{failed}")
    }
}

impl Measured {
    /// Set, draft and mode.
    fn described(&self) -> String {
        format!("({}, {}, {})", self.set, self.draft, self.mode)
    }

    fn lossless_fact(&self) -> Option<LosslessFact> {
        let lossless = self.lossless.as_ref()?;
        let text = format!(
            "{}: {} of {} answers identical to plain greedy decoding, {} tied, {} differ {}",
            if lossless.holds { "yes" } else { "NO" },
            lossless.identical,
            lossless.responses,
            lossless.ties.len(),
            lossless.failures.len(),
            self.described()
        );
        let ties = lossless.ties.iter().map(|tie| format!("tie: {tie}"));
        let failures = lossless.failures.iter().map(|failure| format!("DIFFERS: {failure}"));
        Some(LosslessFact { text, differences: ties.chain(failures).collect() })
    }

    fn notes(&self) -> Vec<String> {
        let described = self.described();
        let failed = (self.failed > 0).then(|| match self.responses {
            0 => format!("nothing was answered, {} rows failed {described}", self.failed),
            _ => format!("{} rows were not answered completely {described}", self.failed),
        });
        let notes = [failed, self.note_on_errors(), self.note_on_concurrency()];
        notes.into_iter().flatten().collect()
    }

    /// Why speed and speed-up have no standard error.
    fn note_on_errors(&self) -> Option<String> {
        let has_error = self.noise.contains_key("tokens_per_second");
        if self.is_plain() || has_error || self.figures.tokens_per_second.is_none() {
            return None;
        }
        let (described, rows) = (self.described(), self.rows());
        Some(match self.figures.speed_up {
            // Without plain decoding several answers at a time are one part, however many there are.
            None if self.mode.concurrency > 1 => format!(
                "the standard error of the speed is not measurable without measuring {NO_DRAFT}: \
                 give --plain-endpoint {described}"
            ),
            _ => format!(
                "the standard error of speeds is not measurable with {rows} rows: give more prompts \
                 {described}"
            ),
        })
    }

    /// Whether a part has too few rows for the concurrency.
    fn note_on_concurrency(&self) -> Option<String> {
        let rows = self.rows().div_ceil(self.whole.parts.len().max(1));
        let is_short = !self.is_plain() && rows > 0 && rows < self.mode.concurrency;
        is_short.then(|| {
            format!(
                "at most {rows} answers were made at a time: give more prompts {}",
                self.described()
            )
        })
    }

    fn rows(&self) -> usize {
        let rows: std::collections::BTreeSet<usize> =
            self.answers.iter().map(|answer| answer.row).collect();
        rows.len()
    }
}

#[cfg(test)]
mod tests {
    use dflash_run::EvalMode;

    use super::*;
    use crate::figures::{SetPart, Whole};
    use crate::page::{html, markdown};
    use crate::report::tests::{GREEDY, report, two};

    #[test]
    fn every_form_has_the_same_facts() {
        let mut report = report(4.0);
        report.sets[0].failed = 3;
        report.results[1].failed = 3;
        let facts = [
            "GSM8K of some/gsm8k at 1111111111111111111111111111111111111111: 8 rows; 1 skipped; 3 FAILED",
            "yes: 8 of 8 answers identical to plain greedy decoding, 0 tied, 0 differ (gsm8k, run, greedy)",
            "yes: 8 of 8 answers identical to plain greedy decoding, 0 tied, 0 differ (gsm8k, run, temperature 1, thinking)",
            "3 rows were not answered completely (gsm8k, run, greedy)",
        ];
        for text in [report.to_string(), markdown(&report), html(&report)] {
            facts.iter().for_each(|fact| assert!(text.contains(fact), "{fact}\n---\n{text}"));
        }
    }

    #[test]
    fn where_an_error_cannot_be_had_the_report_says_so() {
        let check = |measured: &Measured, expect: &[&str]| {
            let notes = measured.notes();
            assert_eq!(notes.len(), expect.len(), "{notes:?}");
            notes
                .iter()
                .zip(expect)
                .for_each(|(note, part)| assert!(note.contains(part), "{note}"));
        };
        let [plain, drafted] = two("s", GREEDY, 4.0).try_into().unwrap();
        check(&drafted, &[]);
        let one = vec![drafted.answers[0].clone()];
        let none = Whole::default();
        let few = Measured::new("s", GREEDY, "run", one.clone(), none, None, Some(&plain));
        check(&few, &["not measurable with 1 rows: give more prompts (s, run, greedy)"]);
        let mode = EvalMode { concurrency: 4, ..GREEDY };
        let whole = |parts: usize| Whole {
            seconds: Some(parts as f64),
            verification: None,
            parts: vec![SetPart { tokens: 11, seconds: 1.0 }; parts],
        };
        let side = |draft: &str, plain: Option<&Measured>, parts| {
            Measured::new("s", mode, draft, drafted.answers.clone(), whole(parts), None, plain)
        };
        check(&side("run", None, 1), &["without measuring none"]);
        check(&side("run", Some(&side(NO_DRAFT, None, 1)), 1), &["with 8 rows: give more prompts"]);
        check(&side("run", Some(&side(NO_DRAFT, None, 2)), 2), &[]);
        check(&side("run", Some(&side(NO_DRAFT, None, 3)), 3), &["at most 3 answers"]);
        let nothing = Measured::new("s", mode, "run", Vec::new(), whole(0), None, None);
        let nothing = Measured { failed: 8, ..nothing };
        check(&nothing, &["nothing was answered, 8 rows failed"]);
    }
}
