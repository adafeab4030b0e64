//! Hidden states of whole documents, from a target of which only the needed layers are loaded.
//!
//! Both the hidden-state server and a colocating trainer use this, so their results are bitwise
//! equal. Shapes: `t` tokens, `h` hidden, `v` vocabulary.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use dflash_kernels::cpu_multiplies_bf16;
use dflash_settings::Dtype;
use dflash_tensor::weights::EMBEDDING;
use dflash_tensor::{DeviceKind, Error, Result, Weights, device_name, kind_name};
use dflash_torch_sys::with_products;
use serde_json::Value;
use tch::{Device, Tensor, no_grad};

use super::TargetConfig;
use super::embedding::Embedding;
use super::parallel::Shard;
use super::parameters::Init;
use super::target::{Body, Stack, is_of_part};

/// Where oneDNN compiles code for every token count, batches are padded to a multiple of this with
/// an extra prompt. This leaves a few dozen shapes instead of one per batch.
const GRAIN: usize = 32;
/// Minimum batch size on a CPU; smaller batches are padded likewise, and to at least
/// [`LEAST_OF_A_THREAD`] tokens per thread. MKL and oneDNN use different kernels with another
/// summation order for few rows, so without this a prompt's last bits would depend on concurrent
/// requests. With one and two threads and targets 256 and 1,024 wide, this happened up to 3 and 9
/// tokens in float32, up to 64 with bfloat16 products, and never in bfloat16.
const LEAST: usize = 256;
const LEAST_OF_A_THREAD: usize = 32;

/// Concatenated prompts, without padding.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedPrompts {
    /// All tokens.
    pub input_ids: Vec<i64>,
    /// First token of each prompt, then the number of tokens.
    pub document_starts: Vec<i64>,
}

/// Options for loading a target for its hidden states.
#[derive(Debug)]
pub struct PrefillOptions<'a> {
    /// Device, and type of weights and activations.
    pub place: DeviceKind,
    /// The type as requested by the user; `place` has its resolution.
    pub asked: Dtype,
    /// The highest layer id needed; later layers are not loaded. `None` for the last.
    pub highest: Option<u32>,
    /// The embedding [V, H], if already loaded on this device and in this type.
    pub embedding_vh: Option<&'a Tensor>,
}

/// A target that turns prompts into hidden states.
#[derive(Debug)]
pub struct Prefill {
    config: TargetConfig,
    embedding: Embedding,
    body: Body,
    /// Whether float32 matrix products use bf16.
    in_bf16: bool,
}

/// How many tokens to run at once: reduced after running out of memory, then slowly increased.
#[derive(Debug, Clone)]
pub struct TokenBudget {
    tokens: usize,
    most: usize,
    /// Largest batch that has succeeded, in tokens.
    ran: usize,
}

impl PackedPrompts {
    /// Packs `prompts` in order.
    pub fn new<'a>(prompts: impl Iterator<Item = &'a [i64]>) -> Self {
        let mut packed = Self { input_ids: Vec::new(), document_starts: vec![0] };
        for prompt in prompts {
            packed.input_ids.extend_from_slice(prompt);
            packed.document_starts.push(packed.input_ids.len() as i64);
        }
        packed
    }

    /// Appends a filler prompt if there are fewer tokens than `least` or not a multiple of `grain`.
    fn filled_up(&self, least: usize, grain: usize) -> Self {
        let mut filled = self.clone();
        let tokens = filled.input_ids.len().max(least).next_multiple_of(grain);
        if tokens > filled.input_ids.len() {
            filled.input_ids.resize(tokens, 0);
            filled.document_starts.push(tokens as i64);
        }
        filled
    }
}

impl Prefill {
    /// Loads the needed layers, and the embedding unless given.
    ///
    /// # Errors
    /// As [`super::Target::load`].
    pub fn load(dir: &Path, options: &PrefillOptions<'_>) -> Result<Self> {
        let config = TargetConfig::load(dir)?;
        let weights = Weights::open(dir)?;
        let device = options.place.device;
        let (prefix, shard) = (weights.prefix(), Shard::WHOLE);
        let init =
            Init { weights: Some(&weights), place: options.place, prefix, shard, packing: None };
        let all = config.num_hidden_layers;
        let highest = options.highest.map_or(all, |highest| all.min(highest as usize));
        let given = options.embedding_vh.is_some();
        weights.begin_load(|name| is_of_part(name, prefix, &config, &(0..highest), !given))?;
        no_grad(|| {
            let embedding_vh = match options.embedding_vh {
                Some(embedding_vh) => embedding_vh.shallow_clone(),
                None => {
                    init.matrix(&init.path(EMBEDDING), &[config.vocab_size, config.hidden_size])?
                }
            };
            let body = Body::build(&config, 0..highest, &init)?;
            let in_bf16 = multiplies_in_bf16(device, options.asked, dir);
            let embedding = Embedding::table(embedding_vh);
            Ok(Self { config, embedding, body, in_bf16 })
        })
    }

    /// The target's configuration.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// The device it runs on.
    pub fn device(&self) -> Device {
        self.embedding.device()
    }

    /// Device and type, for display.
    pub fn place(&self) -> String {
        let device = match self.device() {
            Device::Cpu => format!("the CPU ({} threads)", tch::get_num_threads()),
            other => device_name(other),
        };
        let products = if self.in_bf16 { " with bfloat16 products" } else { "" };
        format!("{device} in {}{products}", kind_name(self.embedding.kind()))
    }

    /// Hidden states of all tokens of `prompts`: one [T, H] for each of `layer_ids`, in order, on
    /// the target's device and in its type. Each prompt attends only to itself. Layers beyond the
    /// highest id are not run.
    ///
    /// # Errors
    /// libtorch does not support the required product precision.
    ///
    /// # Panics
    /// If an id is beyond the loaded layers, or out of memory.
    pub fn states(&self, prompts: &PackedPrompts, layer_ids: &[u32]) -> Result<Vec<Tensor>> {
        let states = self.states_unless(&AtomicBool::new(false), prompts, layer_ids)?;
        Ok(states.expect("nobody stops it"))
    }

    /// [`Self::states`] that returns `None` if `stop` is set before the end. It is checked before
    /// each layer, since long prompts take long on a CPU.
    ///
    /// # Errors
    /// As [`Self::states`].
    ///
    /// # Panics
    /// As [`Self::states`].
    pub fn states_unless(
        &self,
        stop: &AtomicBool,
        prompts: &PackedPrompts,
        layer_ids: &[u32],
    ) -> Result<Option<Vec<Tensor>>> {
        let filled = fill_up(prompts, self.device(), self.in_bf16);
        let PackedPrompts { input_ids, document_starts } = filled;
        let stack = Stack { embedding: &self.embedding, body: &self.body, stop: Some(stop) };
        let states = no_grad(|| {
            let ids_t = Tensor::from_slice(&input_ids).to_device(self.device());
            let run = || stack.packed_states(&ids_t, &document_starts, layer_ids);
            // Products of this process may be set to another precision.
            if self.device() == Device::Cpu { with_products(self.in_bf16, run) } else { Ok(run()) }
        })
        .map_err(Error::Products)?;
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let tokens = prompts.input_ids.len() as i64;
        Ok(Some(states.into_iter().map(|state_th| state_th.narrow(0, 0, tokens)).collect()))
    }
}

/// `prompts`, padded as `device` requires.
pub(super) fn fill_up(prompts: &PackedPrompts, device: Device, in_bf16: bool) -> PackedPrompts {
    if device != Device::Cpu {
        return prompts.clone();
    }
    prompts.filled_up(least(), if in_bf16 { GRAIN } else { 1 })
}

/// Minimum tokens per batch on a CPU.
pub(super) fn least() -> usize {
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
    LEAST.max(threads * LEAST_OF_A_THREAD)
}

impl TokenBudget {
    /// A budget of at most `most` tokens.
    pub fn new(most: usize) -> Self {
        Self { tokens: most, most, ran: 0 }
    }

    /// The current batch size.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Records that a batch of `tokens` succeeded.
    pub fn fitted(&mut self, tokens: usize) {
        self.tokens = (self.tokens + self.tokens / 64 + 1).min(self.most);
        self.ran = self.ran.max(tokens);
    }

    /// Records that a batch of `tokens` ran out of memory. Returns whether a batch of that size has
    /// succeeded before, so that retrying later may work.
    pub fn failed(&mut self, tokens: usize) -> bool {
        self.tokens = self.tokens.min(tokens / 2).max(1);
        tokens <= self.ran
    }
}

/// Whether float32 matrix products use bf16.
///
/// Hidden states are transmitted as bf16, and servers run targets in their checkpoint's type. If
/// the CPU multiplies bf16 in hardware, only the products use it: several times faster than
/// float32, while everything else stays in float32, which has kernels. Elsewhere bf16 is emulated.
pub(super) fn multiplies_in_bf16(device: Device, asked: Dtype, dir: &Path) -> bool {
    let by_checkpoint = asked == Dtype::Auto && device == Device::Cpu;
    by_checkpoint && cpu_multiplies_bf16() && checkpoint_is_bf16(dir)
}

/// The type in config.json. Unreadable files are reported by the loader, not here.
fn checkpoint_is_bf16(dir: &Path) -> bool {
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap_or_default();
    let config: Value = serde_json::from_str(&text).unwrap_or_default();
    // The key of older checkpoints.
    let dtype = config.get("dtype").or_else(|| config.get("torch_dtype"));
    dtype.and_then(Value::as_str) == Some("bfloat16")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_filled_up_to_a_multiple() {
        let check = |tokens: usize, (least, grain): (usize, usize), starts: &[i64]| {
            let ids: Vec<i64> = (1..=tokens as i64).collect();
            let filled = PackedPrompts::new([ids.as_slice()].into_iter()).filled_up(least, grain);
            assert_eq!(filled.document_starts, starts, "{tokens}, {least}, {grain}");
            assert_eq!(filled.input_ids[..tokens], ids);
            assert_eq!(filled.input_ids.len() as i64, *starts.last().unwrap());
        };
        check(5, (1, 1), &[0, 5]);
        check(31, (1, 32), &[0, 31, 32]);
        check(32, (1, 32), &[0, 32]);
        check(33, (1, 32), &[0, 33, 64]);
        check(5, (40, 1), &[0, 5, 40]);
        check(5, (40, 32), &[0, 5, 64]);
        check(70, (40, 32), &[0, 70, 96]);
    }

    #[test]
    fn only_bf16_checkpoints_are_multiplied_in_bf16_unless_a_type_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let check = |config: &str, bf16: bool| {
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            assert_eq!(checkpoint_is_bf16(dir.path()), bf16, "{config}");
            let found = multiplies_in_bf16(Device::Cpu, Dtype::Auto, dir.path());
            assert_eq!(found, bf16 && cpu_multiplies_bf16(), "{config}");
            for device in [Device::Cpu, Device::Cuda(0)] {
                for asked in [Dtype::Float32, Dtype::Bfloat16] {
                    assert!(!multiplies_in_bf16(device, asked, dir.path()), "{asked:?}");
                }
            }
        };
        check(r#"{"dtype": "bfloat16"}"#, true);
        check(r#"{"torch_dtype": "bfloat16"}"#, true);
        check(r#"{"dtype": "float32", "torch_dtype": "bfloat16"}"#, false);
        check("{}", false);
        check("no json", false);
    }

    #[test]
    fn memory_that_ran_out_halves_the_batches_for_a_while() {
        let mut budget = TokenBudget::new(1000);
        budget.fitted(400);
        assert!(!budget.failed(900), "it never ran");
        assert_eq!(budget.tokens(), 450);
        assert!(budget.failed(300), "as many ran before");
        assert_eq!(budget.tokens(), 150);
        (0..1000).for_each(|_| budget.fitted(100));
        assert_eq!(budget.tokens(), 1000);
        assert!(budget.failed(1));
        assert_eq!(budget.tokens(), 1, "a token must be tried");
    }
}
