//! Computes a step's time from the work that it asks of a GPU, the GPU's figures, and the share of
//! them that the kernels of each kind of work reach (see [`mod@super::efficiency`]).

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use dflash_torch_sys::trace::{Event, Form, Record};
use serde::Serialize;

use super::efficiency::RatedGpu;

/// Minimum interval between kernel launches in a stream, seconds.
const LAUNCH: f64 = 2e-6;
/// Cost of a synchronisation: the host waits for the GPU to drain, then the GPU for work; seconds.
const WAIT: f64 = 20e-6;
/// Copy rate from unpinned memory, bytes/s.
const PAGEABLE: f64 = 10e9;

/// The computed time budget of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Budget {
    /// Name of the GPU.
    pub gpu: &'static str,
    /// Dense bfloat16 peak, TFLOP/s.
    pub peak_tflops: f64,
    /// Memory bandwidth, GB/s.
    pub bandwidth_gb_s: f64,
    /// Memory, bytes.
    pub memory_bytes: f64,
    /// Parts, in the order in which the step first reaches them.
    pub parts: Vec<PartBudget>,
    /// Operators and kernels, slowest first.
    pub operations: Vec<OperationBudget>,
    /// Kernel launches per step.
    pub launches: u64,
    /// Launches in attention calls: its matmuls, and libtorch's kernels around them.
    pub attention_launches: u64,
    /// Launches that are neither in attention nor matmuls.
    pub launches_beyond_products: u64,
    /// Number of times that the host waits for the GPU.
    pub waits: u64,
    /// GPU time, milliseconds.
    pub gpu_ms: f64,
    /// Host time for launching everything, milliseconds.
    pub host_ms: f64,
    /// Step time, milliseconds: the longer of the two.
    pub step_ms: f64,
    /// Share of the dense peak that matmuls are assumed to reach.
    pub products_share: f64,
    /// The same step at the sustained matmul efficiency; `None` if efficiencies are measured.
    pub slow: Option<SlowStep>,
    /// Source of the efficiencies.
    pub source: String,
    /// Useful arithmetic per step, TFLOP.
    pub useful_tflop: f64,
    /// Model FLOPs utilization: useful arithmetic over the peak's.
    pub mfu: f64,
    /// Peak tensor memory, bytes.
    pub peak_bytes: u64,
    /// The part in which the peak occurs.
    pub peak_part: &'static str,
}

/// A step with lower matmul efficiency.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SlowStep {
    /// Share of the dense peak that matmuls reach.
    pub products_share: f64,
    /// Step time, milliseconds.
    pub step_ms: f64,
    /// Model FLOPs utilization.
    pub mfu: f64,
}

/// Time budget of a part of a step.
#[derive(Clone, Debug, Serialize)]
pub struct PartBudget {
    /// Its name.
    pub part: &'static str,
    /// Kernel launches.
    pub launches: u64,
    /// Number of times that the host waits for the GPU.
    pub waits: u64,
    /// Bytes read and written outside matmuls, GB.
    pub moved_gb: f64,
    /// Arithmetic of matmuls, TFLOP.
    pub tflop: f64,
    /// GPU time including waits, milliseconds.
    pub ms: f64,
    /// Share of the step's GPU time.
    pub share: f64,
}

/// Time budget of an operator or kernel within a part of a step.
#[derive(Clone, Debug, Serialize)]
pub struct OperationBudget {
    /// The part.
    pub part: &'static str,
    /// libtorch's name of the operator, or our kernel's name.
    pub operation: String,
    /// Kernel launches.
    pub launches: u64,
    /// GPU time including waits, milliseconds.
    pub ms: f64,
}

impl Budget {
    /// The budget of the step in `record`, with `useful` operations, on a GPU with its efficiency.
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

/// Whether it is a matmul outside attention.
fn is_product(event: &Event) -> bool {
    event.flops > 0.0 && !is_attention(event)
}

/// Whether it is a kernel of a flash-attention call.
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
        // overlaps with the GPU's work
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
