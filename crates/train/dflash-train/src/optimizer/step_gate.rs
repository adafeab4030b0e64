//! What the device decides about a step: the host launches the step without knowing it.

use tch::{Kind, Tensor};

/// How far a step goes, and whether it goes at all; tensors of one element on the parameters' device.
#[derive(Debug)]
pub struct StepGate {
    /// The gradient is divided by it; float32.
    pub(super) divisor: Tensor,
    /// Whether nothing may change.
    skip: Tensor,
    /// 0 where nothing may change, else 1; float64.
    keep: Tensor,
}

impl StepGate {
    /// A step along the gradient over `divisor`, float64, unless `skip`, bool, is set; both `[1]`.
    pub fn new(divisor: &Tensor, skip: Tensor) -> Self {
        let keep = skip.logical_not().to_kind(Kind::Double);
        Self { divisor: divisor.to_kind(Kind::Float), skip, keep }
    }

    /// `value`, or 0 where nothing may change; float32.
    pub(crate) fn share(&self, value: f64) -> Tensor {
        (&self.keep * value).to_kind(Kind::Float)
    }

    /// `1 - value`, or 1 where nothing may change; float32.
    pub(super) fn rest(&self, value: f64) -> Tensor {
        (&self.keep * -value).g_add_scalar_(1.0).to_kind(Kind::Float)
    }

    /// 1 where nothing may change, else 0; float32.
    pub(super) fn skipped(&self) -> Tensor {
        self.skip.to_kind(Kind::Float)
    }

    /// `gradient` divided, or zeros where nothing may change: it may not be finite then.
    pub(super) fn divided(&self, gradient: &Tensor) -> Tensor {
        (gradient / &self.divisor).masked_fill_(&self.skip, 0.0)
    }
}
