//! What the front program runs itself.

pub(crate) mod eval;
pub(crate) mod prepare;
pub(crate) mod report;
