//! The DFlash draft model and its training objective.
//!
//! Single-device tensor code: nothing here knows a rank, a socket or a command line. Shape suffixes
//! are those of `dflash-tensor`.
//!
//! - [`Draft`] is the drafter: configuration, weights, training and decoding passes.
//! - [`attention`] lets blocks attend to their context and themselves without a full mask.
//! - [`objective`] turns hidden states into loss and gradient without a full logits tensor.
//! - [`flops`] counts the arithmetic of a row.

// Lets test cases shared by unit and integration tests name this crate.
#[cfg(test)]
extern crate self as dflash_draft;

pub mod attention;
mod draft;
pub mod flops;
pub mod objective;
mod rope;

pub use dflash_formats::RopeScaling;
pub use draft::{
    AuxiliaryLoss, BiasViews, BlockShape, Choose, ContextCache, ContextPart, Draft, DraftConfig,
    DraftLayout, DraftViews, Fresh, HEADS, Head, HeadChunk, HeadConfig, HeadFields, HeadKind,
    HeadStart, HeadViews, Keep, LayerKind, LayerViews, LmHead, LoadedDraft, MetricSums,
    PackedDecoder, PackedInput, Parameter, ParameterSpec, ProposalBlock, Role, Saved, Verifier,
    check_head, fresh_head, loss_of_guesses, plan_blocks, unservable,
};
