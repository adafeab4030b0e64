//! Measuring a draft: real speculative decoding beside plain decoding of the same prompts.
//!
//! The two ways alternate answer by answer, and which goes first alternates too, so that a machine
//! that warms up or is shared slows both alike.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use dflash_console::{Progress, Unit, say};
use dflash_identity::{TargetIdentity, file_digest};
use dflash_model::draft::Draft;
use dflash_model::objective::DraftVocabulary;
use dflash_model::target::{Target, TargetOptions};
use dflash_model::{device_name, kind_name, place};
use dflash_run::{Acceptance, Checkpoint};
use dflash_settings::EvalSettings;
use dflash_text::ChatTokenizer;

use crate::Error;
use crate::lossless::{Lossless, compare};
use crate::models::check_target;
use crate::plain::{Generation, Limits, PlainDecoder};
use crate::prompts::{Prompt, usable_prompts};
use crate::report::{EvalReport, Speed, Timing};
use crate::sampling::{Sampler, Sampling};
use crate::speculative::{Speculation, Speculator};

/// Tokens that the untimed first answer makes, each way.
const WARM_UP_TOKENS: usize = 32;

/// Decodes every prompt both ways and reports. Writes the JSON file, if one is asked for, and keeps
/// the report beside the draft where that is a checkpoint of a run.
///
/// The report's [`EvalReport::check`] says whether the texts agree.
///
/// # Errors
/// Models or prompts that cannot be loaded or do not fit each other; [`Error::Interrupted`].
pub fn evaluate(
    settings: &EvalSettings,
    (target_dir, draft_dir): (&Path, &Path),
    stop: &AtomicBool,
) -> Result<EvalReport, Error> {
    let (device, dtype) = place(settings.device, settings.dtype, 0)?;
    let target = Target::load(target_dir, &TargetOptions { device, dtype })?;
    let draft = Draft::load(draft_dir, device, dtype)?;
    let identity = TargetIdentity::read(target_dir, &settings.target)?;
    check_target(&identity, draft_dir, settings.allow_other_target)?;
    let weights = draft_dir.join("model.safetensors");
    let digest = weights.is_file().then(|| file_digest(&weights)).transpose()?;
    let measured_of = (digest, identity);
    let vocabulary = DraftVocabulary::load(draft_dir)?;
    let tokenizer = ChatTokenizer::load(target_dir)?;
    let room = (target.config(), settings.max_new_tokens);
    let (prompts, skipped) = usable_prompts((&settings.prompts, settings.limit), &tokenizer, room)?;
    let sampler = Sampler::new(Sampling::at(settings.temperature), settings.seed);
    let speculator = Speculator::new(&target, &draft, vocabulary.as_ref(), sampler)?;
    let measured =
        Measurement::new(settings, (&target, &tokenizer), speculator).run(&prompts, stop)?;
    let report = measured.report(settings, (target_dir, draft_dir), measured_of, skipped);
    let document = serde_json::to_value(&report).expect("a report holds numbers and strings");
    if let Some(path) = &settings.json {
        let text = serde_json::to_vec_pretty(&document).expect("JSON prints");
        dflash_files::write_bytes(path, &text)?;
    }
    keep_beside(draft_dir, &document);
    Ok(report)
}

/// Keeps the report beside the checkpoint of a run that it is of, where that can be written to: the
/// figures are printed all the same.
fn keep_beside(draft_dir: &Path, report: &serde_json::Value) {
    let kept = Checkpoint::of_run(draft_dir).and_then(|found| match found {
        Some(checkpoint) => checkpoint.keep_evaluation(report),
        None => Ok(()),
    });
    if let Err(error) = kept {
        say(format!("the report is not kept beside the checkpoint: {error}"));
    }
}

/// Both decoders, and what they have shown so far.
struct Measurement<'a> {
    target: &'a Target,
    tokenizer: &'a ChatTokenizer,
    plain: PlainDecoder<'a>,
    speculator: Speculator<'a>,
    limits: Limits,
    acceptance: Acceptance,
    lossless: Option<Lossless>,
    whole: Vec<Timing>,
    decode: Vec<Timing>,
}

impl<'a> Measurement<'a> {
    fn new(
        settings: &EvalSettings,
        (target, tokenizer): (&'a Target, &'a ChatTokenizer),
        speculator: Speculator<'a>,
    ) -> Self {
        let sampler = Sampler::new(Sampling::at(settings.temperature), settings.seed);
        let greedy = sampler.is_greedy();
        Self {
            target,
            tokenizer,
            plain: PlainDecoder::new(target, sampler),
            acceptance: Acceptance::new(speculator.block_size()),
            speculator,
            limits: Limits::new(target.config(), tokenizer, settings.max_new_tokens),
            lossless: greedy.then(|| Lossless::new(settings.tie_tolerance)),
            whole: Vec::new(),
            decode: Vec::new(),
        }
    }

    fn run(mut self, prompts: &[Prompt], stop: &AtomicBool) -> Result<Self, Error> {
        self.warm_up(&prompts[0], stop)?;
        let mut progress = Progress::new("eval", Unit::Items, prompts.len() as u64);
        let (target, tokenizer) = (self.target, self.tokenizer);
        let room = (target.config(), self.limits.max_new_tokens);
        for (done, prompt) in prompts.iter().enumerate() {
            prompt.dialogue(tokenizer, room, |ids| self.answer(ids, stop))?;
            let speed = Speed::of(&self.whole);
            let message = format!(
                "acceptance length {:.2}, {:.0} against {:.0} tokens/s",
                self.acceptance.figures().acceptance_length,
                speed.speculative,
                speed.plain
            );
            progress.update(done as u64 + 1, message);
        }
        Ok(self)
    }

    /// An untimed answer each way: the first passes allocate, and fill caches.
    fn warm_up(&mut self, prompt: &Prompt, stop: &AtomicBool) -> Result<(), Error> {
        let max_new_tokens = WARM_UP_TOKENS.min(self.limits.max_new_tokens);
        let limits = Limits { max_new_tokens, ..self.limits.clone() };
        self.plain.generate(&prompt.ids, &limits, stop)?;
        self.speculator.generate(&prompt.ids, &limits, stop)?;
        Ok(())
    }

    /// Answers one prompt both ways; returns the plain answer's tokens.
    fn answer(&mut self, ids: &[i64], stop: &AtomicBool) -> Result<Vec<i64>, Error> {
        let plain_first = self.whole.len().is_multiple_of(2);
        let (plain, speculation) = if plain_first {
            let plain = self.plain.generate(ids, &self.limits, stop)?;
            (plain, self.speculator.generate(ids, &self.limits, stop)?)
        } else {
            let speculation = self.speculator.generate(ids, &self.limits, stop)?;
            (self.plain.generate(ids, &self.limits, stop)?, speculation)
        };
        self.record(ids, &plain, &speculation);
        Ok(plain.tokens)
    }

    fn record(&mut self, ids: &[i64], plain: &Generation, speculation: &Speculation) {
        let ways = [&speculation.generation, plain];
        self.whole.push(ways.map(|way| (way.tokens.len() as f64, way.seconds())));
        self.decode.push(ways.map(|way| (way.tokens.len() as f64 - 1.0, way.decode_seconds)));
        self.acceptance.record(&speculation.accepted);
        if let Some(lossless) = &mut self.lossless {
            let texts = [plain.tokens.as_slice(), &speculation.generation.tokens];
            lossless.record(compare(self.target, ids, texts, lossless.tie_tolerance));
        }
    }

    fn report(
        self,
        settings: &EvalSettings,
        (target_dir, draft_dir): (&Path, &Path),
        (draft_weights, target_identity): (Option<String>, TargetIdentity),
        skipped: usize,
    ) -> EvalReport {
        EvalReport {
            target: target_dir.into(),
            draft: draft_dir.into(),
            draft_weights,
            target_identity,
            prompts: settings.prompts.clone(),
            responses: self.whole.len(),
            skipped,
            tokens: self.whole.iter().map(|timing| timing[0].0 as usize).sum(),
            max_new_tokens: settings.max_new_tokens,
            temperature: settings.temperature,
            block_size: self.speculator.block_size(),
            draft_vocabulary: self.speculator.vocabulary_size(),
            device: format!(
                "{}, {}, {} threads",
                device_name(self.target.device()),
                kind_name(self.target.dtype()),
                tch::get_num_threads()
            ),
            steps: self.acceptance.steps(),
            acceptance: self.acceptance.figures(),
            slots: self.acceptance.slots(),
            tokens_per_second: Speed::of(&self.whole),
            decode_tokens_per_second: Speed::of(&self.decode),
            lossless: self.lossless,
        }
    }
}
