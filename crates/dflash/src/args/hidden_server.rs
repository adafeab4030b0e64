//! The flags of `dflash hidden-server`, and those of vLLM that may follow `--`.
//!
//! People come with launch lines written for vLLM. What has a counterpart here is taken over, what
//! only tunes vLLM is passed over with a note, and what would change the result is refused.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{ArgAction, Args, Parser, ValueEnum};

/// Run the target and serve hidden states of chosen layers.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Example: dflash hidden-server Qwen3-8B --target-layer-ids 2 10 18 26 34\n\
                  Training then takes --vllm-endpoint http://localhost:8000/v1. Flags of vLLM may \
                  follow `--`.")]
pub struct HiddenServerArgs {
    /// Directory of the target model (Hugging Face layout).
    #[arg(value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// The same as a flag.
    #[arg(long = "model", value_name = "DIR", env = "DFLASH_MODEL")]
    pub model_flag: Option<PathBuf>,
    /// Layers to serve: 0 is the embedding's output, k the residual stream after k layers.
    /// The last layer's output can always be asked for. Default: five, evenly spread.
    #[arg(long, value_name = "ID", num_args = 1.., value_delimiter = ',')]
    pub target_layer_ids: Vec<u32>,
    /// Interface to listen on; 0.0.0.0 for all.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 for any free one.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// File that gets the port once prompts can be taken.
    #[arg(long, value_name = "FILE")]
    pub port_file: Option<PathBuf>,
    /// Where to run the target: cpu, cuda or cuda:N. Default: CUDA where libtorch has it.
    #[arg(long)]
    pub device: Option<String>,
    /// Type of weights and activations. `auto`: bfloat16 on CUDA, float32 on a CPU; there a
    /// bfloat16 checkpoint's products are multiplied in bfloat16 if the CPU can.
    #[arg(long, value_enum, default_value_t)]
    pub dtype: ComputeDtype,
    /// Type of the rows that are sent.
    #[arg(long, value_enum, default_value_t)]
    pub wire_dtype: WireDtype,
    /// Requests taken at a time, waiting or being answered; more are told to come back (429).
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub max_queue: usize,
    /// Tokens in one forward pass.
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = at_least_one)]
    pub max_batch_tokens: usize,
    /// Longest prompt. Default: the target's max_position_embeddings.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub max_model_len: Option<usize>,
    /// CPU threads of one operation. Default: libtorch's choice.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Flags of `vllm serve`, for launch lines written for it.
    #[arg(last = true, value_name = "VLLM_FLAGS", allow_hyphen_values = true)]
    pub vllm_flags: Vec<String>,
}

/// Type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ComputeDtype {
    /// By device.
    #[default]
    Auto,
    /// bfloat16.
    #[value(alias = "bf16")]
    Bfloat16,
    /// float32.
    #[value(alias = "f32", alias = "float")]
    Float32,
}

/// Type of the rows that are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum WireDtype {
    /// What drafts train on.
    #[default]
    Bf16,
    /// Twice the bytes, for comparisons.
    F32,
}

/// The settings of one server: flags and vLLM flags resolved, the model found.
#[derive(Debug, Clone, PartialEq)]
pub struct HiddenServerSettings {
    /// Directory of the target.
    pub model: PathBuf,
    /// Layers to serve; `None` for the default choice.
    pub target_layer_ids: Option<Vec<u32>>,
    /// See [`HiddenServerArgs::host`].
    pub host: String,
    /// See [`HiddenServerArgs::port`].
    pub port: u16,
    /// See [`HiddenServerArgs::port_file`].
    pub port_file: Option<PathBuf>,
    /// See [`HiddenServerArgs::device`].
    pub device: Option<String>,
    /// See [`HiddenServerArgs::dtype`].
    pub dtype: ComputeDtype,
    /// See [`HiddenServerArgs::wire_dtype`].
    pub wire_dtype: WireDtype,
    /// See [`HiddenServerArgs::max_queue`].
    pub max_queue: usize,
    /// See [`HiddenServerArgs::max_batch_tokens`].
    pub max_batch_tokens: usize,
    /// See [`HiddenServerArgs::max_model_len`].
    pub max_model_len: Option<usize>,
    /// See [`HiddenServerArgs::threads`].
    pub threads: Option<usize>,
    /// What to tell the user about vLLM flags that do nothing here.
    pub notes: Vec<String>,
}

/// The flags of `vllm serve` that launch lines for hidden states contain.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct VllmFlags {
    #[arg(long)]
    host: Option<String>,
    #[arg(long)]
    port: Option<u16>,
    #[arg(long, value_enum)]
    dtype: Option<ComputeDtype>,
    #[arg(long)]
    max_model_len: Option<usize>,
    #[arg(long)]
    max_num_batched_tokens: Option<usize>,
    #[arg(long)]
    tensor_parallel_size: Option<usize>,
    #[arg(long)]
    pipeline_parallel_size: Option<usize>,
    #[arg(long)]
    data_parallel_size: Option<usize>,
    #[arg(long)]
    gpu_memory_utilization: Option<f32>,
    #[arg(long)]
    max_num_seqs: Option<usize>,
    #[arg(long, action = ArgAction::SetTrue)]
    enforce_eager: bool,
    #[arg(long, action = ArgAction::SetTrue)]
    no_enable_prefix_caching: bool,
    #[arg(long, action = ArgAction::SetTrue)]
    no_enable_chunked_prefill: bool,
    #[arg(long, action = ArgAction::SetTrue)]
    trust_remote_code: bool,
}

impl HiddenServerArgs {
    /// Resolves the flags; what follows `--` wins over what precedes it.
    ///
    /// # Errors
    /// No model, a model that is no directory, a vLLM flag without a counterpart.
    pub fn resolve(self) -> anyhow::Result<HiddenServerSettings> {
        let vllm = VllmFlags::parse_after_dashes(&self.vllm_flags)?;
        let Self {
            model,
            model_flag,
            target_layer_ids,
            host,
            port,
            port_file,
            device,
            dtype,
            wire_dtype,
            max_queue,
            max_batch_tokens,
            max_model_len,
            threads,
            vllm_flags: _,
        } = self;
        Ok(HiddenServerSettings {
            model: existing_model(model.or(model_flag))?,
            target_layer_ids: Some(target_layer_ids).filter(|ids| !ids.is_empty()),
            notes: vllm.notes()?,
            host: vllm.host.unwrap_or(host),
            port: vllm.port.unwrap_or(port),
            port_file,
            device,
            dtype: vllm.dtype.unwrap_or(dtype),
            wire_dtype,
            max_queue,
            max_batch_tokens: vllm.max_num_batched_tokens.unwrap_or(max_batch_tokens).max(1),
            max_model_len: vllm.max_model_len.or(max_model_len),
            threads,
        })
    }
}

impl VllmFlags {
    fn parse_after_dashes(flags: &[String]) -> anyhow::Result<Self> {
        Self::try_parse_from(flags)
            .map_err(|error| {
                let text = error.to_string();
                let reason = text.lines().next().unwrap_or_default();
                anyhow::anyhow!("{}", reason.trim_start_matches("error: ").to_owned())
            })
            .context(
                "the flags after `--` are read as vLLM's, and one of them has no counterpart here; \
             leave it out (see `dflash hidden-server --help`)",
            )
    }

    /// What is passed over, one line each.
    fn notes(&self) -> anyhow::Result<Vec<String>> {
        for (flag, size) in [
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
        ] {
            if let Some(size) = size.filter(|&size| size != 1) {
                bail!("{flag} {size}: this server runs the target on one device; leave it out");
            }
        }
        let mut notes = Vec::new();
        if let Some(replicas) = self.data_parallel_size.filter(|&size| size > 1) {
            notes.push(format!(
                "--data-parallel-size {replicas}: this is one replica; start the others on other \
                 ports and give training all endpoints, separated by commas"
            ));
        }
        let idle = [
            ("--gpu-memory-utilization", self.gpu_memory_utilization.is_some()),
            ("--max-num-seqs", self.max_num_seqs.is_some()),
            ("--trust-remote-code", self.trust_remote_code),
        ];
        for (flag, _) in idle.into_iter().filter(|(_, given)| *given) {
            notes.push(format!("{flag} has no effect here"));
        }
        // Eager mode and whole, uncached prefills are how this server works anyway.
        let _ = (self.enforce_eager, self.no_enable_prefix_caching, self.no_enable_chunked_prefill);
        Ok(notes)
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}

fn existing_model(model: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let Some(model) = model else {
        bail!(
            "no target model: pass its directory, as in `dflash hidden-server DIR \
             --target-layer-ids ...`, or with --model, or in DFLASH_MODEL"
        )
    };
    if model.is_dir() {
        return Ok(model);
    }
    let path = model.display();
    if looks_like_hub_id(&model) {
        bail!(
            "{path} is not a directory here; a model on the Hub has to be downloaded first, for \
             instance with `hf download {path} --local-dir DIR`, then pass DIR"
        );
    }
    bail!("{path} is not a directory; pass the one that holds the target's config.json")
}

/// `owner/name`, as models on the Hub are called.
fn looks_like_hub_id(path: &Path) -> bool {
    let parts: Vec<_> = path.components().collect();
    let plain = |part: &std::path::Component| matches!(part, std::path::Component::Normal(_));
    parts.len() == 2 && parts.iter().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: HiddenServerArgs,
    }

    /// `DIR` in the line stands for an existing directory.
    fn resolve(line: &str) -> anyhow::Result<HiddenServerSettings> {
        let dir = tempfile::tempdir().unwrap();
        let line = line.replace("DIR", dir.path().to_str().unwrap());
        let words = std::iter::once("hidden-server").chain(line.split_whitespace());
        Cli::try_parse_from(words)?.args.resolve()
    }

    fn refusal(line: &str) -> String {
        format!("{:#}", resolve(line).unwrap_err())
    }

    #[test]
    fn the_guide_s_line_works_as_written() {
        let settings = resolve(
            "DIR --target-layer-ids 2 10 18 26 34 -- --port 8001 --gpu-memory-utilization 0.9 \
             --tensor-parallel-size 1 --data-parallel-size 2",
        )
        .unwrap();
        assert_eq!(settings.target_layer_ids, Some(vec![2, 10, 18, 26, 34]));
        assert_eq!(settings.port, 8001);
        assert_eq!(settings.notes.len(), 2);
        assert!(settings.notes[0].contains("one replica"), "{:?}", settings.notes);
    }

    #[test]
    fn ids_come_apart_or_with_commas_and_the_model_as_flag() {
        let settings = resolve("--target-layer-ids 2,3,5 --model DIR --port 0").unwrap();
        assert_eq!(settings.target_layer_ids, Some(vec![2, 3, 5]));
        assert_eq!((settings.port, settings.host.as_str()), (0, "127.0.0.1"));
        assert_eq!(resolve("DIR").unwrap().target_layer_ids, None);
    }

    #[test]
    fn a_missing_model_says_what_to_pass() {
        assert!(refusal("--target-layer-ids 2 10").contains("DFLASH_MODEL"));
        assert!(
            refusal("Qwen/Qwen3-8B --target-layer-ids 2").contains("hf download Qwen/Qwen3-8B")
        );
        assert!(refusal("/no/such/dir").contains("/no/such/dir is not a directory"));
    }

    #[test]
    fn vllm_flags_without_a_counterpart_are_refused_by_name() {
        assert!(refusal("DIR -- --tensor-parallel-size 2").contains("--tensor-parallel-size 2"));
        let text = refusal("DIR -- --quantization fp8");
        assert!(text.contains("--quantization") && text.contains("leave it out"), "{text}");
        let text = refusal("DIR -- --port many");
        assert!(text.contains("many") && text.contains("--port"), "{text}");
    }

    #[test]
    fn vllm_flags_with_a_counterpart_win() {
        let settings = resolve(
            "DIR --port 1 --dtype float32 -- --port 2 --dtype bfloat16 --max-model-len 512 \
             --max-num-batched-tokens 1024 --enforce-eager --no-enable-prefix-caching",
        )
        .unwrap();
        assert_eq!((settings.port, settings.dtype), (2, ComputeDtype::Bfloat16));
        assert_eq!((settings.max_model_len, settings.max_batch_tokens), (Some(512), 1024));
        assert!(settings.notes.is_empty());
    }

    #[test]
    fn limits_are_at_least_one() {
        assert!(refusal("DIR --max-queue 0").contains("at least 1"));
        assert!(refusal("DIR --threads x").contains("invalid digit"));
    }
}
