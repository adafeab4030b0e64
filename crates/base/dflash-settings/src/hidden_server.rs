//! The settings of `dflash hidden-server`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{
    Invalid, LONGEST_WAIT, MOST_REQUESTS, MOST_THREADS, MOST_TOKENS, SHORTEST_TIMEOUT, layer_ids,
    port_file, seconds, within,
};
use crate::choices::{Device, Dtype, WireDtype};
use crate::processor::ProcessorSettings;

/// Run the target and serve hidden states of selected layers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct HiddenServerSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub. May be
    /// given without the flag.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// Layers to serve: 0 is the embedding's output, k the residual stream after k layers. The last
    /// layer's output is always available. Default: five, evenly spread.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID", action = clap::ArgAction::Set, num_args = 1.., value_delimiter = ','))]
    pub target_layer_ids: Option<Vec<u32>>,
    /// Interface to listen on; 0.0.0.0 for all.
    #[cfg_attr(feature = "clap", arg(long, default_value = "127.0.0.1"))]
    pub host: String,
    /// Port to listen on; 0 for any free one.
    #[cfg_attr(feature = "clap", arg(long, default_value_t = 8000))]
    pub port: u16,
    /// File to write the port to once prompts are accepted.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub port_file: Option<PathBuf>,
    /// Where to run the target: auto, cpu, cuda or cuda:N.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value_t = Device::Auto))]
    pub device: Device,
    /// Type of weights and activations. `auto`: bfloat16 on CUDA, float32 on a CPU; on a CPU, a
    /// bfloat16 checkpoint's products are computed in bfloat16 if the CPU supports it.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = Dtype::Auto))]
    pub dtype: Dtype,
    /// The CPU instruction level.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub processor: ProcessorSettings,
    /// Type of the rows that are sent.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = WireDtype::Bf16))]
    pub wire_dtype: WireDtype,
    /// Maximum number of requests being received, waiting or being answered.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 256))]
    pub max_queue: usize,
    /// How long requests beyond --max-queue wait before they get a 429, in seconds.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value_t = 30.0))]
    pub max_wait: f64,
    /// Seconds that a client may take to send the head of a request, to send its body, or to read
    /// its reply (one more per MiB). Then its connection is closed.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value_t = 30.0))]
    pub client_timeout: f64,
    /// Maximum number of tokens in one forward pass.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 2048))]
    pub max_batch_tokens: usize,
    /// Longest prompt. Default: the target's max_position_embeddings.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub max_model_len: Option<usize>,
    /// CPU threads per operation, in each process. Default: libtorch's choice.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub threads: Option<usize>,
    /// How the target is split over processes.
    #[cfg_attr(feature = "clap", command(flatten))]
    #[serde(flatten)]
    pub parallel: ParallelSettings,
}

/// For a target larger than one device. One process per GPU is started on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ParallelSettings {
    /// Number of stages of consecutive layers, each in its own process.
    #[cfg_attr(
        feature = "clap",
        arg(long, visible_alias = "pipeline-parallel-size", value_name = "N", default_value_t = 1)
    )]
    pub pipeline: usize,
    /// Number of processes that split the heads and the inner width of every layer; with
    /// --pipeline, of every stage.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1))]
    pub tensor_parallel_size: usize,
}

impl Default for ParallelSettings {
    fn default() -> Self {
        Self { pipeline: 1, tensor_parallel_size: 1 }
    }
}

impl ParallelSettings {
    /// Total number of processes.
    pub fn ranks(&self) -> usize {
        self.pipeline * self.tensor_parallel_size
    }

    /// # Errors
    /// A number out of its range, or a device that only one process can use.
    pub fn check(&self, device: Device) -> Result<(), Invalid> {
        within([
            ("pipeline", self.pipeline as u64, 1..=MOST_PARTS),
            ("tensor_parallel_size", self.tensor_parallel_size as u64, 1..=MOST_PARTS),
        ])?;
        match device {
            Device::Cuda(Some(_)) if self.ranks() > 1 => {
                let expected = format!(
                    "--pipeline and --tensor-parallel-size give each of {} processes a GPU of its own; \
                     pass --device cuda, and choose GPUs by CUDA_VISIBLE_DEVICES",
                    self.ranks()
                );
                Err(Invalid::new("device", device, expected))
            }
            _ => Ok(()),
        }
    }
}

/// The most GPUs that one machine has, and some.
const MOST_PARTS: u64 = 64;

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
        ])?;
        seconds([
            ("max_wait", self.max_wait, 0.0..=LONGEST_WAIT),
            ("client_timeout", self.client_timeout, SHORTEST_TIMEOUT..=LONGEST_WAIT),
        ])?;
        self.processor.check()?;
        self.parallel.check(self.device)?;
        if self.target_layer_ids.as_ref().is_some_and(Vec::is_empty) {
            return Err(Invalid::new("target_layer_ids", "empty", "it must name a layer"));
        }
        self.check_port_file()
    }

    /// # Errors
    /// A port file that would replace something that is not a file, or whose directory does not
    /// exist.
    pub fn check_port_file(&self) -> Result<(), Invalid> {
        port_file(self.port_file.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    fn settings() -> HiddenServerSettings {
        HiddenServerSettings {
            target: "m".into(),
            target_layer_ids: None,
            host: "127.0.0.1".into(),
            port: 0,
            port_file: None,
            device: Device::Auto,
            dtype: Dtype::Auto,
            processor: ProcessorSettings::default(),
            wire_dtype: WireDtype::Bf16,
            max_queue: 256,
            max_wait: 30.0,
            client_timeout: 30.0,
            max_batch_tokens: 2048,
            max_model_len: None,
            threads: None,
            parallel: ParallelSettings::default(),
        }
    }

    fn check(change: impl FnOnce(&mut HiddenServerSettings), expect: &str) {
        let mut settings = settings();
        change(&mut settings);
        let message = settings.check().err().map(|invalid| invalid.to_string());
        assert_eq!(message.as_deref().unwrap_or_default(), expect);
    }

    #[test]
    fn numbers_without_sense_are_refused_with_their_range() {
        check(|_| {}, "");
        let zero = "--max-model-len is 0, but it must be at least 1 and at most 16777216";
        check(|settings| settings.max_model_len = Some(0), zero);
        let zero = "--max-queue is 0, but it must be at least 1 and at most 65536";
        check(|settings| settings.max_queue = 0, zero);
        let huge =
            format!("--max-queue is {}, but it must be at least 1 and at most 65536", usize::MAX);
        check(|settings| settings.max_queue = usize::MAX, &huge);
        let many = "--threads is 100000, but it must be at least 1 and at most 1024";
        check(|settings| settings.threads = Some(100_000), many);
        for time in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            let range = format!("--client-timeout is {time}, but it must be 0.1 to 86400 seconds");
            check(|settings| settings.client_timeout = time, &range);
        }
        check(|settings| settings.max_wait = 0.0, "");
        let long = "--max-wait is 1000000, but it must be 0 to 86400 seconds";
        check(|settings| settings.max_wait = 1e6, long);
    }

    #[test]
    fn a_parallel_target_takes_no_single_gpu() {
        let parts =
            |pipeline, tensor_parallel_size| ParallelSettings { pipeline, tensor_parallel_size };
        check(|settings| settings.parallel = parts(2, 2), "");
        let none = "--tensor-parallel-size is 0, but it must be at least 1 and at most 64";
        check(|settings| settings.parallel = parts(2, 0), none);
        let one = "--device is cuda:1, but --pipeline and --tensor-parallel-size give each of 6 \
                   processes a GPU of its own; pass --device cuda, and choose GPUs by \
                   CUDA_VISIBLE_DEVICES";
        let on_second =
            |settings: &mut HiddenServerSettings| settings.device = Device::Cuda(Some(1));
        check(on_second, "");
        check(
            |settings| {
                on_second(settings);
                settings.parallel = parts(3, 2);
            },
            one,
        );
    }

    #[test]
    fn a_port_file_replaces_a_regular_file_only() {
        let dir = tempfile::tempdir().unwrap();
        let port_file = |path: &Path, expect: &str| {
            let shown = path.display();
            let expect = if expect.is_empty() {
                String::new()
            } else {
                format!("--port-file is {shown}, but {expect}")
            };
            check(|settings| settings.port_file = Some(path.to_owned()), &expect);
        };
        let file = dir.path().join("file");
        port_file(&file, "");
        std::fs::write(&file, "1\n").unwrap();
        port_file(&file, "");
        let link = dir.path().join("link");
        symlink(&file, &link).unwrap();
        port_file(&link, "that is a symbolic link; name a regular file or a new one");
        let other = "that is not a regular file; name one, or a new one";
        port_file(dir.path(), other);
        port_file(Path::new("/dev/null"), other);
        port_file(Path::new(".."), other);
        port_file(Path::new("port"), "");
        let nowhere = "it must be a file in a directory that exists";
        port_file(&dir.path().join("none/port"), nowhere);
        port_file(&file.join("port"), nowhere);
    }
}
