//! Fakes for tests: the other ranks, and the stream of rows.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use dflash_data::Dataset;
use dflash_dist::{Communicator, Pending, Single};
use dflash_draft::{DraftConfig, HeadFields, LayerKind};
use dflash_hidden_states::{Counters, HiddenStates};
use dflash_target::{Target, TargetOptions};
use dflash_tensor::place;
use dflash_test_support::alone;
use tch::{Device, Kind, Tensor};

use crate::config::TrainConfig;
use crate::order::PlannedRow;
use crate::readback::Control;
use crate::rows::{LoadedRow, Loading, RowSource, RowStream, Samples, TargetSamples, pack};
use crate::world::{World, bytes_of};
use crate::{Error, Outcome, Prepared};

/// The configuration of a small draft.
pub(crate) fn draft_config(hidden_size: i64, layers: usize) -> DraftConfig {
    DraftConfig {
        hidden_size,
        intermediate_size: 4 * hidden_size,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: hidden_size / 4,
        attention_bias: false,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: None,
        layers: vec![LayerKind::Full; layers],
        sliding_window: None,
        block_size: 4,
        mask_token_id: 95,
        target_layer_ids: vec![1, 2],
        num_target_layers: Some(4),
        vocab_size: 96,
        max_position_embeddings: 256,
        initializer_range: 0.02,
        eos_token_id: None,
        head: HeadFields::default(),
    }
}

/// Rank 0 with simulated peers; records what is announced to the launcher.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// Number of peers that do the same as this rank.
    pub(crate) alike: usize,
    /// Number of the sum (from 1) at which a peer starts voting failure.
    pub(crate) fails_at: Option<u64>,
    /// The value that all ranks broadcast; by default this rank's own, and for others their number.
    pub(crate) broadcast_value: Option<f64>,
    /// Number of the broadcast (from 1) at which rank 0's value becomes NaN.
    pub(crate) not_finite_from: Option<u64>,
    /// Elements of each sum started, in order.
    pub(crate) started: Mutex<Vec<usize>>,
    /// Number of calls so far.
    pub(crate) broadcasts: AtomicU64,
    pub(crate) sums: AtomicU64,
    pub(crate) worked: AtomicU64,
    pub(crate) permanent: AtomicU64,
}

impl Communicator for Beside {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1 + self.alike
    }

    fn all_reduce_sum(&self, tensor: &mut Tensor) -> Result<(), dflash_dist::Error> {
        let _ = tensor.g_mul_scalar_(self.world_size() as f64);
        let sum = self.sums.fetch_add(1, Relaxed) + 1;
        if self.fails_at.is_some_and(|from| sum >= from) {
            // votes come last, the strongest at the end
            let _ = tensor.narrow(0, tensor.size()[0] - 1, 1).fill_(1.0);
        }
        Ok(())
    }

    fn start_all_reduce_sum(
        &self,
        tensor: &Tensor,
    ) -> Result<Box<dyn Pending>, dflash_dist::Error> {
        let _ = tensor.shallow_clone().g_mul_scalar_(self.world_size() as f64);
        self.started.lock().unwrap().push(tensor.numel());
        Single.start_all_reduce_sum(tensor)
    }

    fn start_broadcast(
        &self,
        tensor: &Tensor,
        root: usize,
    ) -> Result<Box<dyn Pending>, dflash_dist::Error> {
        self.broadcast(&mut tensor.shallow_clone(), root)?;
        Single.start_broadcast(tensor, root)
    }

    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<(), dflash_dist::Error> {
        let broadcast = self.broadcasts.fetch_add(1, Relaxed) + 1;
        if self.not_finite_from.is_some_and(|from| broadcast >= from) {
            let _ = tensor.fill_(f64::NAN);
        } else if let Some(value) = self.broadcast_value.or((root > 0).then_some(root as f64)) {
            let _ = tensor.fill_(value);
        }
        Ok(())
    }

    fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Result<(), dflash_dist::Error> {
        Single.all_gather(output, input)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, dflash_dist::Error> {
        Ok(vec![bytes.to_vec(); self.world_size()])
    }

    fn barrier(&self) -> Result<(), dflash_dist::Error> {
        Ok(())
    }

    fn announce_work(&self) {
        self.worked.fetch_add(1, Relaxed);
    }

    fn announce_permanent_failure(&self) {
        self.permanent.fetch_add(1, Relaxed);
    }
}

/// Rows whose hidden states are in memory.
#[derive(Clone)]
pub(crate) struct MemoryRows {
    pub(crate) samples: Arc<dyn Samples>,
    /// States of every sample.
    pub(crate) states: Arc<Vec<HiddenStates>>,
    /// Simulates a stop while waiting for the row after this many.
    pub(crate) interrupted_after: Option<usize>,
    /// Counts that a stream would report for each row.
    pub(crate) counted: Counters,
}

struct MemoryStream {
    source: MemoryRows,
    planned: std::vec::IntoIter<PlannedRow>,
    done: u64,
}

impl RowSource for MemoryRows {
    fn start(&self, planned: Vec<PlannedRow>) -> Result<Loading, Error> {
        let planned = planned.into_iter();
        let stream = MemoryStream { source: self.clone(), planned, done: 0 };
        Ok(Loading::Fetched(Box::new(stream)))
    }
}

impl RowStream for MemoryStream {
    fn next(&mut self) -> Result<Option<LoadedRow>, Error> {
        if self.source.interrupted_after == Some(self.done as usize) {
            return Err(dflash_hidden_states::Error::Interrupted.into());
        }
        let Some(PlannedRow { epoch, samples }) = self.planned.next() else { return Ok(None) };
        self.done += 1;
        let row = pack(&*self.source.samples, &samples, World::TOTAL_SEQ_LEN)?;
        let states =
            samples.iter().map(|&sample| Some(self.source.states[sample as usize].clone()));
        Ok(Some(LoadedRow::new(epoch, row, states.collect())))
    }

    fn counters(&self) -> Counters {
        let Counters { retries, busy, stale, rejected, invalid, .. } = self.source.counted;
        // like a stream that fetches one row ahead
        let rows = self.done + 1;
        Counters {
            retries: retries * rows,
            busy: busy * rows,
            stale: stale * rows,
            rejected: rejected * rows,
            invalid: invalid * rows,
            ..Counters::default()
        }
    }

    fn closer(&self) -> Arc<AtomicBool> {
        Arc::default()
    }
}

impl World {
    pub(crate) fn samples(&self) -> TargetSamples {
        let dataset = Arc::new(Dataset::open(&self.path("data")).unwrap());
        TargetSamples { dataset, behind: None, embedding_rows: Self::VOCABULARY }
    }

    pub(crate) fn rows(&self) -> MemoryRows {
        let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
        let target = Target::load(&self.path("target"), &options).unwrap();
        let states = (0..Self::SAMPLES).map(|it| Self::aux_states(&target, &Self::input_ids(it)));
        MemoryRows {
            samples: Arc::new(self.samples()),
            states: Arc::new(states.collect()),
            interrupted_after: None,
            counted: Counters::default(),
        }
    }

    /// Replaces a sample's stored states by the largest finite numbers, whose norms overflow.
    pub(crate) fn spoil(&self, sample: u64) {
        let input_ids = Self::input_ids(sample);
        let numbers = vec![f32::MAX; input_ids.len() * Self::HIDDEN as usize];
        let layers = vec![bytes_of(&Tensor::from_slice(&numbers)); Self::LAYER_IDS.len()];
        self.files.write(sample, &input_ids, &Self::record(input_ids.len(), layers)).unwrap();
    }

    pub(crate) fn train_on(
        &self,
        config: &TrainConfig,
        source: &dyn RowSource,
        communicator: &dyn Communicator,
    ) -> Result<Outcome, Error> {
        self.train_with(config, source, communicator, Control::Host)
    }

    pub(crate) fn train_with(
        &self,
        config: &TrainConfig,
        source: &dyn RowSource,
        communicator: &dyn Communicator,
        control: Control,
    ) -> Result<Outcome, Error> {
        let _alone = alone();
        let prepared = Prepared::open(config)?;
        let place = place(config.settings.device, config.settings.compute.compute_dtype, 0)?;
        prepared.train(communicator, place, control, source, None)
    }
}
