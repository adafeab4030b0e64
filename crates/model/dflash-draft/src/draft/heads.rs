//! The heads, each in a file of its own: a `mod` line and a line in [`HEADS`].

pub(super) mod dflash;
pub(super) mod markov;

use super::head::HeadKind;

/// All kinds of heads.
#[rustfmt::skip]
pub const HEADS: &[&dyn HeadKind] = &[
    &dflash::Dflash,
    &markov::Markov,
];
