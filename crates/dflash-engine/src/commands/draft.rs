//! The draft that the settings describe: what they leave open comes from a stored draft, from the
//! target and its tokenizer, or is the paper's choice.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_hub::{Hub, Part};
use dflash_model::draft::DraftConfig;
use dflash_model::target::{TargetConfig, TokenizerFacts, default_layer_ids, resolve_mask_token};
use dflash_settings::{
    DEFAULT_BLOCK_SIZE, DEFAULT_CAPTURES, DEFAULT_LAYERS, DraftSettings, Invalid,
};
use dflash_text::ChatTokenizer;
use dflash_train::config::DraftShape;

/// The draft to start from, where there is one.
pub(super) struct Draft {
    /// Its directory.
    pub(super) dir: Option<PathBuf>,
    config: Option<DraftConfig>,
}

/// The directory of the draft `name`: a checkpoint, a run or its `latest` or `best`, or a repository.
pub(super) fn find(name: &str, stop: &Arc<AtomicBool>) -> anyhow::Result<PathBuf> {
    let found = dflash_run::draft_dir(Path::new(name))?;
    if found != Path::new(name) {
        tracing::info!("{name} stands for {}", found.display());
        return Ok(found);
    }
    Ok(Hub::from_env().model(name, Part::Draft, stop)?)
}

impl Draft {
    pub(super) fn locate(settings: &DraftSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<Self> {
        let named = settings.from_pretrained.as_deref();
        let dir = named.map(|name| find(name, stop)).transpose()?;
        let config = dir.as_deref().map(DraftConfig::load).transpose()?;
        Ok(Self { dir, config })
    }

    /// The draft's shape but for its mask token, which needs the tokenizer: 0 where it is not given.
    pub(super) fn shape(
        &self,
        settings: &DraftSettings,
        target_dir: &Path,
    ) -> anyhow::Result<DraftShape> {
        let depth = TargetConfig::load(target_dir)?.num_hidden_layers;
        let stored = self.config.as_ref();
        let layers = stored.map_or(DEFAULT_LAYERS, |draft| draft.layers.len());
        let slots = stored.map_or(DEFAULT_BLOCK_SIZE, |draft| draft.block_size);
        let ids = settings.target_layer_ids.clone();
        let window = settings.sliding_window;
        Ok(DraftShape {
            num_layers: settings.num_layers.unwrap_or(layers),
            block_size: settings.block_size.unwrap_or(slots),
            target_layer_ids: ids
                .or_else(|| stored.map(|draft| draft.target_layer_ids.clone()))
                .unwrap_or_else(|| default_layer_ids(depth, DEFAULT_CAPTURES)),
            mask_token_id: settings.mask_token_id.unwrap_or_default(),
            sliding_window: window.or_else(|| stored.and_then(|draft| draft.sliding_window)),
            vocab_size: settings.draft_vocab_size,
        })
    }

    /// The whole shape.
    pub(super) fn shape_with_mask(
        &self,
        settings: &DraftSettings,
        target_dir: &Path,
    ) -> anyhow::Result<DraftShape> {
        let shape = self.shape(settings, target_dir)?;
        let tokenizer = ChatTokenizer::load(target_dir)?;
        if let Some(id) = settings.mask_token_id {
            refuse_text(&tokenizer, id)?;
        }
        let stored = self.config.as_ref().map(|draft| draft.mask_token_id);
        let rows = TargetConfig::load(target_dir)?.vocab_size;
        let named = settings.mask_token_id.or(stored);
        let mask_token_id = resolve_mask_token(named, facts(&tokenizer), rows)?;
        Ok(DraftShape { mask_token_id, ..shape })
    }
}

/// Refuses a mask token that means something, or that the target has no row for.
pub(super) fn check_mask_token(
    tokenizer: &ChatTokenizer,
    target_dir: &Path,
    id: i64,
) -> anyhow::Result<()> {
    let rows = TargetConfig::load(target_dir)?.vocab_size;
    resolve_mask_token(Some(id), facts(tokenizer), rows)?;
    Ok(())
}

fn facts(tokenizer: &ChatTokenizer) -> TokenizerFacts {
    let special = tokenizer.special_ids();
    TokenizerFacts {
        len: tokenizer.len() as i64,
        mask: special.mask,
        pad: special.pad,
        eos: special.eos,
        unk: special.unk,
    }
}

/// A mask token must mean nothing: a draft that meets it in answers learns to propose blanks.
fn refuse_text(tokenizer: &ChatTokenizer, id: i64) -> anyhow::Result<()> {
    let text = tokenizer.decode(&[id], true)?;
    if text.is_empty() {
        return Ok(());
    }
    let reason = format!(
        "{id} is {text:?}, which occurs in text; take a special token or a row of the embedding \
         that the tokenizer does not use"
    );
    Err(Invalid { key: "mask_token_id", reason, missing: None }.into())
}
