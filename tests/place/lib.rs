//! Where tensor tests compute: on the CPU in float32, unless `DFLASH_TEST_DEVICE` (cpu, cuda,
//! cuda:N) or `DFLASH_TEST_DTYPE` (float32, bfloat16) say otherwise. So the tests that compare the
//! CPU with reference vectors can do the same for a GPU.
//!
//! On the device `fake_cuda` they run as on a GPU whose operators accept or refuse their arguments
//! and return shapes without values: whatever would fail on a GPU before results are compared fails
//! here.

pub mod launches;

use std::sync::OnceLock;

use dflash_settings::Device as Asked;
use dflash_torch_sys::trace::fake_cuda_to_the_end;
use dflash_torch_sys::{CudaLibrary, load_cuda};
use tch::{Cuda, Device, Kind, Tensor};

const DEVICE: &str = "DFLASH_TEST_DEVICE";
const DTYPE: &str = "DFLASH_TEST_DTYPE";
/// The device that computes nothing.
const FAKE_CUDA: &str = "fake_cuda";

/// Relative error of bfloat16 results, which keep 8 bits. Over all reference vectors, computed on a
/// CPU, at most 1.02e-1 was measured, for the gradient of a q_norm, 8 numbers with large terms that
/// cancel; 6.4e-2 with libtorch's operations.
const BF16_BOUND: f64 = 1.5e-1;

/// A device, and the type of weights and activations on it.
#[derive(Clone, Copy, Debug)]
pub struct TestPlace {
    /// Device.
    pub device: Device,
    /// Float32 or bfloat16.
    pub kind: Kind,
    /// Whether the device is a simulated GPU, whose results have no values.
    pub is_fake_cuda: bool,
}

/// The place of this process's tests.
///
/// # Panics
/// If a variable has another value, or libtorch does not see the requested GPU: a GPU test must not
/// pass on a CPU.
pub fn place() -> TestPlace {
    static PLACE: OnceLock<TestPlace> = OnceLock::new();
    let place = *PLACE.get_or_init(|| {
        let is_fake_cuda = variable(DEVICE).as_deref() == Some(FAKE_CUDA);
        let device = if is_fake_cuda { Device::Cuda(0) } else { device() };
        TestPlace { device, kind: kind(), is_fake_cuda }
    });
    if place.is_fake_cuda {
        // Each test runs on its own thread.
        fake_cuda_to_the_end().unwrap_or_else(|error| panic!("{DEVICE}={FAKE_CUDA}: {error}"));
    }
    place
}

fn device() -> Device {
    let asked = variable(DEVICE).unwrap_or_else(|| "cpu".to_owned());
    let number = match asked.parse() {
        Ok(Asked::Cpu) => return Device::Cpu,
        Ok(Asked::Cuda(number)) => number.unwrap_or(0),
        _ => panic!("{DEVICE}={asked}: pass cpu, cuda, cuda:N or {FAKE_CUDA}"),
    };
    let library = load_cuda();
    assert!(library == CudaLibrary::Loaded, "{DEVICE}={asked}, but libtorch's CUDA: {library:?}");
    let found = if Cuda::is_available() { Cuda::device_count() } else { 0 };
    assert!((number as i64) < found, "{DEVICE}={asked}, but libtorch sees {found} GPUs");
    Device::Cuda(number)
}

fn kind() -> Kind {
    match variable(DTYPE).as_deref() {
        None | Some("float32") => Kind::Float,
        Some("bfloat16") => Kind::BFloat16,
        Some(other) => panic!("{DTYPE}={other}: pass float32 or bfloat16"),
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl TestPlace {
    /// Moves `x` there, and floating-point values to its type.
    pub fn put(self, x: &Tensor) -> Tensor {
        let x = x.to_device(self.device);
        if x.is_floating_point() { x.to_kind(self.kind) } else { x }
    }

    /// Tolerance for a result's relative error, given the tolerance `float32` in float32.
    pub fn bound(self, float32: f64) -> f64 {
        let bound = if self.kind == Kind::BFloat16 { BF16_BOUND } else { float32 };
        self.whatever_the_kind(bound)
    }

    /// The same for a result whose type the test chooses.
    pub fn whatever_the_kind(self, bound: f64) -> f64 {
        if self.is_fake_cuda { f64::INFINITY } else { bound }
    }
}

/// Asserts that a result is close to what is expected: in float32 the largest difference relative to the largest expected magnitude is at most
/// `tolerance`; in bfloat16 the norm of the difference is bounded by the place, since single numbers
/// are off by more where large terms cancel.
///
/// # Panics
/// Where it is not so, with `what` in the message.
pub fn assert_close(what: &str, actual: &Tensor, expected: &Tensor, tolerance: f64) {
    let tolerance = place().bound(tolerance);
    assert_eq!(actual.size(), expected.size(), "{what}: shape");
    let (actual, expected) = (actual.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let size = |x: &Tensor| match place().kind {
        Kind::BFloat16 => x.norm().double_value(&[]),
        _ => x.abs().max().double_value(&[]),
    };
    let difference = size(&(actual - &expected)) / size(&expected).max(1e-30);
    assert!(difference <= tolerance, "{what}: relative difference {difference:e} > {tolerance:e}");
}
