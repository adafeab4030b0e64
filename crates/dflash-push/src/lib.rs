//! Publishing a drafter: which of its files serving needs, the card that tells what it is, how it was
//! trained and what was measured, and the push itself.
//!
//! A card states nothing that was not recorded: the shape is read from the drafter's own files, the
//! recipe and the data from the run that made it, the figures from reports of `dflash eval` that name
//! the very weights. What is not known is said to be so. Paths of this machine stay here.

mod card;
mod drafter;
mod error;
mod evidence;
mod gguf;
mod origin;
mod push;
mod shape;
mod weights;

pub use error::Error;
pub use push::{Outcome, Plan, push};
