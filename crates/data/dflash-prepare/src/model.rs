//! The target's tokenizer, from a directory or from the Hub.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use dflash_chat::ChatTokenizer;
use dflash_data::PreparedFor;
use dflash_hub::{Hub, ModelPart};
use dflash_settings::PrepareSettings;
use serde_json::Value;

use crate::error::Error;

/// A tokenizer and the bound of its ids.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) tokenizer: ChatTokenizer,
    pub(crate) dir: PathBuf,
    /// Rows of the target's embedding, or the tokenizer's size if there is no configuration.
    pub(crate) vocab_size: usize,
    /// The identity that the dataset records.
    pub(crate) identity: PreparedFor,
}

impl Model {
    pub(crate) fn load(settings: &PrepareSettings, stop: &AtomicBool) -> Result<Self, Error> {
        let dir = Hub::from_env().model(settings.target(), ModelPart::Tokenizer, stop)?;
        let mut tokenizer = ChatTokenizer::load(&dir)?;
        if let Some(variables) = &settings.chat_template_kwargs {
            tokenizer.extend_template_variables(variables.clone())?;
        }
        let vocab_size = embedding_rows(&dir).unwrap_or(0).max(tokenizer.len());
        let identity = PreparedFor::of(&dir, settings.target())?;
        Ok(Self { tokenizer, dir, vocab_size, identity })
    }
}

/// `vocab_size` of `config.json`; multimodal models keep it under `text_config`.
fn embedding_rows(dir: &Path) -> Option<usize> {
    let text = std::fs::read(dir.join("config.json")).ok()?;
    let config: Value = serde_json::from_slice(&text).ok()?;
    let rows =
        config["vocab_size"].as_u64().or_else(|| config["text_config"]["vocab_size"].as_u64());
    usize::try_from(rows?).ok()
}
