//! Converts LM-head outputs to logits.

use tch::Tensor;

/// Transform (bias, scale, soft cap) from LM-head outputs to target logits.
#[derive(Debug)]
pub struct LogitTransform {
    /// Added first, `[V]`.
    pub bias_v: Option<Tensor>,
    /// Multiplied in second.
    pub scale: f64,
    /// Soft cap c, applied last: `c * tanh(x / c)`.
    pub softcap: Option<f64>,
}

impl LogitTransform {
    /// No transform.
    pub fn identity() -> Self {
        Self { bias_v: None, scale: 1.0, softcap: None }
    }

    /// The logits of LM-head outputs [T, V].
    pub fn apply(&self, products_tv: Tensor) -> Tensor {
        let mut logits_tv = products_tv;
        if let Some(bias_v) = &self.bias_v {
            logits_tv += bias_v.to_kind(logits_tv.kind());
        }
        if self.scale != 1.0 {
            logits_tv *= self.scale;
        }
        match self.softcap {
            Some(cap) => (logits_tv / cap).tanh() * cap,
            None => logits_tv,
        }
    }

    /// The transform restricted to the vocabulary rows `ids_v`.
    #[must_use]
    pub fn of_rows(&self, ids_v: &Tensor) -> Self {
        let bias_v = self.bias_v.as_ref().map(|bias_v| bias_v.index_select(0, ids_v));
        Self { bias_v, ..*self }
    }

    /// A shallow clone.
    #[must_use]
    pub fn shared(&self) -> Self {
        Self { bias_v: self.bias_v.as_ref().map(Tensor::shallow_clone), ..*self }
    }
}
