//! The settings of `dflash hidden-server`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_THREADS, MOST_TOKENS, layer_ids, within};
use crate::choices::{Device, Dtype, WireDtype};

/// Each holds a connection and a prompt.
const MOST_REQUESTS: u64 = 65536;

/// Run the target and serve hidden states of chosen layers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct HiddenServerSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub. May be
    /// given without the flag.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// Layers to serve: 0 is the embedding's output, k the residual stream after k layers.
    /// The last layer's output can always be asked for. Default: five, evenly spread.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID", action = clap::ArgAction::Set, num_args = 1.., value_delimiter = ','))]
    pub target_layer_ids: Option<Vec<u32>>,
    /// Interface to listen on; 0.0.0.0 for all.
    #[cfg_attr(feature = "clap", arg(long, default_value = "127.0.0.1"))]
    pub host: String,
    /// Port to listen on; 0 for any free one.
    #[cfg_attr(feature = "clap", arg(long, default_value_t = 8000))]
    pub port: u16,
    /// File that gets the port once prompts can be taken.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub port_file: Option<PathBuf>,
    /// Where to run the target: auto, cpu, cuda or cuda:N.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value_t = Device::Auto))]
    pub device: Device,
    /// Type of weights and activations. `auto`: bfloat16 on CUDA, float32 on a CPU; there a
    /// bfloat16 checkpoint's products are multiplied in bfloat16 if the CPU can.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = Dtype::Auto))]
    pub dtype: Dtype,
    /// Type of the rows that are sent.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = WireDtype::Bf16))]
    pub wire_dtype: WireDtype,
    /// Maximum number of requests waiting or being answered; further ones get a 429.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 256))]
    pub max_queue: usize,
    /// Maximum number of tokens in one forward pass.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 2048))]
    pub max_batch_tokens: usize,
    /// Longest prompt. Default: the target's max_position_embeddings.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub max_model_len: Option<usize>,
    /// CPU threads of one operation. Default: libtorch's choice.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub threads: Option<usize>,
}

impl HiddenServerSettings {
    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        layer_ids(self.target_layer_ids.as_deref())?;
        within([
            ("max_queue", self.max_queue as u64, 1..=MOST_REQUESTS),
            ("max_batch_tokens", self.max_batch_tokens as u64, 1..=MOST_TOKENS),
            ("max_model_len", self.max_model_len.unwrap_or(1) as u64, 1..=MOST_TOKENS),
            ("threads", self.threads.unwrap_or(1) as u64, 1..=MOST_THREADS),
        ])
    }
}
