//! The same budget for this machine's CPU: a step's matmuls and bytes over measured speeds.
//!
//! The CPU kernels do a norm, a rotation or an activation in one pass, and attention stores no
//! scores. So the consecutive operators that a GPU would run for these count once per part, with
//! the largest one's bytes.

use std::time::Instant;

use dflash_torch_sys::trace::{Event, Record};
use tch::{Device, Kind, Tensor};

use super::step::StepShape;
use crate::Error;

/// Rows of the timed matmul: together with the draft's weights, more than a cache holds.
const ROWS: i64 = 1024;
/// Bytes copied to measure memory bandwidth.
const COPIED: i64 = 64 << 20;
/// Repetitions; the fastest counts.
const TIMES: usize = 5;

/// This machine's speeds with libtorch's current number of threads.
#[derive(Clone, Copy, Debug)]
struct Speeds {
    /// Matmul FLOP/s.
    flops: f64,
    /// Bytes per second, reads plus writes.
    bytes: f64,
}

/// Predicted seconds of the step on this machine's CPU.
pub(crate) fn predict(shape: &StepShape<'_>) -> Result<f64, Error> {
    let speeds = Speeds::measured(shape);
    Ok(seconds(&shape.record()?, speeds))
}

impl Speeds {
    /// Measured with a matmul of the draft's MLP size, and a copy.
    fn measured(shape: &StepShape<'_>) -> Self {
        let (h, i) = (shape.draft.hidden_size, shape.draft.intermediate_size);
        let random = |size: [i64; 2]| Tensor::rand(size, (shape.kind, Device::Cpu));
        let (x, weight) = (random([ROWS, h]), random([2 * i, h]));
        let product = fastest(|| drop(x.matmul(&weight.tr())));
        let from = Tensor::zeros([COPIED], (Kind::Uint8, Device::Cpu));
        let mut to = from.zeros_like();
        let copy = fastest(|| to.copy_(&from));
        Self { flops: (4 * ROWS * h * i) as f64 / product, bytes: 2.0 * COPIED as f64 / copy }
    }
}

fn fastest(mut f: impl FnMut()) -> f64 {
    let once = |_| {
        let begun = Instant::now();
        f();
        begun.elapsed().as_secs_f64()
    };
    (0..TIMES).map(once).fold(f64::INFINITY, f64::min)
}

fn seconds(record: &Record, speeds: Speeds) -> f64 {
    let products: f64 = record.events.iter().map(|event| event.flops).sum();
    let swept: f64 = record.events.chunk_by(in_one_sweep).map(largest).sum();
    products / speeds.flops + swept / speeds.bytes
}

/// Whether two neighbours are elementwise work on tensors of the same size.
fn in_one_sweep(a: &Event, b: &Event) -> bool {
    a.part == b.part && a.flops == 0.0 && b.flops == 0.0
}

/// Bytes of one pass; attention's are part of its matmuls.
fn largest(sweep: &[Event]) -> f64 {
    if sweep[0].part == "attention" || sweep[0].flops > 0.0 {
        return 0.0;
    }
    sweep.iter().map(|event| event.read + event.written).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use dflash_torch_sys::trace::Form;

    use super::*;

    #[test]
    fn products_take_their_arithmetic_and_neighbours_one_sweep() {
        let event = |part, flops, bytes| Event {
            operation: String::new(),
            part,
            form: Form::Operator,
            launches: 1,
            read: bytes,
            written: bytes,
            flops,
            tile_flops: flops,
        };
        let events = vec![
            event("mlp", 100.0, 1.0),
            // one pass of 2 * 30 bytes
            event("mlp", 0.0, 10.0),
            event("mlp", 0.0, 30.0),
            // another one, in the next part
            event("loss", 0.0, 20.0),
            // part of its matmuls
            event("attention", 0.0, 1000.0),
            event("attention", 300.0, 1.0),
        ];
        let record = Record { events, live_bytes: 0, peak_bytes: 0, peak_part: "mlp" };
        let found = seconds(&record, Speeds { flops: 100.0, bytes: 10.0 });
        assert_eq!(found, 400.0 / 100.0 + 100.0 / 10.0);
    }
}
