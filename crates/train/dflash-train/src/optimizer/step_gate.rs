//! The device's decision about a step, which the host launches without knowing it.

use tch::{Kind, Tensor};

/// Whether to take a step and how to scale it: tensors of one element on the parameters' device.
#[derive(Debug)]
pub struct StepGate {
    /// Divisor of the gradient; float32.
    pub(super) divisor: Tensor,
    /// Whether to change nothing.
    skip: Tensor,
    /// 0 if nothing may change, otherwise 1; float64.
    keep: Tensor,
}

impl StepGate {
    /// A step with the gradient divided by `divisor` (float64 `[1]`), unless `skip` (bool `[1]`).
    pub fn new(divisor: &Tensor, skip: Tensor) -> Self {
        let keep = skip.logical_not().to_kind(Kind::Double);
        Self { divisor: divisor.to_kind(Kind::Float), skip, keep }
    }

    /// `value`, or 0 if nothing may change; float32.
    pub(crate) fn share(&self, value: f64) -> Tensor {
        (&self.keep * value).to_kind(Kind::Float)
    }

    /// `1 - value`, or 1 if nothing may change; float32.
    pub(super) fn rest(&self, value: f64) -> Tensor {
        (&self.keep * -value).g_add_scalar_(1.0).to_kind(Kind::Float)
    }

    /// 1 if nothing may change, otherwise 0; float32.
    pub(super) fn skipped(&self) -> Tensor {
        self.skip.to_kind(Kind::Float)
    }

    /// The divided gradient, or zeros if nothing may change, since it may not be finite then.
    pub(super) fn divided(&self, gradient: &Tensor) -> Tensor {
        (gradient / &self.divisor).masked_fill_(&self.skip, 0.0)
    }
}
