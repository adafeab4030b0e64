//! A target with its tokenizer and, where there is one, its draft.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflash_console::say;
use dflash_identity::TargetIdentity;
use dflash_model::draft::Draft;
use dflash_model::objective::DraftVocabulary;
use dflash_model::place;
use dflash_model::target::{Target, TargetOptions};
use dflash_settings::{Device, Dtype};
use dflash_text::ChatTokenizer;
use serde_json::{Map, Value};

use crate::Error;
use crate::engine::{Engine, EngineOptions};

/// Which models, and where they run.
#[derive(Debug, Clone)]
pub struct ModelsConfig {
    /// Directory of the target.
    pub target_dir: PathBuf,
    /// What the user calls it.
    pub target_name: String,
    /// Directory of the draft.
    pub draft_dir: Option<PathBuf>,
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
    /// The drafter, and the vocabulary it was trained to say.
    pub draft: Option<(Draft, Option<DraftVocabulary>)>,
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
        let (device, dtype) = place(config.device, config.dtype, 0)?;
        let mut tokenizer = ChatTokenizer::load(&config.target_dir)?;
        if let Some(variables) = config.template_variables {
            tokenizer.extend_template_variables(variables)?;
        }
        let target = Target::load(&config.target_dir, &TargetOptions { device, dtype })?;
        let identity = TargetIdentity::read(&config.target_dir, &config.target_name)?;
        let draft = match &config.draft_dir {
            None => None,
            Some(dir) => {
                let draft = Draft::load(dir, device, dtype)?;
                check_target(&identity, dir, config.allow_other_target)?;
                Some((draft, DraftVocabulary::load(dir)?))
            }
        };
        Ok(Self { target, draft, tokenizer: Arc::new(tokenizer), identity })
    }

    /// An engine of these, with the draft where there is one.
    ///
    /// # Errors
    /// As [`crate::Speculator::new`].
    pub fn engine(&self, options: EngineOptions) -> Result<Engine<'_>, Error> {
        match &self.draft {
            Some((draft, vocabulary)) => {
                Engine::speculative(&self.target, (draft, vocabulary.as_ref()), options)
            }
            None => Ok(Engine::plain(&self.target, options)),
        }
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
