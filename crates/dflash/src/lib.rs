//! The front program: what the user types, and the search for libtorch.
