//! The real featurizer: a target on a CPU or a GPU, or split over several processes.

use std::path::Path;
use std::rc::Rc;

use bytes::Bytes;
use dflash_dist::WorkerEnv;
use dflash_hidden_states::Metadata;
use dflash_identity::TargetIdentity;
use dflash_settings::{DEFAULT_AUX_LAYERS, HiddenServerSettings, ParallelSettings, WireDtype};
use dflash_target::parallel::Grid;
use dflash_target::{
    PackedPrompts, Prefill, PrefillOptions, TargetConfig, check_layer_ids, default_layer_ids,
};
use dflash_tensor::{is_oom, place};
use dflash_torch_sys::staging::download_from;
use tch::{Device, Kind, Tensor, no_grad};

use crate::copy_out::CopyOut;
use crate::error::Error;
use crate::featurizer::{Features, Featurizer, ModelFacts, StateRows};
use crate::parallel::{InFlight, Lead, Peers, Stage};

/// A target that returns rows.
#[derive(Debug)]
pub struct TargetFeaturizer {
    target: Loaded,
    facts: ModelFacts,
    /// Copies rows to the host while the next batch runs, if they are not on the host.
    copy_out: Option<Rc<CopyOut>>,
}

/// A target in this process, or in several of which this is the first.
#[derive(Debug)]
enum Loaded {
    Whole(Box<Prefill>),
    Parallel(Box<Lead>),
}

impl Loaded {
    fn config(&self) -> &TargetConfig {
        match self {
            Self::Whole(target) => target.config(),
            Self::Parallel(lead) => lead.config(),
        }
    }

    fn place(&self) -> String {
        match self {
            Self::Whole(target) => target.place(),
            Self::Parallel(lead) => lead.place(),
        }
    }
}

/// How a server splits its target.
pub fn grid(parallel: ParallelSettings) -> Grid {
    Grid { pipeline: parallel.pipeline, tensor: parallel.tensor_parallel_size }
}

/// Loads the part of the target in `dir` that belongs to the rank `env`, which is not 0, and runs
/// the jobs from rank 0 until they end.
///
/// # Errors
/// As [`TargetFeaturizer::load`]; a rank that has gone.
pub fn follow(dir: &Path, settings: &HiddenServerSettings, env: &WorkerEnv) -> Result<(), Error> {
    let (options, peers) = join(dir, settings, env)?;
    Stage::load(dir, &options, peers)?.follow()
}

/// This rank's device and its connections to the others, once all have joined.
fn join(
    dir: &Path,
    settings: &HiddenServerSettings,
    env: &WorkerEnv,
) -> Result<(PrefillOptions<'static>, Peers), Error> {
    let options = options(settings, env.local_rank)?;
    let common = vec![("the target".to_owned(), dir.display().to_string())];
    let peers = Peers::connect(env, grid(settings.parallel), options.place.device, common)?;
    Ok((options, peers))
}

/// The settings for the device; `local` is this process's number if there are several.
fn options(
    settings: &HiddenServerSettings,
    local: usize,
) -> Result<PrefillOptions<'static>, Error> {
    if let Some(threads) = settings.threads {
        tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
    }
    let place = place(settings.device, settings.dtype, local)?;
    // The last layer is always available.
    Ok(PrefillOptions { place, asked: settings.dtype, highest: None, embedding_vh: None })
}

impl TargetFeaturizer {
    /// Loads the target and checks the layer ids against it.
    ///
    /// # Errors
    /// [`Error::Setting`]; [`Error::Model`] for the directory, a file in it or a layer id;
    /// [`Error::TooLongContext`].
    pub fn load(dir: &Path, settings: &HiddenServerSettings) -> Result<Self, Error> {
        let options = options(settings, 0)?;
        let target = Loaded::Whole(Box::new(Prefill::load(dir, &options)?));
        Self::of(target, &options, dir, settings)
    }

    /// Loads the first part of a split target, as rank 0 of `env`; the others run [`follow`].
    ///
    /// # Errors
    /// As [`Self::load`]; a target that cannot be split this way; a rank that has gone.
    pub fn lead(
        dir: &Path,
        settings: &HiddenServerSettings,
        env: &WorkerEnv,
    ) -> Result<Self, Error> {
        let (options, peers) = join(dir, settings, env)?;
        let target = Loaded::Parallel(Box::new(Lead::load(dir, &options, peers)?));
        Self::of(target, &options, dir, settings)
    }

    fn of(
        target: Loaded,
        options: &PrefillOptions<'_>,
        dir: &Path,
        settings: &HiddenServerSettings,
    ) -> Result<Self, Error> {
        let identity = TargetIdentity::read(dir, &settings.target)?;
        let copy_out =
            download_from(options.place.device)?.map(|download| Rc::new(CopyOut::new(download)));
        let facts = facts_of(&target, dir, identity, settings)?;
        Ok(Self { target, facts, copy_out })
    }
}

fn facts_of(
    target: &Loaded,
    dir: &Path,
    identity: TargetIdentity,
    settings: &HiddenServerSettings,
) -> Result<ModelFacts, Error> {
    let config = target.config();
    let layers = config.num_hidden_layers;
    let mut layer_ids = settings
        .target_layer_ids
        .clone()
        .unwrap_or_else(|| default_layer_ids(layers, DEFAULT_AUX_LAYERS));
    layer_ids.sort_unstable();
    check_layer_ids(&layer_ids, layers)?;
    let limit = config.max_position_embeddings as usize;
    let max_model_len = settings.max_model_len.unwrap_or(limit);
    if max_model_len > limit {
        return Err(Error::TooLongContext { asked: max_model_len, limit });
    }
    Ok(ModelFacts {
        name: identity.name.clone(),
        root: dir.display().to_string(),
        max_model_len,
        device: target.place(),
        metadata: Metadata {
            hidden_size: config.hidden_size as usize,
            num_hidden_layers: layers as u32,
            vocab_size: config.vocab_size as usize,
            layer_ids,
            dtype: settings.wire_dtype,
            target: Some(identity),
        },
    })
}

impl Featurizer for TargetFeaturizer {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    fn features(&mut self, prompts: &PackedPrompts, layer_ids: &[u32]) -> Result<Features, Error> {
        let kind = wire_kind(self.facts.metadata.dtype);
        let batch = Batch {
            kind,
            starts: prompts.document_starts.clone(),
            copy_out: self.copy_out.as_ref().map(Rc::clone),
        };
        match &mut self.target {
            Loaded::Whole(target) => batch.features(&target.states(prompts, layer_ids)?),
            Loaded::Parallel(lead) => {
                let coming: InFlight = lead.begin(prompts, layer_ids)?;
                let rows = move || {
                    let states = coming.wait().map_err(|error| batch.unfit(error))?;
                    batch.features(&states)?.rows()
                };
                Ok(Features::Coming(Box::new(rows)))
            }
        }
    }
}

/// A batch whose rows are being written.
struct Batch {
    kind: Kind,
    /// Where prompts begin, and the number of tokens.
    starts: Vec<i64>,
    copy_out: Option<Rc<CopyOut>>,
}

impl Batch {
    fn features(&self, states: &[Tensor]) -> Result<Features, Error> {
        let Self { kind, starts, copy_out } = self;
        let tokens = self.tokens();
        no_grad(|| {
            let Some(copy_out) = copy_out else {
                return host_rows(states, *kind, starts).map(Features::Here);
            };
            let wanted = |th: &Tensor| th.f_to_kind(*kind)?.f_contiguous();
            let layers = states.iter().map(wanted).collect::<Result<Vec<_>, _>>()?;
            let coming = copy_out.begin(layers, starts)?;
            let rows = move || coming.rows().map_err(|error| error.of_batch(tokens));
            Ok(Features::Coming(Box::new(rows)))
        })
        .map_err(|error: Unfit| error.of_batch(tokens))
    }

    fn unfit(&self, error: Error) -> Error {
        match error {
            Error::NoMemory { reason } => Error::OutOfMemory { tokens: self.tokens(), reason },
            error => error,
        }
    }

    fn tokens(&self) -> usize {
        self.starts.last().copied().unwrap_or(0) as usize
    }
}

/// The rows of prompts that begin at `starts`, from states on the host.
fn host_rows(states: &[Tensor], kind: Kind, starts: &[i64]) -> Result<StateRows, Unfit> {
    let mut rows = vec![Vec::with_capacity(states.len()); starts.len() - 1];
    for state_th in states {
        let host_th = on_host(state_th, kind)?;
        for (rows, bounds) in rows.iter_mut().zip(starts.windows(2)) {
            rows.push(row_bytes(&host_th.f_narrow(0, bounds[0], bounds[1] - bounds[0])?)?);
        }
    }
    Ok(rows)
}

/// Why there are no rows: libtorch's error, or the allocator's.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    #[error(transparent)]
    Torch(#[from] tch::TchError),
    #[error(transparent)]
    Copy(#[from] dflash_torch_sys::Error),
    #[error("no memory for the rows: {0}")]
    Rows(#[from] std::collections::TryReserveError),
}

impl Unfit {
    fn of_batch(self, tokens: usize) -> Error {
        let reason = self.to_string();
        match self {
            Self::Rows(_) => Error::OutOfMemory { tokens, reason },
            _ if is_oom(&reason) => Error::OutOfMemory { tokens, reason },
            _ => Error::Batch { tokens, reason },
        }
    }
}

fn wire_kind(dtype: WireDtype) -> Kind {
    match dtype {
        WireDtype::Bf16 => Kind::BFloat16,
        WireDtype::F32 => Kind::Float,
    }
}

/// `state_th` [T, H] on the host as `kind`, contiguous.
fn on_host(state_th: &Tensor, kind: Kind) -> Result<Tensor, tch::TchError> {
    state_th.f_to_kind(kind)?.f_to_device(Device::Cpu)?.f_contiguous()
}

/// A copy of `host_th` [T, H].
fn row_bytes(host_th: &Tensor) -> Result<Bytes, Unfit> {
    let elements = host_th.numel();
    let length = elements * host_th.kind().elt_size_in_bytes();
    let mut bytes = Vec::new();
    // An infallible allocation would end the process if memory ran out.
    bytes.try_reserve_exact(length)?;
    bytes.resize(length, 0);
    host_th.f_copy_data_u8(&mut bytes, elements)?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Condvar, Mutex};
    use std::thread;

    use dflash_settings::Dtype;
    use dflash_target::{Target, TargetConfig};
    use dflash_torch_sys::staging::{Arrival, Copying, Download, HostBuffer};

    use super::*;

    /// Copies that run beside the computation, like a GPU's: each ends when the test allows it.
    #[derive(Clone, Default)]
    struct Gated {
        buffers: Arc<AtomicUsize>,
        over: Arc<(Mutex<usize>, Condvar)>,
        allowed: Arc<(Mutex<usize>, Condvar)>,
        begun: Arc<AtomicUsize>,
    }

    /// The number of a copy, from 1.
    struct Numbered(usize, Gated);

    fn reach(count: &(Mutex<usize>, Condvar), number: usize) {
        drop(count.1.wait_while(count.0.lock().unwrap(), |count| *count < number).unwrap());
    }

    fn add_one(count: &(Mutex<usize>, Condvar)) {
        *count.0.lock().unwrap() += 1;
        count.1.notify_all();
    }

    impl Copying for Numbered {
        fn precede(&self, _: &Tensor) -> Result<(), dflash_torch_sys::Error> {
            self.wait()
        }

        fn wait(&self) -> Result<(), dflash_torch_sys::Error> {
            reach(&self.1.over, self.0);
            Ok(())
        }
    }

    impl Download for Gated {
        fn buffer(&self, bytes: usize) -> Result<HostBuffer, dflash_torch_sys::Error> {
            self.buffers.fetch_add(1, Ordering::SeqCst);
            HostBuffer::new(bytes)
        }

        fn fetch(
            &self,
            parts: Vec<Tensor>,
            buffer: HostBuffer,
        ) -> Result<Arrival, dflash_torch_sys::Error> {
            let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
            let host = buffer.tensor(buffer.capacity());
            let sources: Vec<Tensor> = parts.iter().map(Tensor::shallow_clone).collect();
            let own = self.clone();
            thread::spawn(move || {
                reach(&own.allowed, number);
                let mut place = 0;
                for source in sources {
                    let bytes = source.view([-1]).view_dtype(Kind::Uint8);
                    host.narrow(0, place, bytes.numel() as i64).copy_(&bytes);
                    place += bytes.numel() as i64;
                }
                drop(host);
                add_one(&own.over);
            });
            Ok(Arrival::new(buffer, parts, Box::new(Numbered(number, self.clone()))))
        }
    }

    #[test]
    fn rows_come_right_while_the_next_batch_is_computed() {
        let dir = tempfile::tempdir().unwrap();
        let target = Target::random(TargetConfig::qwen3(32, 6, 64), 7, Device::Cpu);
        target.save(dir.path(), Kind::Float).unwrap();
        let model = |wire_dtype| {
            let target_layer_ids = Some(vec![0, 2, 5]);
            let settings = HiddenServerSettings { target_layer_ids, wire_dtype, ..settings() };
            TargetFeaturizer::load(dir.path(), &settings).unwrap()
        };
        for dtype in [WireDtype::Bf16, WireDtype::F32] {
            let gated = Gated::default();
            let mut copying = model(dtype);
            copying.copy_out = Some(Rc::new(CopyOut::new(Box::new(gated.clone()))));
            let mut plain = model(dtype);
            let batches: Vec<PackedPrompts> = (0..5i64)
                .map(|seed| {
                    let ids = |tokens: i64| (0..tokens).map(move |t| (t * 5 + seed) % 64).collect();
                    let prompts: [Vec<i64>; 3] = [ids(9), ids(1), ids(20)];
                    PackedPrompts::new(prompts.iter().map(Vec::as_slice))
                })
                .collect();
            let mut before = copying.features(&batches[0], &[0, 5]).unwrap();
            for pair in batches.windows(2) {
                // The copy of the first cannot have ended when the second has been computed.
                let next = copying.features(&pair[1], &[0, 5]).unwrap();
                add_one(&gated.allowed);
                let expected = plain.features(&pair[0], &[0, 5]).unwrap().rows().unwrap();
                assert_eq!(before.rows().unwrap(), expected);
                before = next;
            }
            assert_eq!(gated.buffers.load(Ordering::SeqCst), 2);
        }
    }

    fn settings() -> HiddenServerSettings {
        HiddenServerSettings {
            target: "target".into(),
            target_layer_ids: None,
            host: "127.0.0.1".into(),
            port: 0,
            port_file: None,
            device: dflash_settings::Device::Cpu,
            dtype: Dtype::Float32,
            processor: dflash_settings::ProcessorSettings::default(),
            wire_dtype: WireDtype::F32,
            max_queue: 16,
            max_wait: 0.0,
            client_timeout: 30.0,
            max_batch_tokens: 100,
            max_model_len: None,
            threads: None,
            parallel: dflash_settings::ParallelSettings::default(),
        }
    }

    #[test]
    fn rows_keep_their_order_and_bits() {
        let state = Tensor::from_slice(&[1.0f32, -2.5, 3.25, 0.1, 5.0, 6.0]).reshape([2, 3]);
        // A transposed view has the rows apart in memory.
        let view = state.tr();
        let bytes =
            |state: &Tensor, dtype| row_bytes(&on_host(state, wire_kind(dtype)).unwrap()).unwrap();
        let f32s = bytes(&view, WireDtype::F32);
        let values: Vec<f32> =
            f32s.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, [1.0, 0.1, -2.5, 5.0, 3.25, 6.0]);
        let bf16s = bytes(&state, WireDtype::Bf16);
        // bf16 is float32's upper half: 1.0 = 0x3f80, 0.1 rounds up to 0x3dcd.
        assert_eq!(
            (bf16s.len(), &bf16s[..2], &bf16s[6..8]),
            (12, &[0x80, 0x3f][..], &[0xcd, 0x3d][..])
        );
    }
}
