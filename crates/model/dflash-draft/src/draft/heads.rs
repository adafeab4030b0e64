//! The heads, one file each: a `mod` line and an entry in [`HEADS`].

pub(super) mod dflash;
pub(super) mod markov;

use super::head::HeadKind;

/// All types of heads.
#[rustfmt::skip]
pub const HEADS: &[&dyn HeadKind] = &[
    &dflash::Dflash,
    &markov::Markov,
];
