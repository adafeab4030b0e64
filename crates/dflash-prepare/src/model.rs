//! The target's tokenizer, from a directory or from the Hub.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use dflash_settings::PrepareSettings;
use dflash_text::ChatTokenizer;
use serde_json::Value;

use crate::error::Error;
use crate::hub;

/// A tokenizer with what bounds its ids.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) tokenizer: ChatTokenizer,
    pub(crate) dir: PathBuf,
    /// Rows of the target's embedding, or the tokenizer's size where no configuration says.
    pub(crate) vocab_size: usize,
}

impl Model {
    pub(crate) fn load(settings: &PrepareSettings, stop: &AtomicBool) -> Result<Self, Error> {
        let dir = locate(settings.target(), stop)?;
        let mut tokenizer = ChatTokenizer::load(&dir)?;
        if let Some(variables) = &settings.chat_template_kwargs {
            tokenizer.extend_template_variables(variables.clone())?;
        }
        let vocab_size = embedding_rows(&dir).unwrap_or(0).max(tokenizer.len());
        Ok(Self { tokenizer, dir, vocab_size })
    }
}

/// A directory as it is; a name of the form `owner/name` is fetched.
fn locate(model: &str, stop: &AtomicBool) -> Result<PathBuf, Error> {
    let path = Path::new(model);
    if path.is_dir() {
        return Ok(path.to_path_buf());
    }
    if !is_repository(model) {
        return Err(Error::NoModel { model: model.to_owned() });
    }
    hub::fetch_tokenizer(model, stop)
}

/// The directory of a drafter's checkpoint: as it is, or fetched when `draft` is `owner/name`.
///
/// # Errors
/// No such directory or repository, no network, or an interrupt.
pub fn locate_draft(draft: &str, stop: &AtomicBool) -> Result<PathBuf, Error> {
    let path = Path::new(draft);
    if path.is_dir() {
        return Ok(path.to_path_buf());
    }
    if !is_repository(draft) {
        return Err(Error::NoDraft { draft: draft.to_owned() });
    }
    hub::fetch_draft(draft, stop)
}

/// Whether `name` has the form `owner/name` of the Hub.
fn is_repository(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    parts.len() == 2 && parts.iter().all(|part| !part.is_empty() && !part.starts_with('.'))
}

/// `vocab_size` of `config.json`; multimodal models keep it under `text_config`.
fn embedding_rows(dir: &Path) -> Option<usize> {
    let text = std::fs::read(dir.join("config.json")).ok()?;
    let config: Value = serde_json::from_slice(&text).ok()?;
    let rows =
        config["vocab_size"].as_u64().or_else(|| config["text_config"]["vocab_size"].as_u64());
    usize::try_from(rows?).ok()
}
