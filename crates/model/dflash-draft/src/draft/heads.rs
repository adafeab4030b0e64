//! The heads, each in a file of its own.

use super::head::HeadKind;

/// Declares each head's module and lists its kind.
macro_rules! heads {
    ($($module:ident::$kind:ident,)+) => {
        $(pub(super) mod $module;)+

        /// All kinds of heads.
        pub const HEADS: &[&dyn HeadKind] = &[$(&$module::$kind),+];
    };
}

heads! {
    dflash::Dflash,
    markov::Markov,
}
