//! Serves the hidden states of chosen target layers over HTTP.
