//! Building blocks of layers. They are configured by choices and never ask for a family's name.

pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod experts;
pub(crate) mod feed_forward;
pub(crate) mod gated_attention;
pub(crate) mod latent;
pub(crate) mod pre_norm;
