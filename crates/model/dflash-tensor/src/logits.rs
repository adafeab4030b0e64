//! From products with an output projection to logits.

use tch::Tensor;

/// What makes a target's logits of products with its output projection.
#[derive(Debug)]
pub struct LogitTransform {
    /// Added to the products `[V]`.
    pub bias_v: Option<Tensor>,
    /// What they are multiplied by then.
    pub scale: f64,
    /// They are squeezed into this, plus and minus, last.
    pub softcap: Option<f64>,
}

impl LogitTransform {
    /// The products as they are.
    pub fn identity() -> Self {
        Self { bias_v: None, scale: 1.0, softcap: None }
    }

    /// The logits of products [T, V].
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

    /// The same of the products with the rows `ids_v` alone.
    #[must_use]
    pub fn of_rows(&self, ids_v: &Tensor) -> Self {
        let bias_v = self.bias_v.as_ref().map(|bias_v| bias_v.index_select(0, ids_v));
        Self { bias_v, ..*self }
    }

    /// Another handle to the same.
    #[must_use]
    pub fn shared(&self) -> Self {
        Self { bias_v: self.bias_v.as_ref().map(Tensor::shallow_clone), ..*self }
    }
}
