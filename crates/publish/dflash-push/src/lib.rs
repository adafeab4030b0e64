//! Publishing a drafter: its files, its model card, and the push itself.
//!
//! A card states only recorded facts: the shape comes from the drafter's own files, recipe and data
//! from the run that made it, results from reports of `dflash eval` for exactly these weights.
//! Unknown facts are marked as unknown. Paths of this machine are not published.

mod card;
mod drafter;
mod error;
mod evidence;
mod origin;
mod push;

pub use error::Error;
pub use push::{Outcome, Plan, push};
