//! A target with its tokenizer and, where there is one, its draft.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflash_chat::ChatTokenizer;
use dflash_draft::LoadedDraft;
use dflash_identity::TargetIdentity;
use dflash_io::say;
use dflash_settings::{Device, Dtype, NGRAM_SIZE, NGRAM_TOKENS};
use dflash_target::{Target, TargetOptions};
use dflash_tensor::{DeviceKind, place};
use serde_json::{Map, Value};

use crate::Error;
use crate::engine::{Engine, EngineOptions, Proposals};

/// Where proposals come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftSource {
    /// Nowhere: plain decoding.
    None,
    /// The text so far.
    Ngram,
    /// A trained draft.
    Trained {
        /// What the user calls it.
        name: String,
        /// Its directory.
        dir: PathBuf,
    },
}

/// The same, loaded.
#[derive(Debug)]
pub enum LoadedProposer {
    /// Nothing.
    None,
    /// Look-up decoding: see [`Proposals::Ngram`].
    Ngram {
        /// The longest run of last tokens that is looked up.
        size: usize,
        /// Tokens proposed at a time.
        tokens: usize,
    },
    /// A draft.
    Draft(Box<LoadedDraft>),
}

impl LoadedProposer {
    /// As an engine takes it.
    pub fn proposals(&self) -> Proposals<'_> {
        match self {
            Self::None => Proposals::None,
            &Self::Ngram { size, tokens } => Proposals::Ngram { size, tokens },
            Self::Draft(loaded) => Proposals::Draft(loaded),
        }
    }

    /// Whether it proposes anything.
    pub fn is_some(&self) -> bool {
        !matches!(self, Self::None)
    }
}

/// Which models, and where they run.
#[derive(Debug, Clone)]
pub struct ModelsConfig {
    /// Directory of the target.
    pub target_dir: PathBuf,
    /// What the user calls it.
    pub target_name: String,
    /// What proposes tokens.
    pub draft: DraftSource,
    /// Take a draft that was made for another target.
    pub allow_other_target: bool,
    /// The device.
    pub device: Device,
    /// The precision.
    pub dtype: Dtype,
    /// CPU threads of one operation; `None` for libtorch's choice.
    pub threads: Option<usize>,
    /// Variables that the chat template always sees.
    pub template_variables: Option<Map<String, Value>>,
}

/// What answering takes.
#[derive(Debug)]
pub struct Models {
    /// The verifier.
    pub target: Target,
    /// What proposes tokens.
    pub proposer: LoadedProposer,
    /// The target's.
    pub tokenizer: Arc<ChatTokenizer>,
    /// Which target it is.
    pub identity: TargetIdentity,
}

impl Models {
    /// # Errors
    /// Models that cannot be loaded; a draft that was made for another target, unless that is wanted.
    pub fn load(config: ModelsConfig) -> Result<Self, Error> {
        if let Some(threads) = config.threads {
            tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
        }
        let DeviceKind { device, kind: dtype } = place(config.device, config.dtype, 0)?;
        let mut tokenizer = ChatTokenizer::load(&config.target_dir)?;
        if let Some(variables) = config.template_variables {
            tokenizer.extend_template_variables(variables)?;
        }
        let target = Target::load(&config.target_dir, &TargetOptions { device, dtype })?;
        let identity = TargetIdentity::read(&config.target_dir, &config.target_name)?;
        let proposer = match &config.draft {
            DraftSource::None => LoadedProposer::None,
            DraftSource::Ngram => LoadedProposer::Ngram { size: NGRAM_SIZE, tokens: NGRAM_TOKENS },
            DraftSource::Trained { dir, .. } => {
                let draft = LoadedDraft::load(dir, device, dtype)?;
                check_target(&identity, dir, config.allow_other_target)?;
                LoadedProposer::Draft(Box::new(draft))
            }
        };
        Ok(Self { target, proposer, tokenizer: Arc::new(tokenizer), identity })
    }

    /// An engine of these, with the draft, or look-up decoding, where that was asked for.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn engine(&self, options: EngineOptions) -> Result<Engine<'_>, Error> {
        Engine::new(&self.target, self.proposer.proposals(), options)
    }

    /// The tokens that end an answer, by the target's configuration and its tokenizer.
    pub fn stop_ids(&self) -> Vec<i64> {
        let mut ids = self.target.config().eos_token_ids.clone();
        ids.extend(self.tokenizer.special_ids().eos);
        ids
    }
}

/// Refuses a draft that was made for another target, as far as it says, unless that is wanted.
pub(crate) fn check_target(
    target: &TargetIdentity,
    draft_dir: &Path,
    allow_other_target: bool,
) -> Result<(), Error> {
    let Some(made_for) = TargetIdentity::of_draft(draft_dir)? else { return Ok(()) };
    if made_for.is_same_as(target) {
        return Ok(());
    }
    if allow_other_target {
        say(format!("the draft was made for {made_for} and is used on {target}"));
        return Ok(());
    }
    let (found, expected) = (made_for.to_string(), target.to_string());
    Err(Error::OtherTarget { path: draft_dir.into(), found, expected })
}
