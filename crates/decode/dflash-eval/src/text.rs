//! A report for the terminal.

use std::fmt::{self, Display, Formatter};

use dflash_run::AcceptanceFigures;

use crate::advice::AUTO_SUFFIX;
use crate::report::EvalReport;
use crate::table::{self, Table};

/// Names of the speeds over all answers.
const WITH_PROMPT: &str = "with prompt";
const AFTER_FIRST: &str = "after first token";

impl Display for EvalReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.write_facts(f)?;
        // A single draft's `auto` results are one additional line.
        let fixed = || self.results.iter().filter(|result| !result.is_auto());
        let drafts = fixed().filter(|result| !result.is_plain()).count();
        if fixed().count() > drafts + 1 || drafts != 1 {
            for table in table::summary(self) {
                write!(f, "{table}\n\n")?;
            }
            write!(f, "{}\n\n", table::details(self))?;
        }
        if drafts > 1 {
            write!(f, "{}\n\n", table::slots(self))?;
        }
        if drafts == 1 {
            self.write_acceptance(f)?;
        }
        self.write_repetition(f)?;
        if drafts == 1 {
            self.write_speeds(f)?;
        }
        self.write_memory(f)?;
        self.write_lossless(f)?;
        self.write_notes(f)?;
        self.write_advice(f)?;
        match &self.comparison {
            Some(comparison) => {
                write!(f, "\n{}\n{}\n", table::changes(self, comparison), self.legend())
            }
            None => Ok(()),
        }
    }
}

impl EvalReport {
    fn write_facts(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "target    {}", self.target)?;
        if let Some(endpoint) = &self.endpoint {
            writeln!(f, "endpoint  {endpoint}")?;
        }
        for draft in self.drafts.iter().filter(|draft| !draft.label.ends_with(AUTO_SUFFIX)) {
            let vocabulary = draft.vocabulary.map_or_else(String::new, |tokens| {
                format!(", which proposes from {tokens} tokens")
            });
            writeln!(f, "draft     {}{vocabulary}", draft.name)?;
        }
        for prompts in self.prompts_facts() {
            writeln!(f, "prompts   {prompts}")?;
        }
        let modes: Vec<String> = self.modes().iter().map(ToString::to_string).collect();
        writeln!(
            f,
            "answers   {} of at most {} tokens, {} in all, {}",
            self.responses,
            self.max_new_tokens,
            self.tokens,
            modes.join("; ")
        )?;
        match self.device.is_empty() {
            true => writeln!(f),
            false => writeln!(f, "device    {}\n", self.device),
        }
    }

    fn write_acceptance(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let AcceptanceFigures { acceptance_length, acceptance_length_per_response, .. } =
            self.acceptance;
        writeln!(f, "acceptance length (tau)")?;
        if acceptance_length.is_nan() {
            return writeln!(f, "  per step               -   no step was counted\n");
        }
        writeln!(f, "  per step         {acceptance_length:7.3}   {} steps", self.steps)?;
        if acceptance_length_per_response > 0.0 {
            write!(f, "  per response     {acceptance_length_per_response:7.3}")?;
            match self.block_size {
                Some(block_size) => writeln!(f, "   block {block_size}")?,
                None => writeln!(f)?,
            }
        }
        writeln!(f)?;
        if self.slots.is_empty() {
            return Ok(());
        }
        writeln!(f, "slot       reached  accepted   of reached   of all steps")?;
        for (slot, of_all) in
            self.slots.iter().zip(self.acceptance.acceptance_by_slot.iter().skip(1))
        {
            writeln!(
                f,
                "{:8} {:9} {:9} {:11.1}% {:13.1}%",
                slot.slot,
                slot.reached,
                slot.accepted,
                100.0 * slot.conditional_acceptance,
                100.0 * of_all.unwrap_or_default()
            )?;
        }
        writeln!(f)
    }

    /// Stands beside the acceptance, which it takes the meaning from.
    fn write_repetition(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let facts = self.repetition_facts();
        for fact in &facts {
            let label = if fact.is_grave { "WARNING " } else { "note    " };
            writeln!(f, "{label}  {}", fact.text)?;
        }
        if facts.is_empty() { Ok(()) } else { writeln!(f) }
    }

    fn write_speeds(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "tokens per second      speculative      plain   speed-up")?;
        let (whole, decode) = (&self.tokens_per_second, &self.decode_tokens_per_second);
        let rows = [
            (WITH_PROMPT, whole.speculative, whole.plain, whole.speed_up),
            ("  median", whole.median_speculative, whole.median_plain, whole.median_speed_up),
            (AFTER_FIRST, decode.speculative, decode.plain, decode.speed_up),
            ("  median", decode.median_speculative, decode.median_plain, decode.median_speed_up),
        ];
        for (name, speculative, plain, speed_up) in rows {
            let rate = |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{rate:.1}"));
            let (speculative, plain) = (rate(speculative), rate(plain));
            let error = self.speed_up_error(name).unwrap_or_default();
            let speed_up = speed_up.map_or("-".into(), |speed_up| format!("{speed_up:.2}x"));
            writeln!(f, "{name:20} {speculative:>13} {plain:>10} {speed_up:>10}{error}")?;
        }
        let auto = self.results.iter().find(|one| one.is_auto());
        if let Some(rate) = auto.and_then(|auto| auto.figures.decode_tokens_per_second) {
            let speed_up = auto.and_then(|auto| auto.figures.decode_speed_up);
            let speed_up = speed_up.map_or("-".into(), |speed_up| format!("{speed_up:.2}x"));
            let name = "  lengths chosen";
            writeln!(f, "{name:20} {rate:13.1} {:>10} {speed_up:>10}", "")?;
        }
        let first = |plain: bool| {
            let of = self.results.iter().find(|one| one.is_plain() == plain && !one.is_auto());
            of.and_then(|one| one.figures.median_time_to_first_token_s)
        };
        let shown = |seconds: Option<f64>| {
            seconds.map_or("-".into(), |seconds| format!("{:.1}", 1e3 * seconds))
        };
        writeln!(
            f,
            "first token, ms      {:>13} {:>10}   (median)\n",
            shown(first(false)),
            shown(first(true))
        )
    }

    /// The standard error of the speed-up with this name, of the only draft's result.
    fn speed_up_error(&self, name: &str) -> Option<String> {
        let figure = match name {
            WITH_PROMPT => "speed_up",
            AFTER_FIRST => "decode_speed_up",
            _ => return None,
        };
        let drafted = self.results.iter().find(|one| !one.is_plain() && !one.is_auto())?;
        Some(format!(" \u{b1}{:.2}", drafted.noise.get(figure)?))
    }

    fn write_memory(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let process = self.memory.process_mib.map(|mib| format!("process {mib:.0} MiB"));
        let device = self.memory.device_mib.map(|mib| format!("device {mib:.0} MiB"));
        let parts: Vec<String> = process.into_iter().chain(device).collect();
        match parts.is_empty() {
            true => Ok(()),
            false => writeln!(f, "peak memory  {}\n", parts.join(", ")),
        }
    }

    fn write_lossless(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for fact in self.lossless_facts() {
            writeln!(f, "lossless  {}", fact.text)?;
            for difference in fact.differences {
                writeln!(f, "  {difference}")?;
            }
        }
        Ok(())
    }

    fn write_notes(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for note in self.notes() {
            writeln!(f, "note      {note}")?;
        }
        Ok(())
    }

    fn write_advice(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (number, line) in self.advice().iter().enumerate() {
            let head = if number == 0 { "\nadvice" } else { "      " };
            writeln!(f, "{head}  {line}")?;
        }
        Ok(())
    }

    /// The meaning of the comparison's columns.
    pub(crate) fn legend(&self) -> String {
        let Some(comparison) = &self.comparison else { return String::new() };
        let unmatched = match comparison.unmatched {
            0 => String::new(),
            count => format!(" {count} results are not in the baseline."),
        };
        format!(
            "Noise is the standard error of the change, by 500 bootstrap draws of the answers, the \
             same prompts drawn for both where both answered the same. Up and down are changes of \
             2 times that or more.{unmatched}"
        )
    }
}

impl Display for Table {
    /// Columns as wide as their longest cell, text to the left and numbers to the right.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let length = |text: &String| text.chars().count();
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(length).max();
            cells.unwrap_or_default().max(length(&self.columns[column]))
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        write!(f, "{}", self.title)?;
        for row in std::iter::once(&self.columns).chain(&self.rows) {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                match column < self.text_columns {
                    true => line += &format!("{cell:width$}  "),
                    false => line += &format!("{cell:>width$}  "),
                }
            }
            write!(f, "\n{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use dflash_settings::NO_DRAFT;

    use super::*;
    use crate::answer::Answer;
    use crate::figures::Whole;
    use crate::report::tests::{GREEDY, report};
    use crate::report::{Facts, Measured};

    #[test]
    fn the_terminal_shows_the_fields_table_and_every_proof() {
        let text = report(4.0).to_string();
        for line in [
            "target    target\n",
            "draft     drafts/run\n",
            "prompts   GSM8K of some/gsm8k at 1111111111111111111111111111111111111111: 8 rows; 1 skipped\n",
            "Speed-up and tau, greedy\nset     baseline  run speed-up   tau\nGSM8K      1.00x         4.00x  2.83\n",
            "Acceptance by position",
            "lossless  yes: 8 of 8 answers identical to plain greedy decoding, 0 tied, 0 differ (alpaca, run, greedy)\n",
        ] {
            assert!(text.contains(line), "{line}\n---\n{text}");
        }
    }

    #[test]
    fn what_was_not_decoded_has_no_speed() {
        let piece = Answer { tokens: 7, first_token_s: 1.0, total_s: 1.0, ..Answer::default() };
        let single = Answer { tokens: 1, total_s: 1.0, ..Answer::default() };
        let whole = Whole::default();
        let measured = |draft: &str, answers: &[Answer], plain: Option<&Measured>| {
            Measured::new("s", GREEDY, draft, answers.to_vec(), whole.clone(), None, plain)
        };
        let answers = [piece, single];
        let plain = measured(NO_DRAFT, &answers, None);
        let drafted = measured("run", &answers, Some(&plain));
        let facts = Facts { drafts: report(4.0).drafts, ..Facts::default() };
        let report = EvalReport::new(facts, vec![plain, drafted]);
        let text = report.to_string();
        let nothing = format!("{:20} {:>13} {:>10} {:>10}\n", "after first token", "-", "-", "-");
        assert!(text.contains(&nothing), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert!(json["decode_tokens_per_second"]["speculative"].is_null(), "{json}");
        assert!(json["results"][1]["decode_tokens_per_second"].is_null(), "{json}");
        assert_eq!(json["results"][1]["tokens_per_second"], 4.0);
    }
}
