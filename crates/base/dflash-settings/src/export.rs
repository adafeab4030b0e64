//! The settings of `dflash export`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, at_odds};

/// The layouts that drafters are served from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum ExportFormat {
    /// z-lab's directory: vLLM, SGLang, Transformers.
    #[serde(alias = "z-lab")]
    #[cfg_attr(feature = "clap", value(alias = "z-lab"))]
    Zlab,
    /// speculators' directory: vLLM, speculators.
    Speculators,
    /// One file: llama.cpp.
    Gguf,
}

/// Types of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum ExportDtype {
    /// bfloat16, what checkpoints hold.
    #[serde(alias = "bfloat16")]
    #[cfg_attr(feature = "clap", value(alias = "bfloat16"))]
    Bf16,
    /// float16.
    #[serde(alias = "float16")]
    #[cfg_attr(feature = "clap", value(alias = "float16"))]
    F16,
    /// float32.
    #[serde(alias = "float32")]
    #[cfg_attr(feature = "clap", value(alias = "float32"))]
    F32,
    /// 8 bits and a float16 scale per 32 weights, norms in float32; GGUF only.
    #[serde(rename = "q8_0")]
    #[cfg_attr(feature = "clap", value(name = "q8_0"))]
    Q80,
}

/// Convert a drafter to the layout and type that an engine reads, and verify it.
///
/// The drafter may itself be in any of these layouts. Features that the engine would serve wrongly
/// are refused. The export is loaded again and compared with the drafter, tensor by tensor and by a
/// forward pass; its path goes to standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ExportSettings {
    /// The drafter: a GGUF file, its directory, that of a run (its best checkpoint, or the newest
    /// if nothing was validated), RUN_DIR/latest or RUN_DIR/best, or its name OWNER/NAME on the
    /// Hub.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR|FILE|REPO"))]
    pub draft: String,
    /// Its target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// A description of the target in TOML, for an unknown family or to override what is known:
    /// names of its tensors and the constants of its norm and logits. See docs/targets.md. Default:
    /// that of the drafter's run.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub target_spec: Option<PathBuf>,
    /// Layout of the export.
    #[cfg_attr(
        feature = "clap",
        arg(long, visible_alias = "export-format", value_enum, default_value_t = ExportFormat::Zlab)
    )]
    pub format: ExportFormat,
    /// Type of the weights.
    #[cfg_attr(
        feature = "clap",
        arg(long, visible_alias = "outtype", value_enum, default_value_t = ExportDtype::Bf16)
    )]
    pub dtype: ExportDtype,
    /// The export: a file for GGUF, else a directory. It must not exist.
    #[cfg_attr(feature = "clap", arg(long, value_name = "PATH"))]
    pub output: PathBuf,
    /// Do not export a pruned vocabulary, so that the engine drafts from all tokens.
    #[cfg_attr(feature = "clap", arg(long))]
    pub full_vocabulary: bool,
    /// In z-lab's layout: export a draft that uses the input of the target's first layer or the
    /// output of its last one (layer ids 0 and n of n), for vLLM and Transformers only, because
    /// SGLang cannot return these.
    #[cfg_attr(feature = "clap", arg(long))]
    pub without_sglang: bool,
    /// Export the draft even if it was made for another target.
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_other_target: bool,
}

impl ExportSettings {
    /// # Errors
    /// A type that the layout does not support.
    pub fn check(&self) -> Result<(), Invalid> {
        match (self.format, self.dtype) {
            (ExportFormat::Zlab | ExportFormat::Speculators, ExportDtype::Q80) => {
                Err(at_odds("dtype", "q8_0 needs --format gguf"))
            }
            _ => Ok(()),
        }
    }
}
