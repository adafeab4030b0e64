//! Target models: a family's configuration, its layers, and the passes over them.
//!
//! Single-device tensor code: nothing here knows a rank, a socket or a command line, even where a
//! target runs in parallel over several processes ([`parallel`]).
//!
//! - [`Target`] runs the verifier: hidden states of selected layers, logits, key/value cache.
//! - [`Prefill`] computes hidden states of prompts and loads only the layers needed for them.
//! - [`TargetIo`] is the part of a target that draft training uses, and [`TargetFacts`] its
//!   configuration, for targets of any family.
//!
//! Each family is a file in `families`, built from the parts in `blocks`.

mod blocks;
mod cache;
mod config;
mod embedding;
mod facts;
mod families;
mod flops;
mod head;
mod heads;
mod layer;
mod layer_ids;
mod mask_token;
mod packed;
mod packed_decoder;
mod packed_weight;
pub mod parallel;
mod parameters;
mod prefill;
mod rotary;
mod target;

#[cfg(test)]
mod fake_cuda;

pub use cache::{KvCache, SequencePart};
pub use config::{Outer, TargetConfig};
pub use facts::{
    DraftAttentionShape, DraftDefaults, HeadNumbers, NormKind, TargetFacts, TargetSpec,
};
pub use families::{DenseConfig, DenseKind, Family};
pub use flops::PrefillFlops;
pub use head::TargetIo;
pub use layer_ids::{check_layer_ids, default_layer_ids};
pub use mask_token::{MaskSource, MaskToken, TokenizerFacts, resolve_mask_token};
pub use packed_decoder::{PackedDecoder, PrunedRows};
pub use prefill::{PackedPrompts, Prefill, PrefillOptions, TokenBudget};
pub use target::{CachedOutput, Target, TargetOptions};
