//! Opens everything that a run's settings name, before anything is written or computed.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dflash_data::Dataset;
use dflash_draft::DraftConfig;
use dflash_hidden_states::{RetryPolicy, StreamConfig, TargetLogits};
use dflash_identity::TargetIdentity;
use dflash_run::{Checkpoint, RunDir};
use dflash_settings::Invalid;
use dflash_target::{TargetFacts, TargetIo};
use dflash_tensor::{DeviceKind, place};
use tch::Device;

use crate::config::TrainConfig;
use crate::order::Packing;
use crate::rows::{Samples, StreamedRows, TargetSamples};
use crate::split::Split;
use crate::warm_start::WarmStart;
use crate::{Error, checkpoint, machine, plan, same_target, setup};

/// Number of samples searched for one with stored states, to check those.
const PROBE_CANDIDATES: usize = 64;

/// A run with validated settings. A launcher stops here; a rank calls [`Self::run`].
#[derive(Debug)]
pub struct Prepared<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) target: TargetFacts,
    pub(crate) identity: TargetIdentity,
    pub(crate) draft: DraftConfig,
    pub(crate) dataset: Arc<Dataset>,
    /// A separate validation set.
    pub(crate) validation_data: Option<Arc<Dataset>>,
    pub(crate) split: Split,
    /// The checkpoint to resume from.
    pub(crate) resume: Option<Checkpoint>,
    /// The checkpoint whose weights a fresh run starts from.
    pub(crate) warm_start: Option<WarmStart>,
    /// Messages about allowed mismatches of targets, and about features that the draft omits.
    pub(crate) remarks: Vec<String>,
    /// Whether the source's last states are after the final norm, as determined by the preflight.
    pub(crate) states_are_normed: Arc<AtomicBool>,
}

impl<'a> Prepared<'a> {
    /// Opens target, dataset and checkpoints; prints and writes nothing.
    ///
    /// # Errors
    /// Errors in the settings that can be found without computing.
    pub fn open(config: &'a TrainConfig) -> Result<Self, Error> {
        let target = TargetFacts::load(&config.target_dir, config.described_target.as_ref())?;
        check_target_distribution(config, &target)?;
        let draft = setup::draft_config(&target, &config.draft)?;
        let pretrained = config.pretrained_dir.as_deref();
        let warm_start = pretrained.map(|dir| WarmStart::open(dir, &draft)).transpose()?;
        let settings = &config.settings;
        let DeviceKind { device, .. } = place(settings.device, settings.compute.compute_dtype, 0)?;
        if device == Device::Cpu {
            let bytes = checkpoint::least_memory(&draft, settings);
            machine::check_memory(bytes, "num_layers", config.draft.num_layers)?;
        }
        let data_path = settings.data_path()?;
        let dataset = Arc::new(Dataset::open(data_path)?);
        let set = settings.validation.validation_data.as_deref();
        let validation_data = set.map(|path| Dataset::open(path).map(Arc::new)).transpose()?;
        // a supervised slot needs an anchor before it
        if dataset.lengths().iter().all(|&length| length < 2) {
            return Err(Error::NothingToTrain { path: data_path.into() });
        }
        check_cut(&dataset, settings.rows.total_seq_len())?;
        let identity = TargetIdentity::read(&config.target_dir, &settings.target)?;
        let mut remarks = Vec::new();
        for data in [Some(&dataset), validation_data.as_ref()].into_iter().flatten() {
            remarks.extend(same_target::check_dataset(data, &config.target_dir, &identity)?);
        }
        let resume = RunDir::at(&settings.save_path).start(settings.resume)?;
        let split = Split::new(
            &dataset,
            validation_data.as_deref(),
            &settings.validation,
            resume.as_ref(),
        )?;
        remarks.extend(split.note());
        match (&resume, pretrained) {
            (Some(_), _) if settings.allows_changed("target") => {}
            (Some(checkpoint), _) => same_target::check_resumed(checkpoint, &identity)?,
            (None, Some(dir)) => remarks.extend(same_target::check_pretrained(dir, &identity)?),
            (None, None) => remarks.extend(plan::draft_notes(&target, &config.draft)),
        }
        Ok(Self {
            config,
            target,
            identity,
            draft,
            dataset,
            validation_data,
            split,
            resume,
            warm_start,
            remarks,
            states_are_normed: Arc::default(),
        })
    }

    /// The target layer whose states give the target's distribution, if the objective needs it.
    pub(crate) fn distribution_layer(&self) -> Option<u32> {
        let last = self.target.num_hidden_layers as u32;
        self.config.settings.objective.needs_target_distribution().then_some(last)
    }

    /// What determines the order of rows; held-out samples are excluded.
    pub(crate) fn packing(&self) -> Packing<'_> {
        let rows = &self.config.settings.rows;
        let lengths = self.split.trained_lengths();
        Packing { lengths, total_seq_len: rows.total_seq_len(), seed: rows.seed }
    }

    /// Rows of the dataset with hidden states from the settings' source.
    pub(crate) fn streamed_rows(&self) -> StreamedRows {
        let total_seq_len = self.config.settings.rows.total_seq_len();
        let candidates = self.probe_candidates();
        StreamedRows {
            samples: self.samples(),
            total_seq_len,
            stream: self.stream_config(),
            candidates,
        }
    }

    /// Number of samples, from the first on, that may serve as a probe.
    pub(crate) fn probe_candidates(&self) -> u32 {
        self.dataset.len().min(PROBE_CANDIDATES) as u32
    }

    /// The dataset's samples, checked against this target.
    pub(crate) fn samples(&self) -> Arc<dyn Samples> {
        let embedding_rows = self.target.vocab_size;
        let (dataset, behind) = (Arc::clone(&self.dataset), self.validation_data.clone());
        Arc::new(TargetSamples { dataset, behind, embedding_rows })
    }

    /// The target layers that the run needs, ascending.
    pub(crate) fn layer_ids(&self) -> Vec<u32> {
        let own = &self.draft.target_layer_ids;
        let target_distribution = self.distribution_layer().filter(|layer| !own.contains(layer));
        own.iter().copied().chain(target_distribution).collect()
    }

    /// The target's embedding, final norm and output projection.
    pub(crate) fn head(&self, place: DeviceKind) -> Result<TargetIo, dflash_tensor::Error> {
        TargetIo::of(&self.config.target_dir, &self.target, place)
    }

    /// The parts of the target used to check a stock vLLM's last states, if possible.
    fn target_logits(&self) -> Option<TargetLogits> {
        let is_last_state = self.target.no_last_state.is_none();
        let (dir, are_normed) = (&self.config.target_dir, &self.states_are_normed);
        is_last_state.then(|| same_target::logits(dir, &self.target, are_normed))
    }

    fn stream_config(&self) -> StreamConfig {
        let (hidden, target) = (&self.config.settings.hidden_states, &self.target);
        let layer_ids = self.layer_ids();
        let endpoints = hidden.vllm_endpoint.clone();
        let (startup, deadline) = (hidden.wait_for_server, hidden.server_timeout);
        // A resumed run has used the server before, which may be restarting.
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
            target_logits: self.target_logits(),
            on_missing: hidden.on_missing,
            on_generate: hidden.on_generate,
            window_bytes: hidden.window_bytes(),
            window_tokens: hidden.window_tokens(self.config.settings.rows.total_seq_len()),
            max_in_flight: hidden.max_in_flight,
            stop: Arc::clone(&self.config.stop),
            ..StreamConfig::new(endpoints, layer_ids, target.hidden_size as usize)
        }
    }
}

/// Refuses rows that are too short for any sample's answer: known now, and not after an epoch. The first sample
/// that can be learned from ends the search, which for most data is the first one.
fn check_cut(dataset: &Dataset, total_seq_len: usize) -> Result<(), Invalid> {
    let mut least = None;
    for index in 0..dataset.len() {
        // A sample that cannot be read is reported where it is trained on.
        let Ok(sample) = dataset.get(index) else { return Ok(()) };
        let pair = sample.loss_mask.windows(2).position(|pair| pair[0] && pair[1]);
        let Some(needed) = pair.map(|at| at + 2) else { continue };
        if needed <= total_seq_len {
            return Ok(());
        }
        least = Some(least.map_or(needed, |least: usize| least.min(needed)));
    }
    // Without any pair at all it is not the length that is wrong.
    let Some(least) = least else { return Ok(()) };
    let expected = format!(
        "that cuts every sample before its second supervised token, and nothing is left to train on; the \
         first needs {least}, and the longest sample has {} tokens",
        dataset.lengths().iter().max().copied().unwrap_or_default()
    );
    Err(Invalid::new("total_seq_len", total_seq_len, expected))
}

/// Refuses an objective that needs the target's distribution if the last states do not give it.
fn check_target_distribution(config: &TrainConfig, target: &TargetFacts) -> Result<(), Invalid> {
    match target.no_last_state {
        Some(reason) if config.settings.objective.needs_target_distribution() => {
            let reason = format!(
                "needs the target distribution, which {} does not give: {reason}; train with \
                 --loss ce and the labels of the data",
                target.architecture
            );
            Err(Invalid { key: "loss", reason, missing: None })
        }
        _ => Ok(()),
    }
}
