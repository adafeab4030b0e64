//! Attention in a packed row: each document attends only to itself; there is no padding.

use dflash_kernels::kernels::Kernels;
use dflash_tensor::attention_span::{AttentionPlace, AttentionSpan, causal_mask};
use dflash_tensor::flash::{self, Calls};
use dflash_tensor::ops::scored_attention;
use tch::{Kind, Tensor};

use super::blocks::latent::Latent;
use super::layer::{Attend, Projected, Recurrence};

/// Concatenated documents; keys and values come from the call itself.
#[derive(Debug)]
pub(crate) struct PackedAttention<'a> {
    /// First token of each document, then the number of tokens.
    document_starts: &'a [i64],
    calls: Calls,
}

impl<'a> PackedAttention<'a> {
    pub(crate) fn new(document_starts: &'a [i64]) -> Self {
        Self { document_starts, calls: Calls::default() }
    }

    /// All documents in one call, if the GPU kernels support it.
    fn flash(&mut self, place: AttentionPlace<'_>, projected: &Projected) -> Option<Tensor> {
        let [q, k, v] = projected.flash()?;
        let window = flash::window(place)?;
        let starts = self.document_starts;
        let sequences = self.calls.of(window, || flash::documents(starts, window, q.device()));
        Some(flash::attend(q, k, v, sequences, place.scores.scale).flatten(1, 2))
    }
}

impl Attend for PackedAttention<'_> {
    fn attend(&mut self, place: AttentionPlace<'_>, projected: &Projected) -> Tensor {
        if let Some(attended) = self.flash(place, projected) {
            return attended;
        }
        let documents: Vec<Tensor> = self
            .document_starts
            .windows(2)
            .filter(|bounds| bounds[1] > bounds[0])
            .map(|bounds| causal(&projected.narrow(bounds[0], bounds[1] - bounds[0]), place))
            .collect();
        end_to_end(&documents)
    }

    fn attend_latent(&mut self, place: AttentionPlace<'_>, latent: &Latent<'_>) -> Tensor {
        self.attend(place, &latent.expanded())
    }

    fn scan(&mut self, _layer: usize, recurrence: &dyn Recurrence, inputs_tc: &Tensor) -> Tensor {
        let zero = recurrence.zero(inputs_tc);
        let documents: Vec<Tensor> = self
            .document_starts
            .windows(2)
            .filter(|bounds| bounds[1] > bounds[0])
            .map(|bounds| {
                recurrence.run(&inputs_tc.narrow(0, bounds[0], bounds[1] - bounds[0]), &zero).0
            })
            .collect();
        end_to_end(&documents)
    }
}

fn end_to_end(documents: &[Tensor]) -> Tensor {
    match documents {
        [document] => document.shallow_clone(),
        documents => Tensor::cat(documents, 0),
    }
}

impl Projected {
    /// The tokens `start .. start + length`.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Self {
        Self {
            q_tnd: self.q_tnd.narrow(0, start, length),
            k_tmd: self.k_tmd.narrow(0, start, length),
            v_tme: self.v_tme.narrow(0, start, length),
            ..*self
        }
    }

    /// Queries, keys and values, if the GPU kernels support them.
    pub(crate) fn flash(&self) -> Option<[&Tensor; 3]> {
        let (q, k, v) = (&self.q_tnd, &self.k_tmd, &self.v_tme);
        (self.kernels == Kernels::Fast && flash::takes(q, k, v)).then_some([q, k, v])
    }
}

/// Causal self-attention of one document [T, N*E].
pub(crate) fn causal(document: &Projected, place: AttentionPlace<'_>) -> Tensor {
    let tokens = document.q_tnd.size()[0];
    let AttentionPlace { attention_span, scores, .. } = place;
    if let Some(([q, k, v], window)) = document.flash().zip(flash::window(place)) {
        let sequence = flash::one(tokens, tokens, window, q.device());
        return flash::attend(q, k, v, &sequence, scores.scale).flatten(1, 2);
    }
    let [q, k, v] = [&document.q_tnd, &document.k_tmd, &document.v_tme].map(heads_first);
    let out = if attention_span.is_all_of(tokens) {
        scored_attention(&q, &k, &v, None, true, scores, document.kernels)
    } else {
        let mask = Span { start: 0, tokens, first_key: 0, attention_span }.mask(&q);
        scored_attention(&q, &k, &v, Some(&mask), false, scores, document.kernels)
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

/// Consecutive queries and the keys in their reach.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    /// Position of the first query.
    pub(crate) start: i64,
    /// Number of queries; keys run up to the last query's position.
    pub(crate) tokens: i64,
    /// Position of the first key.
    pub(crate) first_key: i64,
    pub(crate) attention_span: AttentionSpan,
}

impl Span {
    /// Additive mask [queries, keys] with the type and device of `like`.
    pub(crate) fn mask(&self, like: &Tensor) -> Tensor {
        let options = (Kind::Int64, like.device());
        let end = self.start + self.tokens;
        let query = Tensor::arange_start(self.start, end, options);
        let key = Tensor::arange_start(self.first_key, end, options);
        causal_mask(&query, &key, self.attention_span, like.kind())
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn the_mask_hides_the_future_and_what_left_the_window() {
        let like = Tensor::zeros([1], (Kind::Float, Device::Cpu));
        let visible = |attention_span| {
            let span = Span { start: 3, tokens: 2, first_key: 1, attention_span };
            Vec::<Vec<f32>>::try_from(span.mask(&like).exp()).unwrap()
        };
        assert_eq!(visible(AttentionSpan::All), [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]);
        assert_eq!(visible(AttentionSpan::Window(2)), [[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]);
        assert_eq!(visible(AttentionSpan::Chunk(2)), [[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]);
    }
}
