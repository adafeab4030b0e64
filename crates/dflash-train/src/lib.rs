//! The step loop: optimizer, schedule, checkpoints, metrics.
