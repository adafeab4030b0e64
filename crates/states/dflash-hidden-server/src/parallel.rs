//! A target on several processes, and how they communicate.
//!
//! Rank 0 takes the prompts and broadcasts each job ([`job`]: tokens, where documents begin,
//! auxiliary layers) to all ranks, so that every rank knows which tensors follow. It runs the first
//! layers and sends the residual stream on ([`link`]); each stage sends its auxiliary hidden states
//! straight back to rank 0. Ranks of one stage sum their products twice per layer ([`sums`]).
//! [`dflash_target::parallel`] is what a rank computes; it knows nothing of processes and
//! sums through a trait that this crate implements.
//!
//! A link between two ranks is a group of two in which the first broadcasts, so the existing
//! collectives suffice. Receives of answers are posted before a job is broadcast, and sends are
//! awaited two jobs later, so stages cannot deadlock. A rank that runs out of memory in the middle
//! of a pass still contributes zeros to its stage's sums, and then the whole stage drops the job.
//! Waiting for the next job has no timeout; a dead rank is noticed by its connections and by the
//! launcher.
//!
//! Shapes: `t` tokens, `h` hidden.

mod job;
mod lead;
mod link;
mod peers;
mod stage;
mod sums;

pub(crate) use self::lead::{InFlight, Lead};
pub(crate) use self::peers::Peers;
pub(crate) use self::stage::Stage;
