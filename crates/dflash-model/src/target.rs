//! The target model: the verifier whose hidden states condition the draft.
