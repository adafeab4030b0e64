//! Speculative decoding, acceptance and speed measurement.
