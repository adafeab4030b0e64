//! Starts training from another draft's weights.
//!
//! The checkpoint may be in z-lab's or speculators' layout, or one of our own, whose float32
//! weights are used if present. Hidden size, heads and the rotary base must match, because they tie
//! a draft to its target. Layers, block size, mask token and auxiliary layers may differ; the user
//! is told the consequences.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use dflash_draft::{Draft, DraftConfig, DraftLayout, LayerKind, Parameter, check_head};
use dflash_run::{Checkpoint, State};
use dflash_tensor::Weights;
use dflash_tensor::checkpoint::{TensorFile, pieces};
use tch::Tensor;

use crate::Error;
use crate::checkpoint::MASTER_WEIGHTS;
use crate::master_weights::AVERAGE;

/// A checkpoint that is compatible with the draft to be trained.
#[derive(Debug)]
pub(crate) struct WarmStart {
    dir: PathBuf,
    stored: DraftConfig,
    wanted: DraftConfig,
}

impl WarmStart {
    /// Reads the checkpoint's configuration and compares it with the draft `wanted`.
    pub(crate) fn open(dir: &Path, wanted: &DraftConfig) -> Result<Self, Error> {
        let stored = DraftConfig::load(dir).map_err(dflash_tensor::Error::from)?;
        check_head(&stored)?;
        let facts = |draft: &DraftConfig| {
            // not every layout records the target's depth
            let target_layers = draft.num_target_layers.or(wanted.num_target_layers);
            [
                ("hidden_size", draft.hidden_size.to_string()),
                ("intermediate_size", draft.intermediate_size.to_string()),
                ("num_attention_heads", draft.num_attention_heads.to_string()),
                ("num_key_value_heads", draft.num_key_value_heads.to_string()),
                ("head_dim", draft.head_dim.to_string()),
                ("vocab_size", draft.vocab_size.to_string()),
                ("number of auxiliary layers", draft.aux_layers().to_string()),
                ("rope_theta", draft.rope_theta.to_string()),
                ("num_target_layers", target_layers.unwrap_or_default().to_string()),
            ]
        };
        for ((key, found), (_, expected)) in facts(&stored).into_iter().zip(facts(wanted)) {
            if found != expected {
                return Err(Error::ForeignDraft { path: dir.into(), key, found, expected });
            }
        }
        Ok(Self { dir: dir.into(), stored, wanted: wanted.clone() })
    }

    /// One line each on what the run starts from and on the consequences of every difference.
    pub(crate) fn notes(&self) -> Vec<String> {
        let (stored, wanted) = (&self.stored, &self.wanted);
        let (had, has) = (stored.layers.len(), wanted.layers.len());
        let precision =
            if self.master_weights().is_file() { "float32 weights" } else { "stored weights" };
        let mut notes = vec![format!("starting from the {precision} of {}", self.dir.display())];
        if had > has {
            notes.push(format!("the first {has} of its {had} layers are kept"));
        }
        if had + 1 == has {
            notes.push(format!("it has {had} layers: layer {had} starts fresh"));
        } else if had < has {
            notes.push(format!("it has {had} layers: layers {had} to {} start fresh", has - 1));
        }
        if stored.block_size != wanted.block_size {
            notes.push(format!(
                "it was trained on blocks of {}, this run on {}: the weights fit, but the slots have to adapt",
                stored.block_size, wanted.block_size
            ));
        }
        if stored.target_layer_ids != wanted.target_layer_ids {
            notes.push(format!(
                "it read layers {:?} of its target, this run reads {:?}: fc has to adapt",
                stored.target_layer_ids, wanted.target_layer_ids
            ));
        }
        if stored.mask_token_id != wanted.mask_token_id {
            notes.push(format!(
                "its mask token is {}, this run's is {}: expect a higher loss at first",
                stored.mask_token_id, wanted.mask_token_id
            ));
        }
        let shared = had.min(has);
        let windows = |config: &DraftConfig| {
            let layers = config.layers[..shared].iter();
            let window = |kind: &LayerKind| match (kind, config.sliding_window) {
                (LayerKind::Sliding, Some(window)) => format!("the last {window}"),
                _ => "all".to_owned(),
            };
            layers.map(window).collect::<Vec<_>>().join(", ")
        };
        let (theirs, ours) = (windows(stored), windows(wanted));
        if theirs != ours {
            notes.push(format!("its layers see this context: {theirs}; this run's see {ours}"));
        }
        if stored.head != wanted.head {
            let (theirs, ours) = (&stored.head.kind, &wanted.head.kind);
            notes.push(format!(
                "its head is {theirs}, this run's is {ours}: what they do not share starts fresh"
            ));
        }
        if stored.rms_norm_eps != wanted.rms_norm_eps {
            let (theirs, ours) = (stored.rms_norm_eps, wanted.rms_norm_eps);
            notes.push(format!("its rms_norm_eps is {theirs}, this run's is the target's, {ours}"));
        }
        notes
    }

    fn master_weights(&self) -> PathBuf {
        self.dir.join(Checkpoint::TENSORS)
    }

    /// Copies the parameters that both drafts have in the same shape into `draft`, in float32.
    pub(crate) fn copy_into(&self, draft: &Draft) -> Result<(), Error> {
        let layout = DraftLayout::new(&self.stored);
        let read = self.reader(layout.elements())?;
        let names: HashMap<&str, _> =
            layout.parameters().iter().map(|p| (p.name.as_str(), p)).collect();
        for parameter in draft.layout().parameters() {
            let stored = names.get(parameter.name.as_str());
            let Some(stored) = stored.filter(|it| it.shape == parameter.shape) else { continue };
            let weights = parameter.view(draft.flat());
            read(stored, &weights)?;
            let flat = weights.view([-1]);
            let finite = |piece: Range<i64>| {
                let part = flat.narrow(0, piece.start, piece.end - piece.start);
                bool::try_from(part.isfinite().all()).unwrap_or(false)
            };
            if !pieces(0..parameter.elements()).all(finite) {
                let (path, name) = (self.dir.clone(), stored.name.clone());
                return Err(Error::BadWeights { path, name });
            }
        }
        Ok(())
    }

    /// Refuses float32 weights that do not match their checksum, like a resumed run. Checkpoints of
    /// earlier releases have none.
    fn check_sum(&self, file: &TensorFile) -> Result<(), Error> {
        let state = State::load(&self.dir).ok();
        let Some(expected) = state.and_then(|state| state.tensors_crc32) else { return Ok(()) };
        match file.crc32()? == expected {
            true => Ok(()),
            false => Err(Error::DamagedDraft { path: self.master_weights() }),
        }
    }

    /// A function that reads a stored parameter into a tensor of the same shape.
    fn reader(&self, elements: i64) -> Result<Reader, Error> {
        let path = self.master_weights();
        if !path.is_file() {
            let weights = Weights::open(&self.dir)?;
            return Ok(Box::new(move |stored, to| weights.read_into(&stored.name, to)));
        }
        let file = TensorFile::open(&path)?;
        self.check_sum(&file)?;
        // use the weights that the checkpoint serves: averaged ones, if it has them
        let averaged = file.names().iter().any(|name| name == AVERAGE);
        let name = if averaged { AVERAGE } else { MASTER_WEIGHTS };
        file.check_shape(name, &[elements])?;
        Ok(Box::new(move |stored, to| file.read_into(name, stored.offset, to)))
    }
}

type Reader = Box<dyn Fn(&Parameter, &Tensor) -> dflash_tensor::Result<()>>;
