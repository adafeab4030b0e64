//! A run with everything opened that its settings name, before anything is written or computed.

use std::path::Path;
use std::sync::Arc;

use dflash_data::Dataset;
use dflash_hidden::{SourceConfig, StreamConfig};
use dflash_model::draft::DraftConfig;
use dflash_model::target::TargetConfig;
use dflash_run::{Checkpoint, RunDir};

use crate::config::TrainConfig;
use crate::optimizer::OptimizerConfig;
use crate::order::Packing;
use crate::rows::{StreamedRows, TargetSamples};
use crate::warm_start::WarmStart;
use crate::{Error, setup, validation};

/// A run whose settings make sense. A launcher stops here; a rank goes on with [`Self::run`].
#[derive(Debug)]
pub struct Prepared<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) target: TargetConfig,
    pub(crate) draft: DraftConfig,
    pub(crate) dataset: Arc<Dataset>,
    /// The checkpoint to go on from.
    pub(crate) resume: Option<Checkpoint>,
    /// The checkpoint whose weights a fresh run starts from.
    pub(crate) warm_start: Option<WarmStart>,
}

impl<'a> Prepared<'a> {
    /// Opens target, dataset and checkpoints, and finds mistakes in the settings; prints and writes
    /// nothing.
    ///
    /// # Errors
    /// The user's mistakes by name.
    pub fn open(config: &'a TrainConfig) -> Result<Self, Error> {
        let target = TargetConfig::load(&config.target)?;
        let draft = setup::draft_config(&target, &config.draft)?;
        let pretrained = config.from_pretrained.as_deref();
        let warm_start = pretrained.map(|dir| WarmStart::open(dir, &draft)).transpose()?;
        check_numbers(config)?;
        setup::device(config.device, config.compute_dtype, 0)?;
        let dataset = Arc::new(Dataset::open(&config.data)?);
        validation::check(config, dataset.lengths())?;
        // a slot to learn from has an anchor before it
        if dataset.lengths().iter().all(|&length| length < 2) {
            return Err(Error::NothingToTrain { path: config.data.clone() });
        }
        let resume = RunDir::at(&config.save_path).start(config.resume)?;
        Ok(Self { config, target, draft, dataset, resume, warm_start })
    }

    /// The directory of the checkpoint to go on from.
    pub(crate) fn resumed_dir(&self) -> Option<&Path> {
        self.resume.as_ref().map(|checkpoint| checkpoint.dir.as_path())
    }

    /// The target's layer that a teacher's distribution is read after, where the objective needs it.
    pub(crate) fn teacher_layer(&self) -> Option<u32> {
        let last = self.target.num_hidden_layers as u32;
        self.config.objective.needs_teacher().then_some(last)
    }

    /// What the order of the rows follows from; the samples that are held out take no part.
    pub(crate) fn packing(&self) -> Packing<'_> {
        let config = self.config;
        let trained = validation::trained_samples(config, self.dataset.len());
        let lengths = &self.dataset.lengths()[..trained];
        Packing { lengths, total_seq_len: config.total_seq_len, seed: config.seed }
    }

    /// Rows of the dataset, with the hidden states that the settings ask for.
    pub(crate) fn streamed_rows(&self) -> StreamedRows {
        let embedding_rows = self.target.vocab_size;
        let samples = TargetSamples { dataset: Arc::clone(&self.dataset), embedding_rows };
        let total_seq_len = self.config.total_seq_len;
        StreamedRows { samples: Arc::new(samples), total_seq_len, stream: self.stream_config() }
    }

    fn stream_config(&self) -> StreamConfig {
        let (hidden, target) = (&self.config.hidden, &self.target);
        let source = SourceConfig {
            endpoints: hidden.endpoints.clone(),
            offline_dir: hidden.offline_dir.clone(),
        };
        let own = &self.draft.target_layer_ids;
        let teacher = self.teacher_layer().filter(|layer| !own.contains(layer));
        let layer_ids = own.iter().copied().chain(teacher).collect();
        StreamConfig {
            vocab_size: Some(target.vocab_size as usize),
            num_hidden_layers: Some(target.num_hidden_layers as u32),
            on_missing: hidden.on_missing,
            on_generate: hidden.on_generate,
            window_bytes: hidden.window_bytes,
            max_in_flight: hidden.max_in_flight,
            stop: Arc::clone(&self.config.stop),
            ..StreamConfig::new(source, layer_ids, target.hidden_size as usize)
        }
    }
}

fn check_numbers(config: &TrainConfig) -> Result<(), Error> {
    let at_least_one = [
        ("--anchors-per-sequence", config.anchors_per_sequence),
        ("--max-anchors", config.max_anchors),
        ("--gradient-accumulation-steps", config.accumulation),
    ];
    if let Some((flag, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
        return Err(Error::setting(flag, 0, "it must be at least 1"));
    }
    if config.total_seq_len < 2 {
        let expected = "a row needs room for an anchor and a token to predict";
        return Err(Error::setting("--total-seq-len", config.total_seq_len, expected));
    }
    if config.max_bad_steps == 0 {
        return Err(Error::setting("--max-bad-steps", 0, "1 ends the run at the first bad step"));
    }
    if config.peak_tflops.is_some_and(|peak| peak.is_nan() || peak <= 0.0) {
        let found = config.peak_tflops.unwrap_or_default();
        return Err(Error::setting("--peak-tflops", found, "a peak is a positive number"));
    }
    if !(config.lr > 0.0 && config.lr.is_finite()) {
        return Err(Error::setting("--lr", config.lr, "a learning rate is a positive number"));
    }
    check_optimizer(&config.optimizer)
}

fn check_optimizer(optimizer: &OptimizerConfig) -> Result<(), Error> {
    let decays = [
        ("--weight-decay", optimizer.weight_decay.matrices),
        ("--norm-weight-decay", optimizer.weight_decay.norms),
    ];
    if let Some(&(flag, decay)) = decays.iter().find(|(_, decay)| !(0.0..1e6).contains(decay)) {
        return Err(Error::setting(flag, decay, "weights decay by a share from 0"));
    }
    match optimizer.ema_decay {
        Some(decay) if !(decay > 0.0 && decay < 1.0) => {
            let expected = "the share of itself that an average keeps lies between 0 and 1";
            Err(Error::setting("--ema-decay", decay, expected))
        }
        _ => Ok(()),
    }
}
