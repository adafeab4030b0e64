//! Decoding on random models, and the commands' libraries from files to files.

mod commands;
mod decoding;
mod distributions;
mod engine;
mod grammars;
mod hybrids;
mod models;
mod side_by_side;
