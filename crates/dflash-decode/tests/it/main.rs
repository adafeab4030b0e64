//! Decoding on random models, and the commands' libraries from files to files.

mod commands;
mod decoding;
mod engine;
mod hybrids;
mod models;
mod side_by_side;
