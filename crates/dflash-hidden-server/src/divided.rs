//! A target over several processes, and how they reach each other.
//!
//! Rank 0 takes the prompts. It tells all ranks what comes ([`job`]), runs the first layers and sends
//! the residual stream on ([`link`]); captured states go from each stage straight back to it. Ranks of
//! one stage sum their products twice a layer ([`sums`]). What a rank computes is the model's:
//! [`dflash_model::target::divided`]. Shapes: `t` tokens, `h` hidden.

mod job;
mod lead;
mod link;
mod peers;
mod stage;
mod sums;

pub(crate) use self::lead::{InFlight, Lead};
pub(crate) use self::peers::Peers;
pub(crate) use self::stage::Stage;
