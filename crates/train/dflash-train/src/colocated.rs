//! Rows whose hidden states this process computes itself, with a target next to the draft.
//!
//! Target and draft alternate row by row, on one thread and one device: a row's states are computed
//! when the step requests the row, and the memory of the target's pass is free before the draft's
//! begins. A prefetch thread would compete for the same cores or GPU and hold one more row. The
//! states are bit-identical to those that a hidden-state server sends for the same documents (both
//! run `Prefill`), and they stay on the device. The rounding of CPU matmuls is a process-wide
//! setting, which the target's pass sets and restores.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use dflash_data::PackedRow;
use dflash_hidden_states::{Counters, HiddenStates, Probe, RetryPolicy};
use dflash_settings::{HiddenStatesSettings, WireDtype};
use dflash_target::{PackedPrompts, Prefill, PrefillOptions, TargetIo, TokenBudget};
use dflash_tensor::{DeviceKind, catch_oom, place};
use dflash_torch_sys::Begun;
use tch::{Device, Kind, Tensor};

use crate::Error;
use crate::no_memory::Asking;
use crate::order::PlannedRow;
use crate::prepared::Prepared;
use crate::rows::{
    ComputedRow, ComputedRows, Loading, PROBE_TOKENS, RowSource, Samples, TargetTime, by_variety,
    pack,
};
use crate::states::ComputedStates;

/// Rows whose hidden states a target in this process computes.
pub(crate) struct ColocatedRows {
    samples: Arc<dyn Samples>,
    total_seq_len: usize,
    /// Number of samples, from the first on, that may serve as a probe.
    candidates: u32,
    /// The target's parts that the draft uses; the target shares the embedding if the types match.
    head: TargetIo,
    /// Shared by the rows of training and of validation, which never ask at the same time.
    target: Arc<Mutex<Colocated>>,
}

/// The target with its options.
struct Colocated {
    prefill: Prefill,
    budget: TokenBudget,
    /// Ascending.
    layer_ids: Vec<u32>,
    /// Type that the states are rounded to.
    kind: Kind,
    stop: Arc<AtomicBool>,
    /// Builds the out-of-memory error, which names the settings to lower.
    refuse: Box<dyn Fn(usize, String) -> Error + Send>,
}

/// A source of rows being computed.
struct Computing {
    samples: Arc<dyn Samples>,
    total_seq_len: usize,
    target: Arc<Mutex<Colocated>>,
    planned: std::vec::IntoIter<PlannedRow>,
    counters: Counters,
    /// Unusable samples since the last usable one.
    unusable_in_a_row: u32,
}

/// Why a document's states cannot be trained on.
#[derive(Debug, PartialEq)]
enum Flaw {
    TooLong { tokens: usize, limit: usize },
    ZeroRow { layer: u32, row: usize },
    NotFinite { layer: u32, row: usize },
}

impl std::fmt::Display for Flaw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLong { tokens, limit } => {
                write!(f, "it has {tokens} tokens, the target takes {limit}; lower --total-seq-len")
            }
            Self::ZeroRow { layer, row } => write!(f, "row {row} of layer {layer} is all zero"),
            Self::NotFinite { layer, row } => write!(
                f,
                "row {row} of layer {layer} holds NaN or infinity; try another --target-dtype"
            ),
        }
    }
}

impl ColocatedRows {
    /// Loads the target for a draft that computes at `run`; `local` numbers processes per machine.
    pub(crate) fn load(
        prepared: &Prepared<'_>,
        run: DeviceKind,
        asking: Asking<'_>,
        local: usize,
    ) -> Result<Self, Error> {
        let config = prepared.config;
        let settings = &config.settings;
        let HiddenStatesSettings { target_dtype, states_dtype, target_batch_tokens, .. } =
            settings.hidden_states;
        let place = place(settings.device, target_dtype, local)?;
        let layer_ids = prepared.layer_ids();
        let head = prepared.head(run)?;
        let options = PrefillOptions {
            place,
            asked: target_dtype,
            highest: layer_ids.last().copied(),
            embedding_vh: (place == run).then_some(&head.embedding_vh),
        };
        let prefill = Prefill::load(&config.target_dir, &options)?;
        if asking.rank == 0 {
            let (place, layers) = (prefill.place(), layer_ids.last().copied().unwrap_or(0));
            tracing::info!("the target runs in this process, {layers} layers of it on {place}");
        }
        let (config, rank) = (config.clone(), asking.rank);
        let refuse = move |tokens: usize, reason: String| {
            let doing = format!("while the target ran a document of {tokens} tokens");
            Asking { config: &config, rank }.refused(doing, reason)
        };
        let target = Colocated {
            prefill,
            budget: TokenBudget::new(target_batch_tokens),
            layer_ids,
            kind: match states_dtype {
                WireDtype::Bf16 => Kind::BFloat16,
                WireDtype::F32 => Kind::Float,
            },
            stop: Arc::clone(&prepared.config.stop),
            refuse: Box::new(refuse),
        };
        Ok(Self {
            samples: prepared.samples(),
            total_seq_len: settings.rows.total_seq_len(),
            candidates: prepared.probe_candidates(),
            head,
            target: Arc::new(Mutex::new(target)),
        })
    }
}

impl RowSource for ColocatedRows {
    fn start(&self, planned: Vec<PlannedRow>) -> Result<Loading, Error> {
        Ok(Loading::Computed(Box::new(Computing {
            samples: Arc::clone(&self.samples),
            total_seq_len: self.total_seq_len,
            target: Arc::clone(&self.target),
            planned: planned.into_iter(),
            counters: Counters::default(),
            unusable_in_a_row: 0,
        })))
    }

    fn probes(&self) -> Result<Vec<Probe>, Error> {
        self.probes_of(&[0])
    }

    fn second_probes(&self) -> Result<Vec<Probe>, Error> {
        let length = PROBE_TOKENS.min(self.total_seq_len);
        let samples = by_variety(&*self.samples, self.candidates, length)?;
        self.probes_of(&samples[..samples.len().min(1)])
    }

    fn head(&self) -> Option<TargetIo> {
        Some(self.head.shared())
    }
}

impl ColocatedRows {
    /// The target's states of a row made of `samples`.
    fn probes_of(&self, samples: &[u32]) -> Result<Vec<Probe>, Error> {
        let row = pack(&*self.samples, samples, PROBE_TOKENS.min(self.total_seq_len))?;
        let mut target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        if row.input_ids.len() < 2 || target.check_length(row.input_ids.len()).is_some() {
            return Ok(Vec::new());
        }
        let layers = target.states(&row)?;
        let (layer_ids, tokens) = (target.layer_ids.clone(), row.input_ids.len());
        let hidden_size = target.prefill.config().hidden_size as usize;
        let bytes = layers.iter().map(|layer_th| bytes_on_host(layer_th, tokens * hidden_size));
        let states =
            HiddenStates::new(layer_ids, tokens, hidden_size, WireDtype::F32, bytes.collect())?;
        Ok(vec![Probe {
            origin: "the target in this process".to_owned(),
            input_ids: row.input_ids,
            states,
            says_layers: true,
            log_probabilities: Vec::new(),
            requests: 0,
        }])
    }
}

/// The first `numbers` elements of a layer as little-endian float32.
fn bytes_on_host(layer_th: &Tensor, numbers: usize) -> Bytes {
    let mut values = vec![0.0_f32; numbers];
    layer_th.to_kind(Kind::Float).to_device(Device::Cpu).copy_data(&mut values, numbers);
    values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
}

impl ComputedRows for Computing {
    fn next(&mut self) -> Result<Option<ComputedRow>, Error> {
        let Some(PlannedRow { epoch, samples }) = self.planned.next() else { return Ok(None) };
        let mut row = pack(&*self.samples, &samples, self.total_seq_len)?;
        let target = Arc::clone(&self.target);
        let mut target = target.lock().unwrap_or_else(PoisonError::into_inner);
        let documents = row.samples.len();
        let (begun, asked) = (Begun::on(target.prefill.device())?, Instant::now());
        let lengths: Vec<Option<Flaw>> =
            row.documents().map(|document| target.check_length(document.len())).collect();
        self.leave_out(&mut row, lengths, |counters| &mut counters.rejected)?;
        let mut layers = target.states(&row)?;
        let flaws = target.flaws(&row, &layers);
        if let Some(kept) = self.leave_out(&mut row, flaws, |counters| &mut counters.invalid)? {
            let kept_t = Tensor::from_slice(&kept).to_device(target.prefill.device());
            layers.iter_mut().for_each(|layer_th| *layer_th = layer_th.index_select(0, &kept_t));
        }
        self.counters.generated += row.samples.len() as u64;
        self.counters.bytes += layers.iter().map(bytes_of).sum::<u64>();
        let states = ComputedStates::new(target.layer_ids.clone(), layers);
        let skipped = documents - row.samples.len();
        let target = TargetTime { device: begun.end()?, host: asked.elapsed() };
        Ok(Some(ComputedRow { epoch, row, states, skipped, target }))
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Computing {
    /// Removes the documents of `row` that have flaws; counts and logs them. Returns the positions
    /// of the remaining tokens, or `None` if nothing was removed.
    fn leave_out(
        &mut self,
        row: &mut PackedRow,
        flaws: Vec<Option<Flaw>>,
        count: fn(&mut Counters) -> &mut u64,
    ) -> Result<Option<Vec<i64>>, Error> {
        for (flaw, &sample) in flaws.iter().zip(&row.samples) {
            let Some(flaw) = flaw else {
                self.unusable_in_a_row = 0;
                continue;
            };
            *count(&mut self.counters) += 1;
            self.unusable_in_a_row += 1;
            if self.unusable_in_a_row >= RetryPolicy::default().failures_in_a_row {
                let (count, reason) = (self.unusable_in_a_row, flaw.to_string());
                return Err(Error::Unusable { count, sample, reason });
            }
            tracing::warn!("leaving out sample {sample}: {flaw}");
        }
        let keep: Vec<bool> = flaws.iter().map(Option::is_none).collect();
        if keep.iter().all(|&keep| keep) {
            return Ok(None);
        }
        let kept = row.documents().zip(&keep).filter(|(_, keep)| **keep);
        let positions = kept.flat_map(|(document, _)| document).map(|row| row as i64).collect();
        row.keep_documents(&keep);
        Ok(Some(positions))
    }
}

impl Colocated {
    /// The same limit as the hidden-state server's.
    fn check_length(&self, tokens: usize) -> Option<Flaw> {
        let limit = self.prefill.config().max_position_embeddings as usize;
        (tokens > limit).then_some(Flaw::TooLong { tokens, limit })
    }

    /// The states of a row's documents, rounded, [tokens, H] per layer.
    fn states(&mut self, row: &PackedRow) -> Result<Vec<Tensor>, Error> {
        let (tokens, width) = (row.input_ids.len() as i64, self.prefill.config().hidden_size);
        let options = (self.kind, self.prefill.device());
        let layers: Vec<Tensor> =
            self.layer_ids.iter().map(|_| Tensor::empty([tokens, width], options)).collect();
        let mut first = 0;
        while first < row.samples.len() {
            let batch = batch_from(first, &row.document_starts, self.budget.tokens());
            first = batch.end;
            self.fill(row, batch, &layers)?;
        }
        Ok(layers)
    }

    /// Runs the target on `documents` of a row and writes their states into `layers`; splits the
    /// documents in half if memory runs out.
    fn fill(
        &mut self,
        row: &PackedRow,
        documents: Range<usize>,
        layers: &[Tensor],
    ) -> Result<(), Error> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(dflash_hidden_states::Error::Interrupted.into());
        }
        let bounds = &row.document_starts[documents.start..=documents.end];
        let (start, tokens) = (bounds[0], bounds[documents.len()] - bounds[0]);
        let prompts = bounds.windows(2).map(|bounds| &row.input_ids[bounds[0]..bounds[1]]);
        let prompts = PackedPrompts::new(prompts);
        let ran = catch_oom(|| -> Result<(), Error> {
            let states = self.prefill.states_unless(&self.stop, &prompts, &self.layer_ids)?;
            let states = states.ok_or(dflash_hidden_states::Error::Interrupted)?;
            for (layer_th, state_th) in layers.iter().zip(states) {
                layer_th.narrow(0, start as i64, tokens as i64).copy_(&state_th);
            }
            Ok(())
        });
        let reason = match ran {
            Ok(ran) => {
                self.budget.fitted(tokens);
                return ran;
            }
            Err(reason) => reason,
        };
        self.budget.failed(tokens);
        if documents.len() == 1 {
            return Err((self.refuse)(tokens, reason));
        }
        tracing::warn!(
            "no memory for the target on {tokens} tokens: {reason}; running its {} documents again in halves",
            documents.len()
        );
        let middle = documents.start + documents.len() / 2;
        self.fill(row, documents.start..middle, layers)?;
        self.fill(row, middle..documents.end, layers)
    }

    /// The flaw in each document's states, by the same checks that a client applies to a server's.
    /// On a GPU nothing is checked, since that would need a readback: a step with non-finite states
    /// is discarded there.
    fn flaws(&self, row: &PackedRow, layers: &[Tensor]) -> Vec<Option<Flaw>> {
        let mut flaws: Vec<Option<Flaw>> = row.samples.iter().map(|_| None).collect();
        if self.prefill.device() != Device::Cpu || row.input_ids.is_empty() {
            return flaws;
        }
        for (&layer, layer_th) in self.layer_ids.iter().zip(layers) {
            let largest_t = layer_th.abs().amax([1], false).to_kind(Kind::Float);
            let largest = Vec::<f32>::try_from(largest_t).expect("a float32 vector");
            for (document, flaw) in row.documents().zip(&mut flaws) {
                let found = || flaw_in(&largest[document], layer);
                *flaw = flaw.take().or_else(found);
            }
        }
        flaws
    }
}

/// The first flaw in a document, given the largest magnitude of each of its rows. Zero rows are
/// valid in layer 0: checkpoints zero the embedding of padding and reserved tokens.
fn flaw_in(largest: &[f32], layer: u32) -> Option<Flaw> {
    largest.iter().enumerate().find_map(|(row, &largest)| match largest {
        _ if !largest.is_finite() => Some(Flaw::NotFinite { layer, row }),
        0.0 if layer > 0 => Some(Flaw::ZeroRow { layer, row }),
        _ => None,
    })
}

/// The longest run of documents from `first` with at most `most` tokens, and at least one document.
fn batch_from(first: usize, starts: &[usize], most: usize) -> Range<usize> {
    let fits = |&end: &usize| starts[end] - starts[first] <= most;
    let end = (first + 1..starts.len()).take_while(fits).last();
    first..end.unwrap_or(first + 1)
}

fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_take_the_documents_that_fit_and_at_least_one() {
        let starts = [0, 30, 80, 120, 620, 630];
        let batches = |most: usize| {
            let mut found = Vec::new();
            while found.last().is_none_or(|batch: &Range<usize>| batch.end < 5) {
                let first = found.last().map_or(0, |batch| batch.end);
                found.push(batch_from(first, &starts, most));
            }
            found
        };
        assert_eq!(batches(100), [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(batches(1), [0..1, 1..2, 2..3, 3..4, 4..5]);
        assert_eq!(batches(1000), Vec::from_iter(Some(0..5)));
    }

    #[test]
    fn rows_that_no_target_makes_are_found() {
        assert_eq!(flaw_in(&[1.0, 0.5], 2), None);
        assert_eq!(flaw_in(&[1.0, 0.0], 0), None, "embeddings may be zero");
        assert_eq!(flaw_in(&[1.0, 0.0], 2), Some(Flaw::ZeroRow { layer: 2, row: 1 }));
        for largest in [f32::NAN, f32::INFINITY] {
            assert_eq!(flaw_in(&[largest], 0), Some(Flaw::NotFinite { layer: 0, row: 0 }));
        }
    }
}
