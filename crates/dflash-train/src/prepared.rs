//! A run with all that its settings name opened, before anything is written or computed.

use std::sync::Arc;
use std::time::Duration;

use dflash_data::Dataset;
use dflash_hidden::{RetryPolicy, StreamConfig};
use dflash_identity::TargetIdentity;
use dflash_model::draft::DraftConfig;
use dflash_model::place;
use dflash_model::target::TargetConfig;
use dflash_run::{Checkpoint, RunDir};
use tch::Device;

use crate::config::TrainConfig;
use crate::order::Packing;
use crate::rows::{StreamedRows, TargetSamples};
use crate::warm_start::WarmStart;
use crate::{Error, checkpoint, machine, same_target, setup, validation};

/// A run whose settings make sense. A launcher goes no further; a rank calls [`Self::run`].
#[derive(Debug)]
pub struct Prepared<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) target: TargetConfig,
    pub(crate) identity: TargetIdentity,
    pub(crate) draft: DraftConfig,
    pub(crate) dataset: Arc<Dataset>,
    /// The checkpoint to go on from.
    pub(crate) resume: Option<Checkpoint>,
    /// The checkpoint whose weights a fresh run starts from.
    pub(crate) warm_start: Option<WarmStart>,
    /// What is of another target and may be.
    pub(crate) remarks: Vec<String>,
}

impl<'a> Prepared<'a> {
    /// Opens target, dataset and checkpoints; prints and writes nothing.
    ///
    /// # Errors
    /// Mistakes in the settings that show without computing.
    pub fn open(config: &'a TrainConfig) -> Result<Self, Error> {
        let target = TargetConfig::load(&config.target_dir)?;
        let draft = setup::draft_config(&target, &config.draft)?;
        let pretrained = config.pretrained_dir.as_deref();
        let warm_start = pretrained.map(|dir| WarmStart::open(dir, &draft)).transpose()?;
        let settings = &config.settings;
        let (device, _) = place(settings.compute.device, settings.compute.compute_dtype, 0)?;
        if device == Device::Cpu {
            let bytes = checkpoint::least_memory(&draft, settings);
            machine::check_memory(bytes, ("num_layers", config.draft.num_layers))?;
        }
        let data_path = settings.data_path()?;
        let dataset = Arc::new(Dataset::open(data_path)?);
        validation::check(config, dataset.lengths())?;
        // a slot to learn from has an anchor before it
        if dataset.lengths().iter().all(|&length| length < 2) {
            return Err(Error::NothingToTrain { path: data_path.into() });
        }
        let identity = TargetIdentity::read(&config.target_dir, &settings.target)?;
        let mut remarks = Vec::new();
        remarks.extend(same_target::check_dataset(&dataset, &config.target_dir, &identity)?);
        let resume = RunDir::at(&settings.save_path).start(settings.begin())?;
        match (&resume, pretrained) {
            (Some(_), _) if settings.allows_changed("target") => {}
            (Some(checkpoint), _) => same_target::check_resumed(checkpoint, &identity)?,
            (None, Some(dir)) => remarks.extend(same_target::check_pretrained(dir, &identity)?),
            (None, None) => {}
        }
        Ok(Self { config, target, identity, draft, dataset, resume, warm_start, remarks })
    }

    /// The target's layer that a teacher's distribution is read after, where the objective needs it.
    pub(crate) fn teacher_layer(&self) -> Option<u32> {
        let last = self.target.num_hidden_layers as u32;
        self.config.settings.objective.needs_teacher().then_some(last)
    }

    /// What the order of the rows follows from; the samples that are held out take no part.
    pub(crate) fn packing(&self) -> Packing<'_> {
        let config = self.config;
        let trained = validation::trained_samples(config, self.dataset.len());
        let lengths = &self.dataset.lengths()[..trained];
        let rows = &config.settings.rows;
        Packing { lengths, total_seq_len: rows.total_seq_len, seed: rows.seed }
    }

    /// Rows of the dataset, with the hidden states that the settings ask for.
    pub(crate) fn streamed_rows(&self) -> StreamedRows {
        let embedding_rows = self.target.vocab_size;
        let samples = TargetSamples { dataset: Arc::clone(&self.dataset), embedding_rows };
        let total_seq_len = self.config.settings.rows.total_seq_len;
        StreamedRows { samples: Arc::new(samples), total_seq_len, stream: self.stream_config() }
    }

    fn stream_config(&self) -> StreamConfig {
        let (hidden, target) = (&self.config.settings.hidden_states, &self.target);
        let own = &self.draft.target_layer_ids;
        let teacher = self.teacher_layer().filter(|layer| !own.contains(layer));
        let layer_ids = own.iter().copied().chain(teacher).collect();
        let endpoints = hidden.vllm_endpoint.clone();
        let (startup, deadline) = (hidden.wait_for_server, hidden.server_timeout);
        // Whoever goes on has had a server, which may be on its way back.
        let startup = if self.resume.is_some() { startup.max(deadline) } else { startup };
        let retry = RetryPolicy {
            startup: Duration::from_secs(startup),
            deadline: Duration::from_secs(deadline),
            ..RetryPolicy::default()
        };
        StreamConfig {
            retry,
            shared_storage: hidden.shared_storage_path.clone(),
            offline_dir: hidden.hidden_states_path.clone(),
            vocab_size: Some(target.vocab_size as usize),
            num_hidden_layers: Some(target.num_hidden_layers as u32),
            target: Some(self.identity.clone()),
            target_logits: Some(same_target::logits(&self.config.target_dir)),
            on_missing: hidden.on_missing,
            on_generate: hidden.on_generate,
            window_bytes: hidden.window_bytes(),
            max_in_flight: hidden.max_in_flight,
            stop: Arc::clone(&self.config.stop),
            ..StreamConfig::new(endpoints, layer_ids, target.hidden_size as usize)
        }
    }
}
