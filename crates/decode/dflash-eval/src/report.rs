//! The report of an evaluation: configuration, results by set, and totals of the first draft.

use std::collections::{BTreeMap, HashMap};

use dflash_identity::TargetIdentity;
use dflash_run::{AcceptanceFigures, EvalMode, Evaluation, Identical, Rates, SlotCounts};
use dflash_settings::NO_DRAFT;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::advice::AUTO_SUFFIX;
use crate::answer::{Answer, Verification};
use crate::baseline::Comparison;
use crate::bootstrap::spread;
use crate::figures::{AnsweredSet, Figures, Whole};
use crate::lossless::{Difference, Lossless};
use crate::speed::{Span, Speed, median};

/// One set, answered in one mode by one draft.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Name of the set.
    pub set: String,
    /// The mode.
    #[serde(flatten)]
    pub mode: EvalMode,
    /// Name of the draft; `none` is plain decoding.
    pub draft: String,
    /// Answers made.
    pub responses: usize,
    /// Rows that a server did not answer completely.
    #[serde(default)]
    pub failed: usize,
    /// Their tokens.
    pub tokens: usize,
    /// The metrics.
    #[serde(flatten)]
    pub figures: Figures,
    /// Standard error of each metric by name, from 500 bootstrap samples of the answers.
    pub noise: BTreeMap<String, f64>,
    /// Comparison with plain greedy decoding; `None` if tokens are sampled, because texts then
    /// differ by chance, and for servers, which do not return their logits.
    #[serde(default)]
    pub lossless: Option<Lossless>,
    /// Measurements of all answers together.
    #[serde(default)]
    pub whole: Whole,
    /// Seconds of a step with no proposals, with one and so on, if lengths are chosen by them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub step_seconds: Vec<f64>,
    /// The answers.
    pub answers: Vec<Answer>,
}

/// A draft of the evaluation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DraftFacts {
    /// Its name in tables.
    pub label: String,
    /// The name given by the user.
    pub name: String,
    /// Slots of a block, including the anchor's; `None` if not known.
    pub block_size: Option<usize>,
    /// Number of tokens that it can propose, if fewer than the target has.
    pub vocabulary: Option<usize>,
    /// Digest of its weights file; `None` if it has none, or weights are in shards.
    pub weights: Option<String>,
    /// Kind of its head, if only dflash serves it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head: Option<String>,
}

/// A set of prompts that was answered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SetFacts {
    /// Its name.
    pub name: String,
    /// Its name in tables.
    pub title: String,
    /// Where its rows came from: a file, or a repository with configuration and split.
    pub source: String,
    /// The repository's commit, if there is one.
    pub revision: Option<String>,
    /// Rows read.
    pub rows: usize,
    /// Rows skipped because prompt and answer exceed the target's context.
    pub skipped: usize,
    /// Rows that a server did not answer completely: the sum over its results.
    pub failed: usize,
}

/// Peak memory, MiB; `None` if not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Resident memory of the process.
    pub process_mib: Option<f64>,
    /// Tensors on the GPU.
    pub device_mib: Option<f64>,
}

/// The configuration of an evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Facts {
    /// The target's directory, or the server's name for it.
    pub target: String,
    /// The target's identity; `None` for a server, which does not provide it.
    pub target_identity: Option<TargetIdentity>,
    /// The server that was measured, and its kind.
    pub endpoint: Option<String>,
    /// The drafts, in the order of the command line.
    pub drafts: Vec<DraftFacts>,
    /// The sets, in the same order.
    pub sets: Vec<SetFacts>,
    /// Longest answer, in tokens.
    pub max_new_tokens: usize,
    /// Random seed for sampling.
    pub seed: u64,
    /// Device and precision, and CPU threads; empty for servers.
    pub device: String,
    /// The CPU instruction level in force; `None` on a GPU and for servers.
    pub cpu_level: Option<String>,
    /// Peak memory.
    pub memory: Memory,
}

/// The whole report. Its top level has the first draft over all sets in the first mode.
#[allow(missing_docs, reason = "settings under their own names")]
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalReport {
    pub target: String,
    /// The target's identity; `None` for a server, which does not provide it.
    pub target_identity: Option<TargetIdentity>,
    pub draft: String,
    pub prompts: String,
    /// Answers made.
    pub responses: usize,
    /// Rows skipped because prompt and answer exceed the target's context.
    pub skipped: usize,
    /// Tokens of all its answers.
    pub tokens: usize,
    pub max_new_tokens: usize,
    /// 0 for greedy decoding.
    pub temperature: f64,
    /// Slots of a block, including the anchor's; `None` if a server does not provide it.
    pub block_size: Option<usize>,
    /// Number of tokens of a pruned vocabulary; `None` if the draft can propose all.
    pub draft_vocabulary: Option<usize>,
    /// Device and precision, and CPU threads.
    pub device: String,
    /// The CPU instruction level in force; `None` on a GPU and for servers.
    pub cpu_level: Option<String>,
    /// Verify steps.
    pub steps: u64,
    /// Acceptance, with the metrics of a validation. A value that was not measured is NaN, which is
    /// null in JSON.
    #[serde(flatten)]
    pub acceptance: AcceptanceFigures,
    /// Every slot after the anchor.
    pub slots: Vec<SlotCounts>,
    /// Speed from the prompt to the last token.
    pub tokens_per_second: Speed,
    /// Speed after the first token.
    pub decode_tokens_per_second: Speed,
    /// Comparison with plain greedy decoding.
    pub lossless: Option<Lossless>,
    /// Random seed for sampling.
    pub seed: u64,
    /// The server that was measured, and its kind.
    pub endpoint: Option<String>,
    pub memory: Memory,
    pub drafts: Vec<DraftFacts>,
    pub sets: Vec<SetFacts>,
    /// Each set, mode and draft.
    pub results: Vec<Measured>,
    /// The results of each trained draft, set and mode that are kept for publication.
    pub evaluations: Vec<Evaluation>,
    /// The comparison with an earlier report.
    pub comparison: Option<Comparison>,
}

impl Measured {
    /// The result of `answers` to `set`; `plain` are those of plain decoding in the same mode, if
    /// it was measured.
    pub fn new(
        set: &str,
        mode: EvalMode,
        draft: &str,
        answers: Vec<Answer>,
        whole: Whole,
        lossless: Option<Lossless>,
        plain: Option<&Self>,
    ) -> Self {
        let mut measured = Self {
            set: set.to_owned(),
            mode,
            draft: draft.to_owned(),
            responses: answers.len(),
            failed: 0,
            tokens: answers.iter().map(|answer| answer.tokens).sum(),
            figures: Figures::default(),
            noise: BTreeMap::new(),
            lossless,
            whole,
            step_seconds: Vec::new(),
            answers,
        };
        let pairs = plain.and_then(|plain| Pairs::new(&measured, plain));
        let beside = plain.map(|plain| (plain_side(&measured, plain), &plain.whole));
        let beside = beside.as_ref().map(|(answers, whole)| AnsweredSet { answers, whole });
        let answers: Vec<&Answer> = measured.answers.iter().collect();
        let own = AnsweredSet { answers: &answers, whole: &measured.whole };
        measured.figures = Figures::of(own, beside);
        let draws = |drawn: &[usize]| measured.figures_of(drawn, pairs.as_ref()).named();
        measured.noise = spread(measured.responses, draws);
        measured.noise.retain(|name, _| !measured.whole.says(name));
        measured.noise.extend(measured.whole.noise(plain.map(|plain| &plain.whole)));
        measured
    }

    /// The metrics of the answers with these indices only, relative to the plain answers to the
    /// same prompts.
    pub(crate) fn figures_of(&self, indices: &[usize], pairs: Option<&Pairs<'_>>) -> Figures {
        let own: Vec<&Answer> = indices.iter().map(|&index| &self.answers[index]).collect();
        let plain = pairs.map(|pairs| (pairs.of(indices), pairs.whole));
        let plain = plain.as_ref().map(|(answers, whole)| AnsweredSet { answers, whole });
        Figures::of(AnsweredSet { answers: &own, whole: &self.whole }, plain)
    }

    /// Whether the number of proposals was chosen in each step.
    pub fn is_auto(&self) -> bool {
        self.draft.ends_with(AUTO_SUFFIX)
    }

    /// Whether this is plain decoding.
    pub fn is_plain(&self) -> bool {
        self.draft == NO_DRAFT
    }

    /// Tokens per second after the first token, the median over answers.
    pub fn median_decode_rate(&self) -> Option<f64> {
        median(self.answers.iter().filter_map(|answer| Span::Decode.rate(answer)).collect())
    }

    /// Speed-up as in papers: of decoding after the first token at concurrency 1, of all tokens in
    /// the total time otherwise.
    pub fn table_speed_up(&self) -> Option<f64> {
        match self.mode.concurrency {
            _ if self.is_plain() => Some(1.0),
            1 => self.figures.decode_speed_up,
            _ => self.figures.speed_up,
        }
    }

    /// Tau as in papers: per response, or over all steps if only that is known.
    pub fn table_tau(&self) -> Option<f64> {
        self.figures.acceptance_length_per_response.or(self.figures.acceptance_length)
    }
}

impl Whole {
    /// Whether a metric is one of the whole, which resampling answers does not change.
    fn says(&self, figure: &str) -> bool {
        let of_time = ["tokens_per_second", "speed_up"].contains(&figure);
        (self.seconds.is_some() && of_time)
            || (self.verification.is_some() && figure.starts_with("acceptance"))
    }
}

/// The plain answer to the prompt of each answer.
#[derive(Debug)]
pub(crate) struct Pairs<'a> {
    plain: Vec<&'a Answer>,
    whole: &'a Whole,
}

impl<'a> Pairs<'a> {
    /// `None` if an answer has no counterpart: rows of several turns can end at different ones.
    pub(crate) fn new(measured: &Measured, plain: &'a Measured) -> Option<Self> {
        let by_prompt: HashMap<_, _> =
            plain.answers.iter().map(|answer| ((answer.row, answer.turn), answer)).collect();
        let of = |answer: &Answer| by_prompt.get(&(answer.row, answer.turn)).copied();
        let plain_answers = measured.answers.iter().map(of).collect::<Option<Vec<_>>>()?;
        Some(Self { plain: plain_answers, whole: &plain.whole })
    }

    /// The plain answer to each prompt, in the order of the answers.
    pub(crate) fn answers(&self) -> impl Iterator<Item = &'a Answer> {
        self.plain.iter().copied()
    }

    fn of(&self, indices: &[usize]) -> Vec<&'a Answer> {
        indices.iter().map(|&index| self.plain[index]).collect()
    }
}

/// The plain answers that `measured` is compared with: those to the same prompts, or all of them if
/// an answer has no counterpart.
pub(crate) fn plain_side<'a>(measured: &Measured, plain: &'a Measured) -> Vec<&'a Answer> {
    match Pairs::new(measured, plain) {
        Some(pairs) => pairs.answers().collect(),
        None => plain.answers.iter().collect(),
    }
}

/// Plain decoding of the same set in the same mode.
pub(crate) fn plain_of<'a>(results: &'a [Measured], measured: &Measured) -> Option<&'a Measured> {
    let same = |other: &&Measured| other.set == measured.set && other.mode == measured.mode;
    results.iter().filter(|other| other.is_plain() && !measured.is_plain()).find(same)
}

impl EvalReport {
    /// The report of `results`, which are in the order of sets, modes and drafts.
    pub fn new(facts: Facts, results: Vec<Measured>) -> Self {
        let of_draft = |result: &&Measured| !result.is_plain() && !result.is_auto();
        let drafted = || results.iter().find(|result| !result.is_plain());
        let first = results.iter().find(of_draft).or_else(drafted).or(results.first());
        let first = first.map(|first| (first.mode, first.draft.clone()));
        let pooled: Vec<&Measured> = results
            .iter()
            .filter(|result| first.as_ref() == Some(&(result.mode, result.draft.clone())))
            .collect();
        let beside: Vec<(&Measured, Option<&Measured>)> =
            pooled.iter().map(|&one| (one, plain_of(&results, one))).collect();
        let counts = counts(&pooled);
        let draft = first.as_ref().map_or("", |(_, draft)| draft.as_str());
        let draft = facts.drafts.iter().find(|known| known.label == draft);
        let evaluations =
            results.iter().filter_map(|result| evaluation(&facts, &results, result)).collect();
        let names: Vec<&str> = facts.sets.iter().map(|set| set.name.as_str()).collect();
        Self {
            draft: draft.map_or(NO_DRAFT, |draft| draft.name.as_str()).to_owned(),
            prompts: match facts.sets.as_slice() {
                [only] if only.revision.is_none() => only.source.clone(),
                _ => names.join(", "),
            },
            responses: pooled.iter().map(|one| one.responses).sum(),
            skipped: facts.sets.iter().map(|set| set.skipped).sum(),
            tokens: pooled.iter().map(|one| one.tokens).sum(),
            temperature: first.as_ref().map_or(0.0, |(mode, _)| mode.temperature),
            block_size: draft.and_then(|draft| draft.block_size),
            draft_vocabulary: draft.and_then(|draft| draft.vocabulary),
            steps: counts.steps(),
            acceptance: measured_alone(counts.figures(), counts.steps()),
            slots: counts.slots(),
            tokens_per_second: Speed::of(&beside, Span::Whole),
            decode_tokens_per_second: Speed::of(&beside, Span::Decode),
            lossless: Lossless::sum(pooled.iter().filter_map(|one| one.lossless.as_ref())),
            target: facts.target,
            target_identity: facts.target_identity,
            evaluations,
            max_new_tokens: facts.max_new_tokens,
            device: facts.device,
            cpu_level: facts.cpu_level,
            seed: facts.seed,
            endpoint: facts.endpoint,
            memory: facts.memory,
            drafts: facts.drafts,
            sets: facts.sets,
            results,
            comparison: None,
        }
    }

    /// Fails if speculative decoding changed a text by more than a tie.
    ///
    /// # Errors
    /// [`Error::NotLossless`].
    pub fn check(&self) -> Result<(), Error> {
        let own = self.lossless.iter().filter(|_| self.results.is_empty());
        let all = self.results.iter().filter_map(|result| result.lossless.as_ref()).chain(own);
        let all: Vec<&Lossless> = all.collect();
        let failures = all.iter().map(|lossless| lossless.failures.len()).sum();
        let responses = all.iter().map(|lossless| lossless.responses).sum();
        if failures > 0 { Err(Error::NotLossless { failures, responses }) } else { Ok(()) }
    }

    /// The measured modes, in order.
    pub(crate) fn modes(&self) -> Vec<EvalMode> {
        let mut modes: Vec<EvalMode> = Vec::new();
        for result in &self.results {
            if !modes.contains(&result.mode) {
                modes.push(result.mode);
            }
        }
        modes
    }

    /// The name of a set in tables.
    pub(crate) fn title<'a>(&'a self, set: &'a str) -> &'a str {
        self.sets.iter().find(|known| known.name == set).map_or(set, |known| &known.title)
    }
}

/// The metrics of `steps` steps: NaN if there were none.
fn measured_alone(figures: AcceptanceFigures, steps: u64) -> AcceptanceFigures {
    let known = |value: f64, is_known: bool| if is_known { value } else { f64::NAN };
    AcceptanceFigures {
        acceptance_length: known(figures.acceptance_length, steps > 0),
        acceptance_length_per_response: known(
            figures.acceptance_length_per_response,
            figures.acceptance_length_per_response > 0.0,
        ),
        ..figures
    }
}

/// The published form of a result: `None` for drafts without weights, and for answers too short for
/// a step.
fn evaluation(facts: &Facts, results: &[Measured], result: &Measured) -> Option<Evaluation> {
    let draft = facts.drafts.iter().find(|draft| draft.label == result.draft)?;
    let set = facts.sets.iter().find(|set| set.name == result.set)?;
    let counts = counts(&[result]);
    let plain = plain_of(results, result)?;
    Some(Evaluation {
        draft_weights: Some(draft.weights.clone()?),
        target_identity: facts.target_identity.clone(),
        prompts: set.title.clone().into(),
        responses: result.responses,
        tokens: result.tokens,
        max_new_tokens: facts.max_new_tokens,
        mode: result.mode,
        block_size: draft.block_size?,
        device: facts.device.clone(),
        acceptance: (counts.steps() > 0).then(|| counts.figures())?,
        tokens_per_second: Rates {
            speculative: result.figures.tokens_per_second?,
            plain: plain.figures.tokens_per_second?,
            speed_up: result.figures.speed_up?,
            speed_up_error: result.noise.get("speed_up").copied(),
        },
        lossless: result.lossless.as_ref().map(|lossless| Identical {
            responses: lossless.responses,
            identical: lossless.identical,
            ties: lossless.ties.iter().map(as_json).collect(),
            failures: lossless.failures.iter().map(as_json).collect(),
        }),
    })
}

fn as_json(difference: &Difference) -> serde_json::Value {
    serde_json::to_value(difference).expect("it holds numbers")
}

/// The verify steps of all `pooled` sets.
fn counts(pooled: &[&Measured]) -> dflash_run::Acceptance {
    fn each<'a>(one: &&'a Measured) -> impl Iterator<Item = &'a Verification> {
        one.answers.iter().filter_map(|answer| answer.verification.as_ref())
    }
    let all: Vec<&Verification> = pooled
        .iter()
        .flat_map(|one| match &one.whole.verification {
            Some(whole) => vec![whole],
            None => each(one).collect(),
        })
        .collect();
    let lengths: Vec<f64> =
        pooled.iter().flat_map(each).filter_map(Verification::acceptance_length).collect();
    Verification::sum(all.into_iter()).counts(&lengths)
}

#[cfg(test)]
pub(crate) mod tests;
