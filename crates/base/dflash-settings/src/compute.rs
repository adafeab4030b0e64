//! Precision and memory of draft training.

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::Invalid;
use crate::choices::{Dtype, MatmulPrecision};

/// Precision and memory.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ComputeSettings {
    /// Type of weights and activations in forward and backward; master weights, gradients and the
    /// optimizer's state are float32 in any case. auto: float32 on a CPU, bfloat16 on a GPU.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = Dtype::Auto))]
    // The resolved type is recorded and compared.
    #[setting(free)]
    pub compute_dtype: Dtype,
    /// Keep only the layers' inputs for the backward pass and recompute the rest there.
    #[cfg_attr(feature = "clap", arg(long))]
    // Gradients are bitwise equal.
    #[setting(free)]
    pub recompute: bool,
    /// What the ranks split (ZeRO stage): 0 nothing, 1 the master weights and the optimizer state.
    #[cfg_attr(
        feature = "clap",
        arg(long, hide = true, value_name = "STAGE", default_value_t = 1)
    )]
    // Results are bitwise equal.
    #[setting(free)]
    pub zero: u8,
    /// How float32 matrices are multiplied on the CPU; bfloat16 is several times faster if the
    /// processor has instructions for it (AMX).
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_enum, default_value_t = MatmulPrecision::Float32))]
    #[setting(compared)]
    pub matmul_precision: MatmulPrecision,
}

impl ComputeSettings {
    /// Whether the ranks split master weights and the optimizer's state.
    pub fn splits_state(&self) -> bool {
        self.zero > 0
    }

    /// # Errors
    /// An unknown ZeRO stage.
    pub fn check(&self) -> Result<(), Invalid> {
        if self.zero > 1 {
            return Err(Invalid::new("zero", self.zero, "the stages are 0 and 1"));
        }
        Ok(())
    }
}
