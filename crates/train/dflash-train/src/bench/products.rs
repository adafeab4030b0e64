//! What the device reaches in the pieces that a step is made of, each timed by itself: every matrix
//! product in its own shape, attention's kernels, a copy, the host's part of an operator. `dflash plan
//! --measured` takes these in place of the shares that it assumes.

use std::time::Instant;

use dflash_draft::DraftConfig;
use dflash_kernels::gpu::add_product;
use dflash_tensor::{DeviceKind, device_name};
use dflash_torch_sys::Begun;
use dflash_torch_sys::flash::{Sequences, Window, flash_backward, flash_forward, takes_flash};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::{Error, machine};

/// Times that each is done, after as many others: the median counts.
const TIMES: usize = 5;
/// Bytes that are copied, more than any cache holds.
const COPIED: i64 = 256 << 20;
/// Operators of the host's time.
const OPERATORS: usize = 1000;
/// Queries and keys of the attention that is timed: whole tiles, and enough of them for any GPU.
const ATTENDED: i64 = 4096;

/// What a device reaches.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// As the driver names the GPU, or `cpu`.
    pub device: String,
    /// Of the step, those of one kind once.
    pub products: Vec<MeasuredProduct>,
    /// On a GPU whose flash attention takes the draft's heads.
    pub flash: Option<MeasuredFlash>,
    /// Read and written by a copy, GB/s.
    pub copy_gb_s: f64,
    /// The host's time to ask for an operator, microseconds.
    pub operator_us: f64,
}

/// A product [rows, inputs] by [inputs, outputs].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredProduct {
    /// The part of the step, as `dflash plan` names it.
    pub part: String,
    /// The weight, and which of its products.
    pub name: String,
    /// Rows of the result.
    pub rows: i64,
    /// Numbers that each element of the result sums.
    pub inputs: i64,
    /// Columns of the result.
    pub outputs: i64,
    /// Times that a step makes it.
    pub count: usize,
    /// Median time, milliseconds.
    pub ms: f64,
    /// Its arithmetic over that.
    pub tflops: f64,
    /// Of the device's dense peak, where that is known.
    pub share: Option<f64>,
}

/// Attention of whole tiles, TFLOP/s.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct MeasuredFlash {
    pub forward_tflops: f64,
    pub backward_tflops: f64,
}

impl MeasuredProduct {
    /// Multiplications and additions.
    pub(crate) fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.inputs as f64 * self.outputs as f64
    }
}

impl Measured {
    /// Of a file's text: such an object, or the bench's line that has one under `measured`.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let line = text.lines().rfind(|line| line.trim_start().starts_with('{'));
        let value = [Some(text), line].into_iter().flatten();
        let value = value.map(serde_json::from_str::<serde_json::Value>).find_map(Result::ok);
        let value = value.ok_or("it is not JSON")?;
        let own = value.get("measured").unwrap_or(&value);
        serde_json::from_value(own.clone()).map_err(|error| error.to_string())
    }
}

/// The rows of a step's products.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProductRows {
    pub(super) slots: i64,
    pub(super) context: i64,
    pub(super) supervised: i64,
    /// Rows of a chunk of logits at most.
    pub(super) chunk: i64,
}

/// Times all of them where the draft computes.
pub(super) fn measure(
    config: &DraftConfig,
    rows: ProductRows,
    place: DeviceKind,
) -> Result<Measured, Error> {
    let device = place.device;
    let peak = machine::peak_of(device, None);
    let mut products = products(config, rows);
    for product in &mut products {
        product.ms = time_of(product, place)? * 1e3;
        product.tflops = product.flops() / product.ms / 1e9;
        product.share = peak.map(|peak| product.tflops / peak);
    }
    let name = match device {
        Device::Cuda(_) => machine::gpu_name().unwrap_or_else(|| device_name(device)),
        _ => device_name(device),
    };
    Ok(Measured {
        device: name,
        products,
        flash: flash(config, place)?,
        copy_gb_s: 2.0 * COPIED as f64 / copy(device)? / 1e9,
        operator_us: operator(device) * 1e6,
    })
}

/// The step's products, not yet timed.
fn products(config: &DraftConfig, rows: ProductRows) -> Vec<MeasuredProduct> {
    let (h, i, kv) = (config.hidden_size, config.intermediate_size, 2 * config.kv_width());
    let q = config.num_attention_heads * config.head_dim;
    let layers = config.layers.len();
    let ProductRows { slots, context, supervised, chunk } = rows;
    let chunk = supervised.clamp(1, chunk.max(1));
    let chunks = supervised.max(1).unsigned_abs().div_ceil(chunk.unsigned_abs()) as usize;
    // Rows, inputs and outputs of the forward product, how often, and which of the gradients there are:
    // auxiliary hidden states need none, the context's projection leads to the fusion's, the output projection
    // stays as it is.
    let weights = [
        ("features", "fc", (context, config.aux_layers() * h, h), 1, (false, true)),
        ("projections", "qkv", (slots, h, q + kv), layers, (true, true)),
        ("projections", "context kv", (context, h, kv), layers, (true, true)),
        ("projections", "o", (slots, q, h), layers, (true, true)),
        ("mlp", "gate_up", (slots, h, 2 * i), layers, (true, true)),
        ("mlp", "down", (slots, i, h), layers, (true, true)),
        ("loss", "lm_head", (chunk, h, config.vocab_size), chunks, (true, false)),
    ];
    let mut all = Vec::new();
    for (part, weight, (rows, inputs, outputs), count, (of_input, of_weight)) in weights {
        let mut push = |which: &str, (rows, inputs, outputs): (i64, i64, i64)| {
            let (part, name) = (part.to_owned(), format!("{weight}, {which}"));
            let (ms, tflops, share) = (0.0, 0.0, None);
            all.push(MeasuredProduct {
                part,
                name,
                rows,
                inputs,
                outputs,
                count,
                ms,
                tflops,
                share,
            });
        };
        push(FORWARD, (rows, inputs, outputs));
        if of_input {
            push(INPUT, (rows, outputs, inputs));
        }
        if of_weight {
            push(WEIGHT, (inputs, rows, outputs));
        }
    }
    all
}

const FORWARD: &str = "forward";
const INPUT: &str = "gradient of its input";
const WEIGHT: &str = "gradient of the weight";

/// Seconds of the product, in the layouts that a step has: weights lie as [outputs, inputs], and what
/// sums into a weight's gradient does so in float32.
fn time_of(product: &MeasuredProduct, place: DeviceKind) -> Result<f64, Error> {
    let DeviceKind { device, kind } = place;
    let MeasuredProduct { rows, inputs, outputs, .. } = *product;
    let random = |size: [i64; 2]| Tensor::randn(size, place.options());
    if product.name.ends_with(WEIGHT) {
        let (left, right) = (random([inputs, rows]).tr(), random([inputs, outputs]));
        let sum = Tensor::zeros([rows, outputs], (Kind::Float, device));
        return match device {
            Device::Cuda(_) if kind != Kind::Float => {
                seconds(device, || add_product(&sum, &left, &right))
            }
            _ => seconds(device, || drop(left.mm(&right))),
        };
    }
    let left = random([rows, inputs]);
    let right = match product.name.ends_with(FORWARD) {
        true => random([outputs, inputs]).tr(),
        false => random([inputs, outputs]),
    };
    seconds(device, || drop(left.mm(&right)))
}

/// Median seconds of `f` on the device.
fn seconds(device: Device, mut f: impl FnMut()) -> Result<f64, Error> {
    let mut times = Vec::with_capacity(TIMES);
    for number in 0..2 * TIMES {
        let begun = Begun::on(device)?;
        f();
        let interval = begun.end()?;
        if number >= TIMES {
            times.push(interval.length()?.as_secs_f64());
        }
    }
    Ok(super::median(times))
}

/// Attention of one long rectangle; `None` where no kernel takes it.
fn flash(config: &DraftConfig, place: DeviceKind) -> Result<Option<MeasuredFlash>, Error> {
    let DeviceKind { device, kind } = place;
    let Device::Cuda(index) = device else { return Ok(None) };
    if !takes_flash(index, kind, config.head_dim)? {
        return Ok(None);
    }
    let heads = |heads: i64| Tensor::randn([ATTENDED, heads, config.head_dim], place.options());
    let (q, k, v) = (
        heads(config.num_attention_heads),
        heads(config.num_key_value_heads),
        heads(config.num_key_value_heads),
    );
    let ends = Tensor::from_slice(&[0, ATTENDED as i32]).to_device(device);
    let sequences = Sequences {
        cu_q: ends.shallow_clone(),
        cu_k: ends,
        max_q: ATTENDED,
        max_k: ATTENDED,
        window: Window::ALL,
    };
    let scale = (config.head_dim as f64).sqrt().recip();
    let (out, lse) = flash_forward(&q, &k, &v, &sequences, scale)?;
    let forward = seconds(device, || drop(flash_forward(&q, &k, &v, &sequences, scale)))?;
    let backward =
        seconds(device, || drop(flash_backward(&out, &q, &k, &v, &out, &lse, &sequences, scale)))?;
    let pairs = (ATTENDED * ATTENDED * config.num_attention_heads * config.head_dim) as f64;
    let tflops = |flops: f64, seconds: f64| flops * pairs / seconds / 1e12;
    Ok(Some(MeasuredFlash {
        forward_tflops: tflops(4.0, forward),
        backward_tflops: tflops(10.0, backward),
    }))
}

/// Seconds in which [`COPIED`] bytes are copied.
fn copy(device: Device) -> Result<f64, Error> {
    let from = Tensor::zeros([COPIED], (Kind::Uint8, device));
    let mut to = from.zeros_like();
    seconds(device, || to.copy_(&from))
}

/// Seconds of the host for an operator that a GPU does in next to no time.
fn operator(device: Device) -> f64 {
    let mut x = Tensor::zeros([1], (Kind::Float, device));
    super::synchronize(device);
    let begun = Instant::now();
    for _ in 0..OPERATORS {
        let _ = x.g_add_scalar_(1.0);
    }
    begun.elapsed().as_secs_f64() / OPERATORS as f64
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The products' arithmetic is the row's, but for attention: nothing is left out or counted twice.
    #[test]
    fn the_products_are_those_of_a_step() {
        let config = serde_json::json!({
            "hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "num_hidden_layers": 3, "block_size": 4, "vocab_size": 100,
            "max_position_embeddings": 64,
            "dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 2]},
        });
        let config = DraftConfig::parse(Path::new("config.json"), &config.to_string()).unwrap();
        let rows = ProductRows { slots: 40, context: 30, supervised: 32, chunk: 16 };
        let work = dflash_draft::flops::RowWork {
            context_rows: 30.0,
            slots: 40.0,
            active_slots: 32.0,
            head_rows: 100.0,
            ..Default::default()
        };
        let products = products(&config, rows);
        let sum: f64 = products.iter().map(|it| it.count as f64 * it.flops()).sum();
        // The first layer's slots are embeddings, which need no gradient; it is computed all the same or
        // left out, and no more than that product tells the two apart.
        let first = 2.0 * 40.0 * 16.0 * (32.0 + 32.0);
        let useful = work.flops(&config).total();
        assert!(sum - useful == first || sum == useful, "{sum} and {useful}, {first}");
        assert_eq!(products.len(), 2 + 5 * 3 + 2);
    }
}
