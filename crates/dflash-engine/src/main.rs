//! The engine behind the front program: every command that needs libtorch.
fn main() {}
