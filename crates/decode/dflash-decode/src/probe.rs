//! Acceptance of a draft during training, by speculative decoding of the same prompts every time.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use dflash_chat::ChatTokenizer;
use dflash_draft::LoadedDraft;
use dflash_io::{Progress, Show, Unit};
use dflash_run::Acceptance;
use dflash_settings::Speculate;
use dflash_target::{Target, TargetConfig, TargetOptions};

use crate::Error;
use crate::answer::answer;
use crate::engine::{Engine, EngineOptions, Proposals, Request};
use crate::limits::Limits;
use crate::prompts::{Prompt, Room, usable_prompts};
use crate::sampling::Sampling;

/// Settings of a measurement.
#[derive(Debug, Clone)]
pub struct ProbeConfig {
    /// Directory of the target, with its tokenizer.
    pub target: PathBuf,
    /// JSON or JSONL file of prompts.
    pub prompts: PathBuf,
    /// Maximum rows of the file.
    pub limit: Option<usize>,
    /// Maximum answer tokens.
    pub max_new_tokens: usize,
}

/// Prompts, and the target once it is loaded.
#[derive(Debug)]
pub struct Probe {
    config: ProbeConfig,
    tokenizer: ChatTokenizer,
    prompts: Vec<Prompt>,
    target: Option<Target>,
}

impl Probe {
    /// Reads the prompts; the target is loaded by the first measurement.
    ///
    /// # Errors
    /// Prompts that cannot be read, or none that leaves room for an answer.
    pub fn open(config: ProbeConfig) -> Result<Self, Error> {
        let tokenizer = ChatTokenizer::load(&config.target)?;
        let target = TargetConfig::load(&config.target)?;
        let room = Room { config: &target, max_new: config.max_new_tokens };
        let (prompts, _) = usable_prompts(&config.prompts, config.limit, &tokenizer, room)?;
        Ok(Self { config, tokenizer, prompts, target: None })
    }

    /// Decodes the prompts `first`, `first + stride`, ... greedily with a draft's proposals, on the
    /// draft's device and in its precision, and shows progress.
    ///
    /// # Errors
    /// A target that cannot be loaded or does not match; [`Error::Interrupted`].
    pub fn measure(
        &mut self,
        loaded: &LoadedDraft,
        first: usize,
        stride: usize,
        show: Show,
        stop: &AtomicBool,
    ) -> Result<Acceptance, Error> {
        let draft = &loaded.draft;
        let target = match &self.target {
            Some(target) => target,
            None => {
                let options = TargetOptions { device: draft.device(), dtype: draft.flat().kind() };
                self.target.insert(Target::load(&self.config.target, &options)?)
            }
        };
        let proposals = draft.config().block().proposals();
        let mut acceptance = Acceptance::new(proposals);
        let options = EngineOptions::one_by_one(target, Speculate::Tokens(proposals));
        let mut engine = Engine::new(target, Proposals::Draft(loaded), options)?;
        let limits = Limits::new(target.config(), &self.tokenizer, self.config.max_new_tokens);
        let room = Room { config: target.config(), max_new: limits.max_new_tokens };
        let own: Vec<&Prompt> = self.prompts.iter().skip(first).step_by(stride).collect();
        let title = "validation, decoding prompts";
        let mut progress = Progress::shown(show, title, Unit::Items, own.len() as u64);
        for (done, prompt) in own.into_iter().enumerate() {
            let length = acceptance.figures().acceptance_length;
            progress.update(done as u64, format_args!("acceptance length {length:.2}"));
            prompt.dialogue(&self.tokenizer, room, |ids| {
                let request = Request::new(ids, &limits, Sampling::GREEDY, 0);
                let made = answer(&mut engine, request, stop, |_| Ok(true))?;
                acceptance.record(&made.accepted());
                Ok(made.tokens)
            })?;
        }
        Ok(acceptance)
    }
}
