//! The front program.
fn main() {}
