//! Command lines of `dflash hidden-server` that were written for vLLM: a target without a flag, and
//! vLLM's own flags after `--`. Flags with a counterpart are translated, flags that only tune vLLM
//! are ignored with a note, and flags that would change the result are refused.

use std::path::{Path, PathBuf};

use clap::{ArgAction, ArgMatches, Parser};
use dflash_settings::Dtype;
use serde_json::Value;

use super::layers::{Level, Setting};
use crate::cli::{RUN_FILE, VLLM_FLAGS};
use crate::error::Error;

/// The flags of `vllm serve` that launch lines for hidden states contain.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct VllmFlags {
    #[arg(long)]
    host: Option<String>,
    #[arg(long)]
    port: Option<u16>,
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
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

/// Whether a positional argument is a run file; otherwise it is the target.
pub(super) fn is_run_file(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "toml")
}

/// The settings given without our own flags, in ascending precedence.
pub(super) fn line(matches: &ArgMatches, notes: &mut Vec<String>) -> Result<Vec<Setting>, Error> {
    let target = matches.get_one::<PathBuf>(RUN_FILE).filter(|path| !is_run_file(path));
    let words = matches.get_many::<String>(VLLM_FLAGS).unwrap_or_default();
    let flags = VllmFlags::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        let reason = text.lines().next().unwrap_or_default();
        Error::VllmFlags { reason: reason.trim_start_matches("error: ").to_owned() }
    })?;
    flags.note(notes);
    let values = [
        ("target", target.map(|target| target.to_string_lossy().into())),
        ("host", flags.host.map(Value::from)),
        ("port", flags.port.map(Value::from)),
        ("dtype", flags.dtype.and_then(|dtype| serde_json::to_value(dtype).ok())),
        ("max_model_len", flags.max_model_len.map(Value::from)),
        ("max_batch_tokens", flags.max_num_batched_tokens.map(Value::from)),
        ("tensor_parallel_size", flags.tensor_parallel_size.map(Value::from)),
        ("pipeline", flags.pipeline_parallel_size.map(Value::from)),
    ];
    let setting = |(key, value): (&str, Option<Value>)| {
        Some(Setting { level: Level::CommandLine, key: key.into(), value: value?, place: None })
    };
    Ok(values.into_iter().filter_map(setting).collect())
}

impl VllmFlags {
    /// Notes the flags that are ignored.
    fn note(&self, notes: &mut Vec<String>) {
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
        let idle = idle.into_iter().filter(|(_, given)| *given);
        notes.extend(idle.map(|(flag, _)| format!("{flag} has no effect here")));
        // This server always runs eagerly, with whole, uncached prefills.
        let _ = (self.enforce_eager, self.no_enable_prefix_caching, self.no_enable_chunked_prefill);
    }
}

#[cfg(test)]
mod tests {
    use dflash_settings::HiddenServerSettings;

    use super::*;
    use crate::cli::Command;
    use crate::command_line::{Refusal, parse};

    fn resolve(line: &str) -> Result<(HiddenServerSettings, Vec<String>), String> {
        let line = format!("dflash hidden-server {line}");
        match parse(line.split_whitespace().map(Into::into).collect()) {
            Ok((line, _)) => match line.cli.command {
                Command::HiddenServer(settings) => Ok((settings, line.notes)),
                other => panic!("{other:?}"),
            },
            Err(Refusal::Usage(error)) => Err(error.to_string()),
            Err(Refusal::Fault(error)) => Err(error.to_string()),
        }
    }

    #[test]
    fn the_guide_s_line_works_as_written() {
        let line = "Qwen3-8B --target-layer-ids 2 10 18 26 34 -- --port 8001 \
                    --gpu-memory-utilization 0.9 --tensor-parallel-size 1 --data-parallel-size 2";
        let (settings, notes) = resolve(line).unwrap();
        assert_eq!(settings.target, "Qwen3-8B");
        assert_eq!(settings.target_layer_ids, Some(vec![2, 10, 18, 26, 34]));
        assert_eq!(settings.port, 8001);
        assert_eq!(notes.len(), 2);
        assert!(notes[0].contains("one replica"), "{notes:?}");
    }

    #[test]
    fn ids_come_apart_or_with_commas_and_the_target_as_flag() {
        let (settings, _) = resolve("--target-layer-ids 2,3,5 --model m --port 0").unwrap();
        assert_eq!(settings.target_layer_ids, Some(vec![2, 3, 5]));
        assert_eq!((settings.port, settings.host.as_str()), (0, "127.0.0.1"));
        assert_eq!(resolve("m").unwrap().0.target_layer_ids, None);
        assert!(resolve("--target-layer-ids 2 10").unwrap_err().contains("--target <DIR|REPO>"));
    }

    #[test]
    fn vllm_flags_without_a_counterpart_are_refused_by_name() {
        let refusal = |line| resolve(line).unwrap_err();
        let (settings, _) =
            resolve("m -- --tensor-parallel-size 2 --pipeline-parallel-size 3").unwrap();
        assert_eq!((settings.parallel.tensor_parallel_size, settings.parallel.pipeline), (2, 3));
        let text = refusal("m -- --quantization fp8");
        assert!(text.contains("--quantization") && text.contains("remove it"), "{text}");
        let text = refusal("m -- --port many");
        assert!(text.contains("many") && text.contains("--port"), "{text}");
    }

    #[test]
    fn vllm_flags_with_a_counterpart_win() {
        let line = "m --port 1 --dtype float32 -- --port 2 --dtype bfloat16 --max-model-len 512 \
                    --max-num-batched-tokens 1024 --enforce-eager --no-enable-prefix-caching";
        let (settings, notes) = resolve(line).unwrap();
        assert_eq!((settings.port, settings.dtype), (2, Dtype::Bfloat16));
        assert_eq!((settings.max_model_len, settings.max_batch_tokens), (Some(512), 1024));
        assert!(notes.is_empty());
    }

    #[test]
    fn limits_are_at_least_one() {
        assert!(resolve("m --max-queue 0").unwrap_err().contains("at least 1"));
        assert!(resolve("m -- --max-num-batched-tokens 0").unwrap_err().contains("at least 1"));
        assert!(resolve("m --threads x").unwrap_err().contains("invalid digit"));
    }
}
