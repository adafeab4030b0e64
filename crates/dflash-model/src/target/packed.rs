//! Attention of a packed row: every document sees itself only, and no padding exists.

use tch::{Kind, Tensor};

use super::layer::{Attend, Place, Projected};
use crate::ops::attention;

/// Documents laid end to end; keys and values are those of the call itself.
#[derive(Debug)]
pub(crate) struct PackedAttention<'a> {
    /// First token of each document, and the number of tokens.
    pub(crate) document_starts: &'a [i64],
}

impl Attend for PackedAttention<'_> {
    fn attend(&mut self, place: Place, projected: &Projected) -> Tensor {
        let documents: Vec<Tensor> = self
            .document_starts
            .windows(2)
            .filter(|bounds| bounds[1] > bounds[0])
            .map(|bounds| causal(&projected.narrow(bounds[0], bounds[1] - bounds[0]), place.window))
            .collect();
        match documents.as_slice() {
            [document] => document.shallow_clone(),
            documents => Tensor::cat(documents, 0),
        }
    }
}

impl Projected {
    /// The tokens `start .. start + length`.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Self {
        Self {
            q_tnd: self.q_tnd.narrow(0, start, length),
            k_tmd: self.k_tmd.narrow(0, start, length),
            v_tmd: self.v_tmd.narrow(0, start, length),
            kernels: self.kernels,
        }
    }
}

/// Causal attention of one document over itself [T, N*D].
pub(crate) fn causal(document: &Projected, window: Option<i64>) -> Tensor {
    let tokens = document.q_tnd.size()[0];
    let [q, k, v] = [&document.q_tnd, &document.k_tmd, &document.v_tmd].map(heads_first);
    let out = match window.filter(|&window| window < tokens) {
        None => attention(&q, &k, &v, (None, true), document.kernels),
        Some(_) => {
            let span = Span { start: 0, tokens, first_key: 0, window };
            attention(&q, &k, &v, (Some(&span.mask(&q)), false), document.kernels)
        }
    };
    side_by_side(&out)
}

/// [T, heads, D] to [1, heads, T, D].
pub(crate) fn heads_first(x: &Tensor) -> Tensor {
    x.transpose(0, 1).unsqueeze(0)
}

/// [1, heads, T, D] to [T, heads*D].
pub(crate) fn side_by_side(out: &Tensor) -> Tensor {
    let size = out.size();
    out.squeeze_dim(0).transpose(0, 1).reshape([size[2], size[1] * size[3]])
}

/// Consecutive queries and the keys they may look at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    /// Position of the first query.
    pub(crate) start: i64,
    /// Number of queries; keys run up to the last query's position.
    pub(crate) tokens: i64,
    /// Position of the first key.
    pub(crate) first_key: i64,
    /// How many tokens a query sees, itself included.
    pub(crate) window: Option<i64>,
}

impl Span {
    /// An additive mask [queries, keys] of the kind and device of `like`.
    pub(crate) fn mask(&self, like: &Tensor) -> Tensor {
        let options = (Kind::Int64, like.device());
        let end = self.start + self.tokens;
        let query = Tensor::arange_start(self.start, end, options);
        let key = Tensor::arange_start(self.first_key, end, options);
        causal_mask(&query, &key, self.window, like.kind())
    }
}

/// An additive mask [queries, keys] of `kind` from their positions: a query sees the last `window`
/// tokens up to itself.
pub(crate) fn causal_mask(query: &Tensor, key: &Tensor, window: Option<i64>, kind: Kind) -> Tensor {
    let (query, key) = (query.unsqueeze(1), key.unsqueeze(0));
    let mut hidden = key.gt_tensor(&query);
    if let Some(window) = window {
        hidden = hidden.logical_or(&key.le_tensor(&(query - window)));
    }
    Tensor::zeros(hidden.size(), (kind, hidden.device())).masked_fill(&hidden, f64::NEG_INFINITY)
}

/// The masks of one call, made once for each window of the layers.
#[derive(Debug, Default)]
pub(crate) struct Masks(Vec<(Option<i64>, Tensor)>);

impl Masks {
    pub(crate) fn of(&mut self, window: Option<i64>, make: impl FnOnce() -> Tensor) -> Tensor {
        if let Some((_, mask)) = self.0.iter().find(|(known, _)| *known == window) {
            return mask.shallow_clone();
        }
        let mask = make();
        self.0.push((window, mask.shallow_clone()));
        mask
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn the_mask_hides_the_future_and_what_left_the_window() {
        let like = Tensor::zeros([1], (Kind::Float, Device::Cpu));
        let visible = |window| {
            let span = Span { start: 3, tokens: 2, first_key: 1, window };
            Vec::<Vec<f32>>::try_from(span.mask(&like).exp()).unwrap()
        };
        assert_eq!(visible(None), [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]);
        assert_eq!(visible(Some(2)), [[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]);
    }
}
