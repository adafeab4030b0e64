//! How far back tokens see, and the masks that say so.

use tch::{Kind, Tensor};

use crate::ops::Scores;

/// How far back a token sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionSpan {
    /// To the first token.
    All,
    /// The last so many tokens, itself included.
    Window(i64),
    /// Back to the last position that this divides.
    Chunk(i64),
}

impl From<Option<i64>> for AttentionSpan {
    fn from(window: Option<i64>) -> Self {
        window.map_or(Self::All, Self::Window)
    }
}

impl AttentionSpan {
    /// The first position that the token at `position` sees.
    pub fn first_key(self, position: i64) -> i64 {
        match self {
            Self::All => 0,
            Self::Window(window) => (position + 1 - window).max(0),
            Self::Chunk(chunk) => position / chunk * chunk,
        }
    }

    /// Whether every token of so many, counted from position 0, sees all before it.
    pub fn is_all_of(self, tokens: i64) -> bool {
        match self {
            Self::All => true,
            Self::Window(tokens_seen) | Self::Chunk(tokens_seen) => tokens_seen >= tokens,
        }
    }

    /// The window, if it is one.
    pub fn window(self) -> Option<i64> {
        if let Self::Window(window) = self { Some(window) } else { None }
    }
}

/// Which layer asks for attention, how far back it sees, and how it scores.
#[derive(Debug, Clone, Copy)]
pub struct AttentionPlace<'a> {
    /// The layer whose keys and values these are.
    pub layer: usize,
    /// How far back its queries see.
    pub attention_span: AttentionSpan,
    /// How it scores a query and a key.
    pub scores: Scores<'a>,
}

/// An additive mask [queries, keys] of `kind` from their positions: a query sees as far back as
/// `attention_span` says, up to itself.
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

/// The masks of one call, made once for each attention span of the layers.
#[derive(Debug, Default)]
pub struct Masks(Vec<(AttentionSpan, Tensor)>);

impl Masks {
    /// That of `attention_span`, which `make` makes where it is asked for first.
    pub fn of(&mut self, attention_span: AttentionSpan, make: impl FnOnce() -> Tensor) -> Tensor {
        if let Some((_, mask)) = self.0.iter().find(|(known, _)| *known == attention_span) {
            return mask.shallow_clone();
        }
        let mask = make();
        self.0.push((attention_span, mask.shallow_clone()));
        mask
    }
}
