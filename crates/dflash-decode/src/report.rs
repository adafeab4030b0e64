//! The result of an evaluation, for people and for programs.

use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;

use dflash_identity::TargetIdentity;
use dflash_run::{AcceptanceFigures, SlotCounts};
use serde::Serialize;

use crate::Error;
use crate::lossless::{Difference, Lossless};

/// Tokens per second of both ways to decode, over the same answers in the same process.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Speed {
    /// All tokens by all seconds, speculative.
    pub speculative: f64,
    /// The same, plain.
    pub plain: f64,
    /// `speculative / plain`.
    pub speed_up: f64,
    /// Median over answers, speculative.
    pub median_speculative: f64,
    /// Median over answers, plain.
    pub median_plain: f64,
    /// Median over answers of their own ratio.
    pub median_speed_up: f64,
}

/// Tokens and seconds of one answer, both ways: (tokens, seconds).
pub(crate) type Timing = [(f64, f64); 2];

impl Speed {
    /// Summary of `[speculative, plain]` timings, one an answer.
    pub(crate) fn of(timings: &[Timing]) -> Self {
        let rate = |(tokens, seconds): (f64, f64)| tokens / seconds.max(1e-9);
        let total = |way: usize| {
            let sum = |(tokens, seconds), timing: &Timing| {
                (tokens + timing[way].0, seconds + timing[way].1)
            };
            rate(timings.iter().fold((0.0, 0.0), sum))
        };
        let middle = |of: &dyn Fn(&Timing) -> f64| median(timings.iter().map(of).collect());
        let (speculative, plain) = (total(0), total(1));
        Self {
            speculative,
            plain,
            speed_up: if plain > 0.0 { speculative / plain } else { 0.0 },
            median_speculative: middle(&|timing| rate(timing[0])),
            median_plain: middle(&|timing| rate(timing[1])),
            median_speed_up: middle(&|timing| rate(timing[0]) / rate(timing[1]).max(1e-9)),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        count => (values[(count - 1) / 2] + values[count / 2]) / 2.0,
    }
}

/// Everything an evaluation found.
#[allow(missing_docs, reason = "settings under their own names")]
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalReport {
    pub target: PathBuf,
    pub draft: PathBuf,
    /// Digest of the file of the draft's weights; `None` where they are in shards.
    pub draft_weights: Option<String>,
    /// Which model the target is.
    pub target_identity: TargetIdentity,
    pub prompts: PathBuf,
    /// Answers made.
    pub responses: usize,
    /// Rows left out because prompt and answer exceed the target's context.
    pub skipped: usize,
    /// Tokens of all speculative answers.
    pub tokens: usize,
    pub max_new_tokens: usize,
    /// 0 for greedy decoding.
    pub temperature: f64,
    /// Slots of a block, the anchor's included.
    pub block_size: usize,
    /// Tokens that a draft with a pruned vocabulary can say; `None` when it says all.
    pub draft_vocabulary: Option<usize>,
    /// Device and precision, and CPU threads.
    pub device: String,
    /// Verify steps.
    pub steps: u64,
    /// What the target accepted: the figures of a validation.
    #[serde(flatten)]
    pub acceptance: AcceptanceFigures,
    /// Every slot after the anchor.
    pub slots: Vec<SlotCounts>,
    /// Speed from the prompt to the last token.
    pub tokens_per_second: Speed,
    /// Speed after the first token.
    pub decode_tokens_per_second: Speed,
    /// Comparison with plain greedy decoding; `None` when sampling, where texts differ by chance.
    pub lossless: Option<Lossless>,
}

impl EvalReport {
    /// Fails when speculative decoding changed a text by more than a tie.
    ///
    /// # Errors
    /// [`Error::NotLossless`].
    pub fn check(&self) -> Result<(), Error> {
        match &self.lossless {
            Some(lossless) if !lossless.holds => Err(Error::NotLossless {
                failures: lossless.failures.len(),
                responses: lossless.responses,
            }),
            _ => Ok(()),
        }
    }
}

impl Display for EvalReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "target    {}", self.target.display())?;
        let vocabulary = self
            .draft_vocabulary
            .map_or_else(String::new, |tokens| format!(", which proposes from {tokens} tokens"));
        writeln!(f, "draft     {}{vocabulary}", self.draft.display())?;
        let way = match self.temperature {
            0.0 => "greedy".to_owned(),
            temperature => format!("temperature {temperature}"),
        };
        writeln!(
            f,
            "prompts   {}: {} answers of at most {} tokens, {} in all, {way}; {} skipped",
            self.prompts.display(),
            self.responses,
            self.max_new_tokens,
            self.tokens,
            self.skipped
        )?;
        writeln!(f, "device    {}\n", self.device)?;
        let AcceptanceFigures { acceptance_length, acceptance_length_per_response, .. } =
            self.acceptance;
        writeln!(f, "acceptance length (tau)")?;
        writeln!(f, "  per step         {acceptance_length:7.3}   {} steps", self.steps)?;
        writeln!(
            f,
            "  per response     {acceptance_length_per_response:7.3}   block {}\n",
            self.block_size
        )?;
        self.write_slots(f)?;
        self.write_speeds(f)?;
        self.write_lossless(f)
    }
}

impl EvalReport {
    fn write_slots(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    fn write_speeds(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "tokens per second      speculative      plain   speed-up")?;
        let (whole, decode) = (&self.tokens_per_second, &self.decode_tokens_per_second);
        let rows = [
            ("with prompt", whole.speculative, whole.plain, whole.speed_up),
            ("  median", whole.median_speculative, whole.median_plain, whole.median_speed_up),
            ("after first token", decode.speculative, decode.plain, decode.speed_up),
            ("  median", decode.median_speculative, decode.median_plain, decode.median_speed_up),
        ];
        for (name, speculative, plain, speed_up) in rows {
            writeln!(f, "{name:20} {speculative:13.1} {plain:10.1} {speed_up:9.2}x")?;
        }
        writeln!(f)
    }

    fn write_lossless(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(lossless) = &self.lossless else {
            return writeln!(f, "lossless  not compared: sampled texts differ by chance");
        };
        writeln!(
            f,
            "lossless  {}: {} of {} answers identical to plain greedy decoding, {} tied, {} differ",
            if lossless.holds { "yes" } else { "NO" },
            lossless.identical,
            lossless.responses,
            lossless.ties.len(),
            lossless.failures.len()
        )?;
        let listed = |kind| move |difference| (kind, difference);
        let all = lossless.ties.iter().map(listed("tie"));
        for (kind, difference) in all.chain(lossless.failures.iter().map(listed("DIFFERS"))) {
            writeln!(f, "  {kind}: {difference}")?;
        }
        Ok(())
    }
}

impl Display for Difference {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let token = |token: Option<i64>| token.map_or("end".to_owned(), |id| id.to_string());
        write!(
            f,
            "answer {}, token {}: plain {}, speculative {}",
            self.response,
            self.position,
            token(self.plain),
            token(self.speculative)
        )?;
        match self.logit_gap.zip(self.tie_tolerance) {
            Some((gap, tie)) => write!(f, ", logits {gap:.1e} apart (a tie up to {tie:.1e})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_weigh_long_answers_and_medians_do_not() {
        let timings =
            [[(10.0, 1.0), (10.0, 2.0)], [(90.0, 1.0), (90.0, 18.0)], [(10.0, 1.0), (10.0, 5.0)]];
        let speed = Speed::of(&timings);
        assert!((speed.speculative - 110.0 / 3.0).abs() < 1e-9);
        assert!((speed.plain - 4.4).abs() < 1e-9);
        assert!((speed.speed_up - 25.0 / 3.0).abs() < 1e-9);
        assert_eq!((speed.median_speculative, speed.median_plain), (10.0, 5.0));
        assert_eq!(speed.median_speed_up, 5.0);
        assert_eq!(Speed::of(&[]).speed_up, 0.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
