//! A target with its tokenizer and optional draft.

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

/// Source of proposals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftSource {
    /// None: plain decoding.
    None,
    /// The text so far.
    Ngram,
    /// A trained draft.
    Trained {
        /// Name as given by the user.
        name: String,
        /// Its directory.
        dir: PathBuf,
    },
}

/// A loaded [`DraftSource`].
#[derive(Debug)]
pub enum LoadedProposer {
    /// Nothing.
    None,
    /// Lookup decoding: see [`Proposals::Ngram`].
    Ngram {
        /// Maximum length of the looked-up suffix.
        size: usize,
        /// Tokens proposed at a time.
        tokens: usize,
    },
    /// A draft.
    Draft(Box<LoadedDraft>),
}

impl LoadedProposer {
    /// In the form that an engine takes.
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

/// Models to load, and where they run.
#[derive(Debug, Clone)]
pub struct ModelsConfig {
    /// Directory of the target.
    pub target_dir: PathBuf,
    /// Name as given by the user.
    pub target_name: String,
    /// Source of proposals.
    pub draft: DraftSource,
    /// Accept a draft that was made for another target.
    pub allow_other_target: bool,
    /// The device.
    pub device: Device,
    /// The precision.
    pub dtype: Dtype,
    /// Threads per CPU operation; `None` for libtorch's default.
    pub threads: Option<usize>,
    /// Variables that are always passed to the chat template.
    pub template_variables: Option<Map<String, Value>>,
}

/// Loaded models.
#[derive(Debug)]
pub struct Models {
    /// The verifier.
    pub target: Target,
    /// The proposer.
    pub proposer: LoadedProposer,
    /// The target's tokenizer.
    pub tokenizer: Arc<ChatTokenizer>,
    /// The target's identity.
    pub identity: TargetIdentity,
}

impl Models {
    /// # Errors
    /// Models that cannot be loaded; a draft that was made for another target, unless allowed.
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

    /// An engine with these models and their proposer.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn engine(&self, options: EngineOptions) -> Result<Engine<'_>, Error> {
        Engine::new(&self.target, self.proposer.proposals(), options)
    }

    /// The tokens that end an answer, from the target's configuration and tokenizer.
    pub fn stop_ids(&self) -> Vec<i64> {
        let mut ids = self.target.config().eos_token_ids.clone();
        ids.extend(self.tokenizer.special_ids().eos);
        ids
    }
}

/// Rejects a draft that states another target, unless allowed.
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
