//! Measures the rates that the device reaches in the pieces of a step, each timed separately: every
//! matmul in its own shape, the attention kernels, a copy, and the host's overhead per operator.
//! `dflash plan --measured` uses them instead of assumed shares.

use std::time::Instant;

use dflash_draft::DraftConfig;
use dflash_kernels::gpu::add_product;
use dflash_tensor::{DeviceKind, device_name};
use dflash_torch_sys::Begun;
use dflash_torch_sys::flash::{Sequences, Window, flash_backward, flash_forward, takes_flash};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::{Error, machine};

/// Timed repetitions, after as many untimed ones; the median counts.
const TIMES: usize = 5;
/// Bytes copied, more than any cache holds.
const COPIED: i64 = 256 << 20;
/// Operators launched to measure the host's overhead.
const OPERATORS: usize = 1000;
/// Queries and keys in the timed attention: whole tiles, and enough of them for any GPU.
const ATTENDED: i64 = 4096;

/// Rates that a device reaches.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// The GPU's name as reported by the driver, or `cpu`.
    pub device: String,
    /// The matmuls of a step, identical ones once.
    pub products: Vec<MeasuredProduct>,
    /// Only on a GPU whose flash attention supports the draft's head dimension.
    pub flash: Option<MeasuredFlash>,
    /// Bandwidth of a copy, reads plus writes, GB/s.
    pub copy_gb_s: f64,
    /// The host's overhead per operator, microseconds.
    pub operator_us: f64,
}

/// A matmul of [rows, inputs] by [inputs, outputs].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredProduct {
    /// The part of the step, named as in `dflash plan`.
    pub part: String,
    /// The weight, and which of its matmuls: forward or a gradient.
    pub name: String,
    /// Rows of the result.
    pub rows: i64,
    /// Elements summed for each element of the result.
    pub inputs: i64,
    /// Columns of the result.
    pub outputs: i64,
    /// Number of such matmuls in a step.
    pub count: usize,
    /// Median time, milliseconds.
    pub ms: f64,
    /// Achieved TFLOP/s.
    pub tflops: f64,
    /// Share of the device's dense peak, if known.
    pub share: Option<f64>,
}

/// Attention with full tiles, TFLOP/s.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct MeasuredFlash {
    pub forward_tflops: f64,
    pub backward_tflops: f64,
}

impl MeasuredProduct {
    /// Floating-point operations.
    pub(crate) fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.inputs as f64 * self.outputs as f64
    }
}

impl Measured {
    /// Parses such an object, or the last JSON line of the bench's output, under `measured`.
    ///
    /// # Errors
    /// Why the text contains none.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let line = text.lines().rfind(|line| line.trim_start().starts_with('{'));
        let value = [Some(text), line].into_iter().flatten();
        let value = value.map(serde_json::from_str::<serde_json::Value>).find_map(Result::ok);
        let value = value.ok_or("it is not JSON")?;
        let own = value.get("measured").unwrap_or(&value);
        serde_json::from_value(own.clone()).map_err(|error| error.to_string())
    }
}

/// Row counts of a step's matmuls.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProductRows {
    pub(super) slots: i64,
    pub(super) context: i64,
    pub(super) supervised: i64,
    /// Maximum number of rows in a chunk of logits.
    pub(super) chunk: i64,
}

/// Times all of them on the draft's device.
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

/// The step's matmuls, not yet timed.
fn products(config: &DraftConfig, rows: ProductRows) -> Vec<MeasuredProduct> {
    let (h, i, kv) = (config.hidden_size, config.intermediate_size, 2 * config.kv_width());
    let q = config.num_attention_heads * config.head_dim;
    let layers = config.layers.len();
    let ProductRows { slots, context, supervised, chunk } = rows;
    let chunk = supervised.clamp(1, chunk.max(1));
    let chunks = supervised.max(1).unsigned_abs().div_ceil(chunk.unsigned_abs()) as usize;
    // Part, weight, (rows, inputs, outputs) of the forward matmul, count, and which gradients exist
    // (of input, of weight). The auxiliary hidden states need no gradient, that of the context's
    // projection flows into the fusion, and the lm_head is frozen.
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

/// Seconds of a matmul in the memory layouts of a step: weights are [outputs, inputs], and weight
/// gradients accumulate in float32.
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

/// Rates of attention over one long sequence; `None` if no flash kernel supports it.
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

/// Seconds for copying [`COPIED`] bytes.
fn copy(device: Device) -> Result<f64, Error> {
    let from = Tensor::zeros([COPIED], (Kind::Uint8, device));
    let mut to = from.zeros_like();
    seconds(device, || to.copy_(&from))
}

/// The host's seconds per operator, measured with an operator that costs a GPU almost nothing.
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

    /// Apart from attention, the matmuls' arithmetic equals the row's exactly.
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
        // The first layer's slots are embeddings, which need no gradient; it may be computed
        // anyway, and the two counts may differ only by that matmul.
        let first = 2.0 * 40.0 * 16.0 * (32.0 + 32.0);
        let useful = work.flops(&config).total();
        assert!(sum - useful == first || sum == useful, "{sum} and {useful}, {first}");
        assert_eq!(products.len(), 2 + 5 * 3 + 2);
    }
}
