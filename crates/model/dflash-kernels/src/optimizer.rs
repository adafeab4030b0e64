//! libtorch's fused AdamW, one pass per buffer, controlled by scalars that stay on the device.

use dflash_torch_sys::ffi::{self, Failure, RawTensor};
use dflash_torch_sys::{Error, trace};
use tch::{Kind, Tensor};

/// A parameter buffer with its optimizer state; all float32, contiguous and of equal length.
#[derive(Debug)]
pub struct AdamWBuffer {
    /// Updated in place.
    pub parameters: Tensor,
    /// Divided in place by [`Steering::divisor`].
    pub gradient: Tensor,
    /// Mean of the divided gradients.
    pub mean: Tensor,
    /// Mean of their squares.
    pub variance: Tensor,
}

/// Control scalars of a step, each a one-element float32 tensor on the parameters' device.
#[derive(Clone, Copy, Debug)]
pub struct Steering<'a> {
    /// Step count including this step, for bias correction.
    pub steps: &'a Tensor,
    /// Divisor of the gradient.
    pub divisor: &'a Tensor,
    /// 1 to skip the step, else 0.
    pub skip: &'a Tensor,
}

/// Constants of a step, laid out as in cpp/optimizer.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FusedAdamW {
    /// Learning rate.
    pub rate: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Decoupled weight decay; each step multiplies the parameters by 1 - rate * weight_decay.
    pub weight_decay: f64,
    /// Added to the root of the corrected variance.
    pub epsilon: f64,
}

const OPERATION: &str = "fused AdamW";
/// Elements per launch of libtorch's kernel: 320 blocks of 65,536.
const OF_A_LAUNCH: usize = 320 << 16;

type Handles = *const *const RawTensor;

unsafe extern "C" {
    fn dflash_fused_adamw(
        parameters: Handles,
        gradients: Handles,
        means: Handles,
        variances: Handles,
        count: usize,
        steps: *const RawTensor,
        divisor: *const RawTensor,
        skip: *const RawTensor,
        step: *const FusedAdamW,
    ) -> Failure;
}

impl AdamWBuffer {
    /// The kernels take the length from the parameters and read memory as contiguous float32.
    fn check(&self) -> Result<(), Error> {
        let Self { parameters, gradient, mean, variance } = self;
        let is_sound = |part: &&Tensor| {
            part.kind() == Kind::Float
                && part.is_contiguous()
                && part.size() == parameters.size()
                && part.device() == parameters.device()
        };
        match [parameters, gradient, mean, variance].into_iter().find(|part| !is_sound(part)) {
            None => Ok(()),
            Some(part) => Err(Error::Torch {
                operation: OPERATION,
                message: format!(
                    "{} together with parameters that are {}",
                    about(part),
                    about(parameters)
                ),
            }),
        }
    }
}

/// Updates all `buffers`, unless `steering` skips the step. The host does not wait.
///
/// # Errors
/// Buffers that violate [`AdamWBuffer`]'s layout, or libtorch's error.
pub fn fused_adamw(
    buffers: &[AdamWBuffer],
    steering: Steering<'_>,
    step: FusedAdamW,
) -> Result<(), Error> {
    buffers.iter().try_for_each(AdamWBuffer::check)?;
    let Steering { steps, divisor, skip } = steering;
    if trace::is_fake_cuda() {
        note(buffers, steering);
        return Ok(());
    }
    let handles = |part: fn(&AdamWBuffer) -> &Tensor| -> Vec<*const RawTensor> {
        buffers.iter().map(|buffer| raw(part(buffer))).collect()
    };
    let parameters = handles(|buffer| &buffer.parameters);
    let gradients = handles(|buffer| &buffer.gradient);
    let means = handles(|buffer| &buffer.mean);
    let variances = handles(|buffer| &buffer.variance);
    // SAFETY: live tensors, in lists of equal length that outlive the call.
    ffi::checked(OPERATION, unsafe {
        dflash_fused_adamw(
            parameters.as_ptr(),
            gradients.as_ptr(),
            means.as_ptr(),
            variances.as_ptr(),
            buffers.len(),
            raw(steps),
            raw(divisor),
            raw(skip),
            &step,
        )
    })
}

fn about(tensor: &Tensor) -> String {
    format!("{:?} numbers {:?} on {:?}", tensor.size(), tensor.kind(), tensor.device())
}

fn note(buffers: &[AdamWBuffer], Steering { steps, divisor, skip }: Steering<'_>) {
    let changed: Vec<&Tensor> = buffers
        .iter()
        .flat_map(|buffer| [&buffer.parameters, &buffer.gradient, &buffer.mean, &buffer.variance])
        .collect();
    let read: Vec<&Tensor> = changed.iter().copied().chain([steps, divisor, skip]).collect();
    let numbers =
        buffers.iter().map(|buffer| buffer.parameters.numel().div_ceil(OF_A_LAUNCH) as i64);
    trace::own_kernels(OPERATION, numbers.sum(), &read, &changed);
}

fn raw(tensor: &Tensor) -> *const RawTensor {
    tensor.as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    const STEP: FusedAdamW =
        FusedAdamW { rate: 0.1, beta1: 0.9, beta2: 0.99, weight_decay: 0.5, epsilon: 1e-8 };

    fn buffer(parameters: &[f32], gradient: &[f32]) -> AdamWBuffer {
        let parameters = Tensor::from_slice(parameters);
        let zeros = || parameters.zeros_like();
        let (mean, variance) = (zeros(), zeros());
        AdamWBuffer { gradient: Tensor::from_slice(gradient), mean, variance, parameters }
    }

    fn take(buffers: &[AdamWBuffer], steps: f64, divisor: f64, skip: f64) {
        let scalar = |value: f64| Tensor::full([1], value, (Kind::Float, Device::Cpu));
        let (steps, divisor, skip) = (scalar(steps), scalar(divisor), scalar(skip));
        let steering = Steering { steps: &steps, divisor: &divisor, skip: &skip };
        fused_adamw(buffers, steering, STEP).unwrap();
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor).unwrap()
    }

    /// Against the formula, in float64.
    #[test]
    fn gradients_are_divided_and_weights_decay_apart_from_them() {
        // (weight, divided gradient), each in its own buffer
        let cases = [(1.0, 1.0), (-2.0, 0.125), (0.25, -2.0)];
        let buffers = cases.map(|(weight, _)| buffer(&[weight as f32; 5], &[0.0; 5]));
        for step in [1.0, 2.0] {
            for (buffer, (_, gradient)) in buffers.iter().zip(cases) {
                let _ = buffer.gradient.shallow_clone().fill_(4.0 * gradient);
            }
            take(&buffers, step, 4.0, 0.0);
        }
        for (buffer, (mut weight, gradient)) in buffers.iter().zip(cases) {
            let (mut mean, mut variance) = (0.0, 0.0);
            for step in [1, 2] {
                weight *= 1.0 - 0.1 * 0.5;
                mean = 0.9 * mean + 0.1 * gradient;
                variance = 0.99 * variance + 0.01 * gradient * gradient;
                let root = (variance / (1.0 - 0.99f64.powi(step))).sqrt();
                weight -= 0.1 * (mean / (1.0 - 0.9f64.powi(step))) / (root + 1e-8);
            }
            let AdamWBuffer { parameters, gradient: divided, mean: means, variance: squares } =
                buffer;
            for (found, expected) in
                [(parameters, weight), (divided, gradient), (means, mean), (squares, variance)]
            {
                let found = values(found);
                let close = |value: &f32| (f64::from(*value) - expected).abs() < 1e-6;
                assert!(found.iter().all(close), "{found:?}, expected {expected}");
            }
        }
    }

    #[test]
    fn a_step_to_skip_changes_nothing() {
        let buffers = [buffer(&[1.0, -2.0], &[f32::NAN, 0.5])];
        take(&buffers, 1.0, f64::NAN, 1.0);
        let AdamWBuffer { parameters, gradient, mean, variance } = &buffers[0];
        assert_eq!(values(parameters), [1.0, -2.0]);
        assert_eq!(values(gradient)[1], 0.5);
        assert_eq!([values(mean), values(variance)].concat(), [0.0; 4]);
    }

    #[test]
    fn buffers_of_other_lengths_are_refused() {
        let odd =
            AdamWBuffer { gradient: Tensor::from_slice(&[1.0f32; 3]), ..buffer(&[1.0], &[1.0]) };
        let one = Tensor::ones([1], (Kind::Float, Device::Cpu));
        let steering = Steering { steps: &one, divisor: &one, skip: &one };
        let refused = fused_adamw(&[odd], steering, STEP).unwrap_err().to_string();
        assert!(refused.starts_with("fused AdamW: "), "{refused}");
        assert!(refused.contains("[3]") && refused.contains("[1]"), "{refused}");
    }
}
