//! What the front program runs itself.

pub(crate) mod prepare;
pub(crate) mod push;
pub(crate) mod report;
