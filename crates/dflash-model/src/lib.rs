//! Target families, the DFlash draft model and its objective: single-device tensor code.
