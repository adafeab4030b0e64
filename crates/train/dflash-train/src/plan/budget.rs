//! From what a step asks of a GPU to the time that it takes: by the GPU's figures and, for each kind
//! of work, the share of them that its kernels reach (see [`mod@super::efficiency`]).

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use dflash_torch_sys::trace::{Event, Form, Record};
use serde::Serialize;

use super::efficiency::RatedGpu;

/// Shortest time between the starts of two kernels in a stream, seconds.
const LAUNCH: f64 = 2e-6;
/// The host waits until the GPU is idle, and the GPU until it gets work again, seconds.
const WAIT: f64 = 20e-6;
/// Copies from memory that is not pinned, bytes/s.
const PAGEABLE: f64 = 10e9;

/// What a step takes, computed.
#[derive(Clone, Debug, Serialize)]
pub struct Budget {
    /// The GPU.
    pub gpu: &'static str,
    /// Its dense peak in bfloat16, TFLOP/s.
    pub peak_tflops: f64,
    /// Of its memory, GB/s.
    pub bandwidth_gb_s: f64,
    /// Its memory, bytes.
    pub memory_bytes: f64,
    /// In the order in which the step comes to them first.
    pub parts: Vec<PartBudget>,
    /// Operators and kernels, those that take longest first.
    pub operations: Vec<OperationBudget>,
    /// Kernels that a step launches.
    pub launches: u64,
    /// Of these, those of attention's own calls: its products, and what libtorch does around them.
    pub attention_launches: u64,
    /// Of these, those that are neither that nor matrix products.
    pub launches_beyond_products: u64,
    /// Times that the host waits for the GPU.
    pub waits: u64,
    /// Milliseconds of the GPU.
    pub gpu_ms: f64,
    /// Milliseconds of the host for launching everything.
    pub host_ms: f64,
    /// Milliseconds of a step: the longer of both.
    pub step_ms: f64,
    /// Of the dense peak, what products are taken to reach.
    pub products_share: f64,
    /// The same step with products as slow as a day may make them; none where they are measured.
    pub slow: Option<SlowStep>,
    /// Where the shares come from.
    pub source: String,
    /// Useful arithmetic of a step, TFLOP.
    pub useful_tflop: f64,
    /// Useful arithmetic over the peak's.
    pub mfu: f64,
    /// Most bytes of tensors at one time.
    pub peak_bytes: u64,
    /// The part in which that is.
    pub peak_part: &'static str,
}

/// A step whose products reach less.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SlowStep {
    /// Of the dense peak.
    pub products_share: f64,
    /// Milliseconds of a step.
    pub step_ms: f64,
    /// Useful arithmetic over the peak's.
    pub mfu: f64,
}

/// What a part of a step takes.
#[derive(Clone, Debug, Serialize)]
pub struct PartBudget {
    /// Its name.
    pub part: &'static str,
    /// Kernels launched.
    pub launches: u64,
    /// Times that the host waits for the GPU.
    pub waits: u64,
    /// Bytes read and written by what is not a product, GB.
    pub moved_gb: f64,
    /// Arithmetic of products, TFLOP.
    pub tflop: f64,
    /// Milliseconds of the GPU, and of waits.
    pub ms: f64,
    /// Of the GPU's time.
    pub share: f64,
}

/// What an operator or kernel takes in a part of a step.
#[derive(Clone, Debug, Serialize)]
pub struct OperationBudget {
    /// The part.
    pub part: &'static str,
    /// As libtorch names it, or our kernel's name.
    pub operation: String,
    /// Kernels launched.
    pub launches: u64,
    /// Milliseconds of the GPU, and of waits.
    pub ms: f64,
}

impl Budget {
    /// What `record`, a step of `useful` operations, takes on `gpu`, whose figures are reached so far.
    pub(crate) fn new(record: &Record, useful: f64, on: RatedGpu<'_>) -> Self {
        let mut budget = Self::of(record, useful, on);
        budget.slow = on.efficiency.slow().map(|slow| {
            let on = RatedGpu { efficiency: &slow, ..on };
            let Self { products_share, step_ms, mfu, .. } = Self::of(record, useful, on);
            SlowStep { products_share, step_ms, mfu }
        });
        budget
    }

    fn of(record: &Record, useful: f64, on: RatedGpu<'_>) -> Self {
        let RatedGpu { gpu, efficiency } = on;
        let mut parts: Vec<PartBudget> = Vec::new();
        for event in &record.events {
            let index =
                parts.iter().position(|part| part.part == event.part).unwrap_or_else(|| {
                    parts.push(PartBudget::empty(event.part));
                    parts.len() - 1
                });
            parts[index].add(event, on);
        }
        let gpu_ms: f64 = parts.iter().map(|part| part.ms).sum();
        parts.iter_mut().for_each(|part| part.share = part.ms / gpu_ms);
        let host_ms = record.events.len() as f64 * efficiency.operator * 1e3;
        let step_ms = gpu_ms.max(host_ms);
        let launches = |of: fn(&Event) -> bool| {
            record.events.iter().filter(|event| of(event)).map(|event| event.launches).sum()
        };
        Self {
            gpu: gpu.name,
            peak_tflops: gpu.tflops,
            bandwidth_gb_s: gpu.bandwidth,
            memory_bytes: gpu.memory * 1e9,
            launches: parts.iter().map(|part| part.launches).sum(),
            attention_launches: launches(is_attention),
            launches_beyond_products: launches(|event| !is_product(event) && !is_attention(event)),
            waits: parts.iter().map(|part| part.waits).sum(),
            parts,
            operations: operations(record, on),
            gpu_ms,
            host_ms,
            step_ms,
            products_share: efficiency.products,
            slow: None,
            source: efficiency.source(),
            useful_tflop: useful / 1e12,
            mfu: useful / (step_ms / 1e3) / (gpu.tflops * 1e12),
            peak_bytes: record.peak_bytes,
            peak_part: record.peak_part,
        }
    }

    /// Useful TFLOP/s.
    pub(super) fn tflops(&self) -> f64 {
        self.useful_tflop / (self.step_ms / 1e3)
    }
}

fn operations(record: &Record, on: RatedGpu<'_>) -> Vec<OperationBudget> {
    let mut sums: BTreeMap<(&'static str, &str), (u64, f64)> = BTreeMap::new();
    for event in &record.events {
        let (launches, ms) = sums.entry((event.part, &event.operation)).or_default();
        *launches += event.launches;
        *ms += seconds(event, on) * 1e3;
    }
    let sums = sums.into_iter().map(|((part, operation), (launches, ms))| OperationBudget {
        part,
        operation: operation.to_owned(),
        launches,
        ms,
    });
    let mut operations: Vec<_> = sums.collect();
    operations.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    operations
}

impl PartBudget {
    fn empty(part: &'static str) -> Self {
        Self { part, launches: 0, waits: 0, moved_gb: 0.0, tflop: 0.0, ms: 0.0, share: 0.0 }
    }

    fn add(&mut self, event: &Event, on: RatedGpu<'_>) {
        self.launches += event.launches;
        self.waits += u64::from(waits(event));
        if event.flops == 0.0 {
            self.moved_gb += (event.read + event.written) / 1e9;
        }
        self.tflop += event.flops / 1e12;
        self.ms += seconds(event, on) * 1e3;
    }
}

/// Whether it is a matrix product, which attention is not.
fn is_product(event: &Event) -> bool {
    event.flops > 0.0 && !is_attention(event)
}

/// Whether it is a kernel of a flash call.
fn is_attention(event: &Event) -> bool {
    event.operation.contains("flash")
}

fn waits(event: &Event) -> bool {
    matches!(event.form, Form::BlockingUpload | Form::Wait)
}

fn seconds(event: &Event, RatedGpu { gpu, efficiency }: RatedGpu<'_>) -> f64 {
    let moved = (event.read + event.written) / (gpu.bandwidth * 1e9 * efficiency.bandwidth);
    match event.form {
        Form::Operator | Form::OwnKernel => {
            let computed = event.tile_flops / (gpu.tflops * 1e12 * efficiency.of_event(event));
            moved.max(computed).max(event.launches as f64 * LAUNCH)
        }
        // beside the GPU's work
        Form::Upload => 0.0,
        Form::BlockingUpload => WAIT + event.written / PAGEABLE,
        Form::Wait => WAIT,
    }
}

impl Display for Budget {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "a step on {}, {}:", self.gpu, self.source)?;
        writeln!(
            f,
            "  {:<14}{:>9}{:>8}{:>11}{:>10}{:>11}{:>8}",
            "part", "launches", "waits", "GB moved", "TFLOP", "ms", "share"
        )?;
        let row = |f: &mut Formatter<'_>, part: &PartBudget| {
            let PartBudget { part, launches, waits, moved_gb, tflop, ms, share } = part;
            writeln!(
                f,
                "  {part:<14}{launches:>9}{waits:>8}{moved_gb:>11.3}{tflop:>10.3}{ms:>11.3}{:>7.1}%",
                share * 100.0
            )
        };
        self.parts.iter().try_for_each(|part| row(f, part))?;
        row(f, &self.all())?;
        writeln!(
            f,
            "  {} launches are in flash attention and {} beyond products; the host launches them in {:.1} ms",
            self.attention_launches, self.launches_beyond_products, self.host_ms
        )?;
        writeln!(
            f,
            "  a step takes {:.1} ms: {:.1} useful TFLOP/s, MFU {:.1}%",
            self.step_ms,
            self.tflops(),
            self.mfu * 100.0
        )?;
        if let Some(slow) = &self.slow {
            writeln!(
                f,
                "  and {:.1} ms, MFU {:.1}%, if products reach {:.2} of the peak instead of {:.2}",
                slow.step_ms,
                slow.mfu * 100.0,
                slow.products_share,
                self.products_share
            )?;
        }
        writeln!(
            f,
            "  tensors take {:.1} GB at their peak ({}), of {:.0} GB",
            self.peak_bytes as f64 / 1e9,
            self.peak_part,
            self.memory_bytes / 1e9
        )
    }
}

impl Budget {
    fn all(&self) -> PartBudget {
        let sum = |of: fn(&PartBudget) -> f64| self.parts.iter().map(of).sum();
        PartBudget {
            part: "total",
            launches: self.launches,
            waits: self.waits,
            moved_gb: sum(|part| part.moved_gb),
            tflop: sum(|part| part.tflop),
            ms: self.gpu_ms,
            share: 1.0,
        }
    }
}
