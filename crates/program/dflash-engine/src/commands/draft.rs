//! Resolves the draft's settings: unset ones come from a stored draft, from the target and its
//! tokenizer, or from the paper.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_chat::ChatTokenizer;
use dflash_decode::DraftSource;
use dflash_draft::objective::DraftVocabulary;
use dflash_draft::{DraftConfig, HeadStart, fresh_head};
use dflash_hub::{Hub, ModelPart};
use dflash_settings::{
    DEFAULT_AUX_LAYERS, DEFAULT_BLOCK_SIZE, DEFAULT_LAYERS, DraftSettings, Invalid, NGRAM_DRAFT,
    NO_DRAFT,
};
use dflash_target::{
    MaskSource, TargetFacts, TokenizerFacts, default_layer_ids, resolve_mask_token,
};
use dflash_train::config::DraftShape;

/// The draft to start from, if any.
pub(super) struct Draft {
    pub(super) dir: Option<PathBuf>,
    config: Option<DraftConfig>,
    /// Size of its reduced vocabulary, if it has one.
    vocabulary: Option<usize>,
}

/// The directory of the draft `name`: a checkpoint, a run, its `latest` or `best`, or on the Hub.
pub(super) fn find(name: &str, stop: &Arc<AtomicBool>) -> anyhow::Result<PathBuf> {
    let found = dflash_run::draft_dir(Path::new(name))?;
    if found != Path::new(name) {
        tracing::info!("{name} stands for {}", found.display());
        return Ok(found);
    }
    Ok(Hub::from_env().model(name, ModelPart::Draft, stop)?)
}

/// The draft source `name` of the command line.
pub(super) fn source(name: &str, stop: &Arc<AtomicBool>) -> anyhow::Result<DraftSource> {
    Ok(match name {
        NO_DRAFT => DraftSource::None,
        NGRAM_DRAFT => DraftSource::Ngram,
        name => DraftSource::Trained { name: name.into(), dir: find(name, stop)? },
    })
}

/// The same for an optional setting.
pub(super) fn optional(name: Option<&str>, stop: &Arc<AtomicBool>) -> anyhow::Result<DraftSource> {
    name.map_or(Ok(DraftSource::None), |name| source(name, stop))
}

impl Draft {
    pub(super) fn locate(settings: &DraftSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<Self> {
        let named = settings.from_pretrained.as_deref();
        let dir = named.map(|name| find(name, stop)).transpose()?;
        let config = dir.as_deref().map(DraftConfig::load).transpose()?;
        let vocabulary = dir.as_deref().map(vocabulary_size).transpose()?.flatten();
        Ok(Self { dir, config, vocabulary })
    }

    /// The same draft with the shape stored in the checkpoint `resumed`, to be compared later.
    pub(super) fn resuming(self, resumed: &Path) -> Self {
        // Loading the checkpoint reports any damage later.
        let config = DraftConfig::load(resumed).ok().or(self.config);
        Self { config, vocabulary: vocabulary_size(resumed).ok().flatten(), ..self }
    }

    /// The draft's shape; the mask token, which depends on the tokenizer, is 0 unless given.
    pub(super) fn shape(&self, settings: &DraftSettings, target: &TargetFacts) -> DraftShape {
        let depth = target.num_hidden_layers;
        let stored = self.config.as_ref();
        let layers = stored.map_or(DEFAULT_LAYERS, |draft| draft.layers.len());
        let slots = stored.map_or(DEFAULT_BLOCK_SIZE, |draft| draft.block_size);
        let ids = settings.target_layer_ids.clone();
        let window = settings.sliding_window;
        DraftShape {
            num_layers: settings.num_layers.unwrap_or(layers),
            block_size: settings.block_size.unwrap_or(slots),
            target_layer_ids: ids
                .or_else(|| stored.map(|draft| draft.target_layer_ids.clone()))
                .unwrap_or_else(|| default_layer_ids(depth, DEFAULT_AUX_LAYERS)),
            mask_token_id: settings.mask_token_id.unwrap_or_default(),
            sliding_window: window.or_else(|| stored.and_then(|draft| draft.sliding_window)),
            vocab_size: settings.draft_vocab_size,
            head: fresh_head(settings, self.head_start(settings, target)),
            stored: stored.cloned().map(Box::new),
        }
    }

    fn head_start(&self, settings: &DraftSettings, target: &TargetFacts) -> HeadStart<'_> {
        let vocabulary = target.vocab_size as usize;
        let pruned = settings.draft_vocab_size.or(self.vocabulary);
        HeadStart {
            vocabulary,
            draft_vocabulary: pruned.unwrap_or(vocabulary),
            stored: self.config.as_ref().map(|draft| &draft.head),
        }
    }

    /// The complete shape, mask token included.
    pub(super) fn shape_with_mask(
        &self,
        settings: &DraftSettings,
        target_dir: &Path,
        target: &TargetFacts,
    ) -> anyhow::Result<DraftShape> {
        let shape = self.shape(settings, target);
        let tokenizer = tokenizer(target_dir)?;
        if let (Some(tokenizer), Some(id)) = (&tokenizer, settings.mask_token_id) {
            refuse_text(tokenizer, id)?;
        }
        let stored = self.config.as_ref().map(|draft| draft.mask_token_id);
        let facts = facts(tokenizer.as_ref(), target_dir, target)?;
        let mask = resolve_mask_token(settings.mask_token_id, stored, &facts, target.vocab_size)?;
        match &mask.source {
            MaskSource::Reserved(name) => tracing::info!(
                "the tokenizer uses all {} rows: the mask token is {name}, {}, which is reserved",
                target.vocab_size,
                mask.id
            ),
            MaskSource::Stored if [facts.pad, facts.unk].contains(&Some(mask.id)) => {
                tracing::info!(
                    "the mask token {} of the draft to start from is the tokenizer's padding or unknown \
                 token; it is kept",
                    mask.id
                )
            }
            _ => {}
        }
        Ok(DraftShape { mask_token_id: mask.id, ..shape })
    }
}

/// Size of the reduced vocabulary of the draft in `dir`, if it has one.
fn vocabulary_size(dir: &Path) -> dflash_tensor::Result<Option<usize>> {
    Ok(DraftVocabulary::load(dir)?.map(|vocabulary| vocabulary.selected().len()))
}

/// Refuses a mask token that occurs in text or has no row in the target's embedding.
pub(super) fn check_mask_token(
    tokenizer: Option<&ChatTokenizer>,
    target_dir: &Path,
    target: &TargetFacts,
    draft: &DraftConfig,
) -> anyhow::Result<()> {
    let facts = facts(tokenizer, target_dir, target)?;
    resolve_mask_token(None, Some(draft.mask_token_id), &facts, target.vocab_size)?;
    Ok(())
}

/// The target's tokenizer; `None` if only its own Python code can read it.
pub(super) fn tokenizer(target_dir: &Path) -> anyhow::Result<Option<ChatTokenizer>> {
    match ChatTokenizer::load(target_dir) {
        Ok(tokenizer) => Ok(Some(tokenizer)),
        Err(dflash_chat::Error::NoTokenizer { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The facts that determine the mask token; tokenizer_config.json replaces a missing
/// tokenizer.json.
fn facts(
    tokenizer: Option<&ChatTokenizer>,
    target_dir: &Path,
    target: &TargetFacts,
) -> anyhow::Result<TokenizerFacts> {
    let rows = target.vocab_size;
    let (special, added, len) = match tokenizer {
        Some(tokenizer) => (tokenizer.special_ids(), tokenizer.added(), tokenizer.len() as i64),
        // such a tokenizer has a token for every embedding row
        None => {
            let (special, added) = dflash_chat::added_tokens(target_dir, rows)?;
            (special, added, rows)
        }
    };
    let is_used =
        |id: &i64| tokenizer.is_some_and(|tokenizer| tokenizer.token(*id as u32).is_some());
    Ok(TokenizerFacts {
        len,
        beyond: (len..rows).filter(is_used).collect(),
        mask: special.mask,
        pad: special.pad.or(target.pad_token_id),
        eos: special.eos,
        unk: special.unk,
        added,
    })
}

/// The mask token must not occur in text, or a draft would learn to propose blanks.
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
