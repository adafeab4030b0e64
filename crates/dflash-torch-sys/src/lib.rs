//! The C++ that tch does not reach: c10d store and gloo, loading of CUDA libraries.
