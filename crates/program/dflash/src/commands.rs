//! Commands that the front program runs itself.

pub(crate) mod cpu_levels;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod prepare;
pub(crate) mod push;
pub(crate) mod recipes;
pub(crate) mod report;
pub(crate) mod shell_support;
