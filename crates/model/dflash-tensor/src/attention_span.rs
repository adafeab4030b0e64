//! Attention spans (full, sliding window, chunked) and their masks.

use tch::{Kind, Tensor};

use crate::ops::Scores;

/// How far back a token attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionSpan {
    /// Full causal attention.
    All,
    /// Sliding window: the last N tokens, including the token itself.
    Window(i64),
    /// Chunked: back to the last position that is a multiple of N.
    Chunk(i64),
}

impl From<Option<i64>> for AttentionSpan {
    fn from(window: Option<i64>) -> Self {
        window.map_or(Self::All, Self::Window)
    }
}

impl AttentionSpan {
    /// The first position that the token at `position` attends to.
    pub fn first_key(self, position: i64) -> i64 {
        match self {
            Self::All => 0,
            Self::Window(window) => (position + 1 - window).max(0),
            Self::Chunk(chunk) => position / chunk * chunk,
        }
    }

    /// Whether this span is plain causal attention for a sequence of `tokens` tokens.
    pub fn is_all_of(self, tokens: i64) -> bool {
        match self {
            Self::All => true,
            Self::Window(tokens_seen) | Self::Chunk(tokens_seen) => tokens_seen >= tokens,
        }
    }

    /// The window size, if this is a sliding window.
    pub fn window(self) -> Option<i64> {
        if let Self::Window(window) = self { Some(window) } else { None }
    }
}

/// The layer that calls attention, with its span and its score function.
#[derive(Debug, Clone, Copy)]
pub struct AttentionPlace<'a> {
    /// Index of the layer that owns the keys and values.
    pub layer: usize,
    /// How far back the layer's queries attend.
    pub attention_span: AttentionSpan,
    /// How query-key scores are computed.
    pub scores: Scores<'a>,
}

/// Additive mask [queries, keys] of `kind`, from positions: causal, limited to `attention_span`.
pub fn causal_mask(
    query: &Tensor,
    key: &Tensor,
    attention_span: AttentionSpan,
    kind: Kind,
) -> Tensor {
    let (query, key) = (query.unsqueeze(1), key.unsqueeze(0));
    let mut hidden = key.gt_tensor(&query);
    match attention_span {
        AttentionSpan::All => {}
        AttentionSpan::Window(window) => {
            hidden = hidden.logical_or(&key.le_tensor(&(query - window)))
        }
        AttentionSpan::Chunk(chunk) => {
            let first = query.divide_scalar_mode(chunk, "floor") * chunk;
            hidden = hidden.logical_or(&key.lt_tensor(&first));
        }
    }
    Tensor::zeros(hidden.size(), (kind, hidden.device())).masked_fill(&hidden, f64::NEG_INFINITY)
}

/// Masks of one forward pass, cached per attention span.
#[derive(Debug, Default)]
pub struct Masks(Vec<(AttentionSpan, Tensor)>);

impl Masks {
    /// Returns the mask for `attention_span`, building it with `make` on first use.
    pub fn of(&mut self, attention_span: AttentionSpan, make: impl FnOnce() -> Tensor) -> Tensor {
        if let Some((_, mask)) = self.0.iter().find(|(known, _)| *known == attention_span) {
            return mask.shallow_clone();
        }
        let mask = make();
        self.0.push((attention_span, mask.shallow_clone()));
        mask
    }
}
