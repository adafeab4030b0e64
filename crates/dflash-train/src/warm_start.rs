//! Starting from another draft's weights.
//!
//! The checkpoint may be in z-lab's or speculators' layout, or one of our own, whose float32
//! weights are taken where they lie beside it. Widths, heads and the rotary base must agree: they
//! say which target a draft belongs to. Layers, block size, mask token and captured layers may
//! differ, and what that means is said.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use dflash_model::checkpoint::{TensorFile, pieces};
use dflash_model::draft::{Draft, DraftConfig, DraftLayout, LayerKind, Parameter};
use dflash_model::target::Weights;
use dflash_run::Checkpoint;
use tch::Tensor;

use crate::Error;
use crate::checkpoint::MASTERS;
use crate::masters::AVERAGE;

/// A checkpoint that fits the draft to be trained.
#[derive(Debug)]
pub(crate) struct WarmStart {
    dir: PathBuf,
    stored: DraftConfig,
    wanted: DraftConfig,
}

impl WarmStart {
    /// Reads the checkpoint's configuration and compares it with that of the draft `wanted`.
    ///
    /// # Errors
    /// No checkpoint, or one of a draft for another target.
    pub(crate) fn open(dir: &Path, wanted: &DraftConfig) -> Result<Self, Error> {
        let start =
            Self { dir: dir.into(), stored: DraftConfig::load(dir)?, wanted: wanted.clone() };
        start.check()?;
        Ok(start)
    }

    fn check(&self) -> Result<(), Error> {
        let (stored, wanted) = (&self.stored, &self.wanted);
        let sizes = [
            ("hidden_size", stored.hidden_size, wanted.hidden_size),
            ("intermediate_size", stored.intermediate_size, wanted.intermediate_size),
            ("num_attention_heads", stored.num_attention_heads, wanted.num_attention_heads),
            ("num_key_value_heads", stored.num_key_value_heads, wanted.num_key_value_heads),
            ("head_dim", stored.head_dim, wanted.head_dim),
            ("vocab_size", stored.vocab_size, wanted.vocab_size),
            ("number of captured layers", stored.captures(), wanted.captures()),
        ];
        if let Some((key, found, expected)) = sizes.iter().find(|(_, a, b)| a != b) {
            return Err(self.mismatch(key, found, expected));
        }
        if stored.rope_theta != wanted.rope_theta {
            return Err(self.mismatch("rope_theta", &stored.rope_theta, &wanted.rope_theta));
        }
        match (stored.num_target_layers, wanted.num_target_layers) {
            (Some(found), Some(expected)) if found != expected => {
                Err(self.mismatch("num_target_layers", &found, &expected))
            }
            _ => Ok(()),
        }
    }

    fn mismatch(
        &self,
        key: &'static str,
        found: &impl ToString,
        expected: &impl ToString,
    ) -> Error {
        let (found, expected) = (found.to_string(), expected.to_string());
        Error::ForeignDraft { path: self.dir.clone(), key, found, expected }
    }

    /// What the run starts from and what the differences mean, a line each.
    pub(crate) fn notes(&self) -> Vec<String> {
        let (stored, wanted) = (&self.stored, &self.wanted);
        let (had, has) = (stored.layers.len(), wanted.layers.len());
        let precision = if self.masters().is_file() { "float32 weights" } else { "stored weights" };
        let mut notes = vec![format!("starting from the {precision} of {}", self.dir.display())];
        if had > has {
            notes.push(format!("of its {had} layers the first {has} are kept"));
        }
        if had < has {
            notes.push(format!("it has {had} layers: layers {had} to {} start afresh", has - 1));
        }
        if stored.block_size != wanted.block_size {
            notes.push(format!(
                "it was trained on blocks of {}, this run on {}: the weights fit, the slots have to adapt",
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
            notes.push(format!(
                "its layers see so many tokens of context: {theirs}; this run's: {ours}"
            ));
        }
        if stored.rms_norm_eps != wanted.rms_norm_eps {
            let (theirs, ours) = (stored.rms_norm_eps, wanted.rms_norm_eps);
            notes.push(format!("its rms_norm_eps is {theirs}, this run's is the target's, {ours}"));
        }
        notes
    }

    fn masters(&self) -> PathBuf {
        self.dir.join(Checkpoint::TENSORS)
    }

    /// Copies every parameter that both drafts have into `draft`, whose buffer is float32.
    ///
    /// # Errors
    /// Missing or damaged weights, or some that are not numbers.
    pub(crate) fn copy_into(&self, draft: &Draft) -> Result<(), Error> {
        let layout = DraftLayout::new(&self.stored);
        let read = self.reader(layout.elements())?;
        let names: HashMap<&str, _> =
            layout.parameters().iter().map(|p| (p.name.as_str(), p)).collect();
        for parameter in draft.layout().parameters() {
            let Some(stored) = names.get(parameter.name.as_str()) else { continue };
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

    /// What reads a stored parameter into a tensor of the same shape.
    fn reader(&self, elements: i64) -> Result<Reader, Error> {
        let path = self.masters();
        if !path.is_file() {
            let weights = Weights::open(&self.dir)?;
            return Ok(Box::new(move |stored, to| weights.read_into(&stored.name, to)));
        }
        let file = TensorFile::open(&path)?;
        // a checkpoint is what it serves: its averaged weights, where it has them
        let averaged = file.names().iter().any(|name| name == AVERAGE);
        let name = if averaged { AVERAGE } else { MASTERS };
        file.check_shape(name, &[elements])?;
        Ok(Box::new(move |stored, to| file.read_into(name, stored.offset, to)))
    }
}

type Reader = Box<dyn Fn(&Parameter, &Tensor) -> dflash_model::Result<()>>;
