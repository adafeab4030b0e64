//! Counts what is requested of a fake CUDA device: operations, launches, waits.

use dflash_torch_sys::trace::{Form, Record, on_fake_cuda};
use tch::no_grad;

/// Records the requests of `f` after its preparations, whose end `f` marks by calling its argument.
///
/// # Panics
/// If an operation refuses its arguments.
pub fn asked(f: impl FnOnce(&dyn Fn())) -> Record {
    let start_over = || dflash_torch_sys::trace::start_over();
    no_grad(|| on_fake_cuda(|| f(&start_over))).unwrap().1
}

/// Number of operations whose name contains `part`.
pub fn count(record: &Record, part: &str) -> usize {
    record.events.iter().filter(|event| event.operation.contains(part)).count()
}

/// Kernels that all operations launch.
pub fn launches(record: &Record) -> u64 {
    record.events.iter().map(|event| event.launches).sum()
}

/// Asserts that attention used `calls` flash kernels and nothing waited for the GPU.
///
/// # Panics
/// If that does not hold.
pub fn flash_alone(record: &Record, calls: usize) {
    let operations: Vec<&str> = record.events.iter().map(|event| &*event.operation).collect();
    // libtorch's fallback without a GPU: none of these layers has another softmax.
    assert_eq!(count(record, "softmax"), 0, "{operations:?}");
    assert_eq!(count(record, "_flash_attention_forward"), calls, "{operations:?}");
    assert!(record.events.iter().all(|event| event.form != Form::Wait), "{operations:?}");
}

/// Launches of a layer, and of a whole model of 36 layers (as Qwen3-8B), extrapolated from the
/// third and fourth of `of_layers`.
pub fn of_36(of_layers: impl Fn(usize) -> u64) -> (u64, u64) {
    let (two, four) = (of_layers(2), of_layers(4));
    let layer = (four - two) / 2;
    (layer, two + layer * 34)
}
