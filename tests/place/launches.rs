//! What is asked of a fake CUDA device: operations, launches, waits.

use dflash_torch_sys::trace::{Form, Record, on_fake_cuda};
use tch::no_grad;

/// What `f` asks for after its preparations, at whose end it calls what it is given.
///
/// # Panics
/// When an operation refuses what it is given.
pub fn asked(f: impl FnOnce(&dyn Fn())) -> Record {
    let start_over = || dflash_torch_sys::trace::start_over();
    no_grad(|| on_fake_cuda(|| f(&start_over))).unwrap().1
}

/// How many operations have `part` in their name.
pub fn count(record: &Record, part: &str) -> usize {
    record.events.iter().filter(|event| event.operation.contains(part)).count()
}

/// Kernels that all operations launch.
pub fn launches(record: &Record) -> u64 {
    record.events.iter().map(|event| event.launches).sum()
}

/// Attention was computed by `calls` flash kernels and nothing else, and nothing waited for the GPU.
///
/// # Panics
/// Where it was not so.
pub fn flash_alone(record: &Record, calls: usize) {
    let operations: Vec<&str> = record.events.iter().map(|event| &*event.operation).collect();
    // What libtorch chooses without a GPU: none of these layers has another softmax.
    assert_eq!(count(record, "softmax"), 0, "{operations:?}");
    assert_eq!(count(record, "_flash_attention_forward"), calls, "{operations:?}");
    assert!(record.events.iter().all(|event| event.form != Form::Wait), "{operations:?}");
}

/// A layer and a whole model of 36 layers, as Qwen3-8B has, that are like the third and fourth of
/// `of_layers`.
pub fn of_36(of_layers: impl Fn(usize) -> u64) -> (u64, u64) {
    let (two, four) = (of_layers(2), of_layers(4));
    let layer = (four - two) / 2;
    (layer, two + layer * 34)
}
