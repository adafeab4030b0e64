//! Benchmarks a target on a CPU: load time and memory, and how close its steps are to their lower
//! bound, a plain read of the required bytes.
//!
//! Texts do not matter and no tokenizer is needed: a step's cost depends on the numbers of rows and
//! of preceding tokens. Steps and plain reads alternate, so that both see the same machine load.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use dflash_kernels::decode::passes_alone;
use dflash_settings::{BenchTargetSettings, Device};
use dflash_target::{KvCache, PackedDecoder, Target, TargetOptions};
use dflash_tensor::{DeviceKind, kind_name, peak_resident_mib, place, resident_mib};
use serde::Serialize;
use tch::Tensor;

use crate::Error;

/// Repetitions per prompt; the first allocates memory.
const TURNS: usize = 4;
/// Untimed steps.
const WARM_UP: usize = 2;

/// Results. Times are medians.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TargetReport {
    /// Precision, and threads.
    pub device: String,
    /// The CPU instruction-set level in use.
    pub cpu_level: String,
    /// Seconds to load the target.
    pub load_s: f64,
    /// Resident memory after the load, MiB.
    pub resident_mib: f64,
    /// Resident memory before the load, MiB.
    pub before_mib: f64,
    /// Peak resident memory, MiB.
    pub peak_mib: f64,
    /// Bytes of weights that a step reads, MiB.
    pub weights_mib: f64,
    /// Bandwidth of a plain read of the weights with as many threads, GB/s.
    pub read_gb_per_s: f64,
    /// Rows per step.
    pub rows: usize,
    /// Steps by context length.
    pub steps: Vec<StepReport>,
    /// Prompts by length.
    pub prompts: Vec<PromptReport>,
    /// Passes that ran on one thread because others were descheduled: on a busy machine, steps take
    /// longer than the plain reads they are compared with.
    pub passes_alone: u64,
}

/// Steps at one context length.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepReport {
    /// Preceding tokens.
    pub context: usize,
    /// Milliseconds per step.
    pub ms: f64,
    /// Milliseconds of a plain read of weights and cache.
    pub floor_ms: f64,
}

/// Processing of a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptReport {
    /// Length in tokens.
    pub tokens: usize,
    /// Milliseconds to the first token of the answer.
    pub ms: f64,
}

/// Loads the target in `dir` and benchmarks it.
///
/// # Errors
/// A target that cannot be loaded or does not support packed passes; an interruption.
pub fn bench_target(
    settings: &BenchTargetSettings,
    dir: &Path,
    stop: &AtomicBool,
) -> Result<TargetReport, Error> {
    let DeviceKind { device, kind: dtype } = place(Device::Cpu, settings.dtype, 0)?;
    let before_mib = resident_mib().unwrap_or_default();
    let begun = Instant::now();
    let target = Target::load(dir, &TargetOptions { device, dtype })?;
    let few = target.packed_decoder().ok_or_else(|| Error::NotPacked { path: dir.into() })?;
    let load_s = begun.elapsed().as_secs_f64();
    let (resident, peak) = (resident_mib(), peak_resident_mib());
    let mut steps = Steps::new(&target, few, settings, stop);
    let timed: Vec<(usize, f64, usize)> =
        settings.contexts.iter().map(|&context| steps.behind(context)).collect::<Result<_, _>>()?;
    let prompts = settings.prompts.iter().map(|&tokens| steps.prompt(tokens));
    let prompts = prompts.collect::<Result<_, Error>>()?;
    if steps.reads.is_empty() {
        steps.read();
    }
    let bytes_per_ms = few.weight_bytes() as f64 / median(&mut steps.reads);
    let floor = |cache: usize| (few.weight_bytes() + cache) as f64 / bytes_per_ms;
    let step = |(context, ms, cache)| StepReport { context, ms, floor_ms: floor(cache) };
    Ok(TargetReport {
        device: format!("{}, {} threads", kind_name(dtype), tch::get_num_threads()),
        cpu_level: dflash_kernels::cpu_level().to_string(),
        load_s,
        resident_mib: resident.unwrap_or_default(),
        before_mib,
        peak_mib: peak.unwrap_or_default(),
        weights_mib: few.weight_bytes() as f64 / f64::from(1 << 20),
        read_gb_per_s: bytes_per_ms / 1e6,
        rows: settings.rows,
        steps: timed.into_iter().map(step).collect(),
        prompts,
        passes_alone: passes_alone(),
    })
}

/// State of the step measurements; times of the interleaved plain reads in ms.
struct Steps<'a> {
    target: &'a Target,
    few: &'a PackedDecoder,
    settings: &'a BenchTargetSettings,
    stop: &'a AtomicBool,
    reads: Vec<f64>,
}

impl<'a> Steps<'a> {
    fn new(
        target: &'a Target,
        few: &'a PackedDecoder,
        settings: &'a BenchTargetSettings,
        stop: &'a AtomicBool,
    ) -> Self {
        Self { target, few, settings, stop, reads: Vec::new() }
    }

    /// Milliseconds of a step after `context` tokens, and the bytes of cache that it reads.
    fn behind(&mut self, context: usize) -> Result<(usize, f64, usize), Error> {
        let BenchTargetSettings { steps, rows, .. } = *self.settings;
        let mut cache = self.target.new_cache(context + rows);
        cache.fill_random(context);
        let cached = cache.bytes_held();
        let mut times = Vec::new();
        for step in 0..WARM_UP + steps {
            self.check()?;
            self.read();
            let ms = timed(|| self.read_tokens(rows, &mut cache));
            cache.truncate(context);
            times.extend((step >= WARM_UP).then_some(ms));
        }
        Ok((context, median(&mut times), cached))
    }

    fn prompt(&mut self, tokens: usize) -> Result<PromptReport, Error> {
        let mut cache = self.target.new_cache(tokens);
        let mut times = Vec::new();
        for turn in 0..TURNS {
            self.check()?;
            let ms = timed(|| self.read_tokens(tokens, &mut cache));
            cache.truncate(0);
            times.extend((turn > 0).then_some(ms));
        }
        Ok(PromptReport { tokens, ms: median(&mut times) })
    }

    /// Processes `tokens` tokens and chooses the next one.
    fn read_tokens(&self, tokens: usize, cache: &mut KvCache) {
        let rows = self.target.vocab_size() as usize;
        let ids: Vec<i64> = (0..tokens).map(|at| (at * 7919 % rows) as i64).collect();
        let output = self.target.forward_cached(&Tensor::from_slice(&ids), cache, &[]);
        // A step verifies all of its rows; for a prompt only the last one counts.
        let wanted = tokens.min(self.settings.rows) as i64;
        let last = output.hidden_td.narrow(0, tokens as i64 - wanted, wanted);
        drop(self.target.most_likely(&last));
    }

    fn check(&self) -> Result<(), Error> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    fn read(&mut self) {
        let few = self.few;
        self.reads.push(timed(|| {
            std::hint::black_box(few.read_weights());
        }));
    }
}

/// Milliseconds of `work`.
fn timed(work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    begun.elapsed().as_secs_f64() * 1e3
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
