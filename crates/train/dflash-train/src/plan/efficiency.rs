//! The share of a GPU's peak figures that each kind of work reaches: assumed from published
//! results, or measured by `dflash bench train-step --products`.

use std::collections::BTreeMap;
use std::path::Path;

use dflash_settings::Invalid;
use dflash_torch_sys::trace::Event;

use crate::bench::Measured;
use crate::gpus::{Family, Gpu};

/// Share of the dense peak reached by large matmuls: cuBLAS in a burst on A100 and H100.
const PRODUCTS: f64 = 0.75;
/// The same under sustained load: clocks fall, and not every shape is efficient.
const SLOW_PRODUCTS: f64 = 0.65;
/// Share of the memory bandwidth reached by operators that stream tensors.
const BANDWIDTH: f64 = 0.85;
/// Host overhead per operator (dispatcher, allocator, launch), seconds.
const OPERATOR: f64 = 4e-6;

impl Family {
    /// Share of the peak reached by FlashAttention-2, forward and backward, counting partial tiles
    /// as full.
    fn flash(self) -> (f64, f64) {
        match self {
            // "50-73 %" on an A100 (arXiv 2307.08691); the others use the same instructions
            Self::Ampere | Self::Ada => (0.65, 0.55),
            // "35 %" on an H100 (arXiv 2407.08608), whose new instructions it does not use
            Self::Hopper => (0.35, 0.30),
            // no published figures: assumed like an H100's, since it uses no new instructions
            Self::Blackwell => (0.15, 0.13),
        }
    }
}

/// A GPU, and the shares of its figures that are reached on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RatedGpu<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) efficiency: &'a Efficiency,
}

/// Shares of a GPU's peak figures.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Efficiency {
    /// Share of the dense peak reached by matmuls; `parts` holds those measured separately.
    pub(super) products: f64,
    parts: BTreeMap<String, f64>,
    /// Share of the dense peak reached by flash attention, forward and backward.
    flash: (f64, f64),
    /// Share of the memory bandwidth.
    pub(super) bandwidth: f64,
    /// Host overhead per operator, seconds.
    pub(super) operator: f64,
    /// The file with the measurements, if any.
    pub(super) measured: Option<String>,
}

impl Efficiency {
    /// The assumed efficiency of `gpu`.
    pub(crate) fn assumed(gpu: &Gpu) -> Self {
        Self {
            products: PRODUCTS,
            parts: BTreeMap::new(),
            flash: gpu.family.flash(),
            bandwidth: BANDWIDTH,
            operator: OPERATOR,
            measured: None,
        }
    }

    /// The same with sustained matmul efficiency; `None` for measurements.
    pub(super) fn slow(&self) -> Option<Self> {
        let is_assumed = self.measured.is_none();
        is_assumed.then(|| Self { products: SLOW_PRODUCTS, ..self.clone() })
    }

    /// Reads the measurements for `gpu` from `file`.
    ///
    /// # Errors
    /// The file cannot be read, has another format, or was measured on another device.
    pub(super) fn of_file(file: &Path, gpu: &Gpu) -> Result<Self, Invalid> {
        let refused = |expected: String| Invalid::new("measured", file.display(), expected);
        let text = std::fs::read_to_string(file)
            .map_err(|error| refused(format!("that file cannot be read: {error}")))?;
        let measured = Measured::parse(&text).map_err(|reason| {
            let made = "`dflash bench train-step --products --json` writes such a file";
            refused(format!("that file has no measured products ({reason}); {made}"))
        })?;
        if Gpu::named(&measured.device) != Some(*gpu) {
            let (found, wanted) = (&measured.device, gpu.name);
            return Err(refused(format!(
                "that file is of {found}, and the plan of {wanted}; measure one, or name the other with --device"
            )));
        }
        Self::of(&measured, gpu, file).ok_or_else(|| {
            refused("that file has no products with times; measure again on the GPU".to_owned())
        })
    }

    fn of(measured: &Measured, gpu: &Gpu, file: &Path) -> Option<Self> {
        let peak = gpu.tflops * 1e12;
        let share = |part: Option<&str>| {
            let (mut flops, mut seconds) = (0.0, 0.0);
            for product in measured.products.iter().filter(|it| part.is_none_or(|p| it.part == p)) {
                flops += product.count as f64 * product.flops();
                seconds += product.count as f64 * product.ms / 1e3;
            }
            let share = flops / seconds / peak;
            (share.is_finite() && share > 0.0).then_some(share)
        };
        let parts = measured.products.iter().filter_map(|product| {
            Some((product.part.clone(), share(Some(product.part.as_str()))?))
        });
        let assumed = Self::assumed(gpu);
        let flash = measured.flash.map_or(assumed.flash, |flash| {
            (flash.forward_tflops / gpu.tflops, flash.backward_tflops / gpu.tflops)
        });
        Some(Self {
            products: share(None)?,
            parts: parts.collect(),
            flash,
            bandwidth: measured.copy_gb_s / gpu.bandwidth,
            operator: measured.operator_us / 1e6,
            measured: Some(file.display().to_string()),
        })
    }

    /// Share of the dense peak that the kernels of `event` reach.
    pub(super) fn of_event(&self, event: &Event) -> f64 {
        match &*event.operation {
            "aten::_flash_attention_forward" => self.flash.0,
            "aten::_flash_attention_backward" => self.flash.1,
            _ => self.parts.get(event.part).copied().unwrap_or(self.products),
        }
    }

    /// Seconds of `gpu` for a forward pass, given the operations in matmuls and in attention.
    pub(super) fn forward_seconds(&self, products: f64, attention: f64, gpu: &Gpu) -> f64 {
        (products / self.products + attention / self.flash.0) / (gpu.tflops * 1e12)
    }

    /// Description of the source.
    pub(super) fn source(&self) -> String {
        match &self.measured {
            Some(file) => format!("computed by the shares measured in {file}"),
            None => "computed, not measured (docs/plan.md)".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &Path, text: &str) -> std::path::PathBuf {
        let path = dir.join("measured.json");
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn shares_are_those_of_the_products_that_a_step_makes() {
        let dir = tempfile::tempdir().unwrap();
        let gpu = Gpu::named("h200").unwrap();
        // 2 * 1000 * 1000 * 1000 operations each: 2 TFLOP/s in 1 ms, 0.5 in 4 ms.
        let product = |part: &str, count: usize, ms: f64| {
            format!(
                r#"{{"part": "{part}", "name": "x", "rows": 1000, "inputs": 1000, "outputs": 1000,
                     "count": {count}, "ms": {ms}, "tflops": 0, "share": null}}"#
            )
        };
        let text = format!(
            r#"{{"device": "NVIDIA H200", "products": [{}, {}], "copy_gb_s": 2400.0,
                 "flash": {{"forward_tflops": 494.5, "backward_tflops": 98.9}}, "operator_us": 5.0}}"#,
            product("mlp", 1, 1.0),
            product("loss", 3, 4.0)
        );
        let found = Efficiency::of_file(&file(dir.path(), &text), &gpu).unwrap();
        let close = |found: f64, expected: f64| {
            assert!((found / expected - 1.0).abs() < 1e-9, "{found} and {expected}");
        };
        close(found.parts["mlp"], 2.0 / 989.0);
        close(found.parts["loss"], 0.5 / 989.0);
        // 8 GFLOP in 13 ms.
        close(found.products, 8e9 / 13e-3 / 989e12);
        assert_eq!((found.flash, found.bandwidth), ((0.5, 0.1), 0.5));
        let of = |part, operation: &str| {
            found.of_event(&Event {
                operation: operation.to_owned(),
                part,
                form: dflash_torch_sys::trace::Form::Operator,
                launches: 1,
                read: 0.0,
                written: 0.0,
                flops: 1.0,
                tile_flops: 1.0,
            })
        };
        close(of("mlp", "aten::mm"), 2.0 / 989.0);
        close(of("projections", "aten::mm"), found.products);
        assert_eq!(of("attention", "aten::_flash_attention_backward"), 0.1);
        assert_eq!((found.operator, found.slow()), (5e-6, None));
        // As printed by the bench, after other lines.
        let line =
            format!("noise\n{{\"step_ms\": 1.0, \"measured\": {}}}\n", text.replace('\n', ""));
        let printed = Efficiency::of_file(&file(dir.path(), &line), &gpu).unwrap();
        assert_eq!(printed, found);
        let refused = |text: &str, gpu: &str, expected: &str| {
            let path = file(dir.path(), text);
            let error = Efficiency::of_file(&path, &Gpu::named(gpu).unwrap()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        };
        refused(&text, "h100", "is of NVIDIA H200, and the plan of H100");
        refused("{}", "h200", "`dflash bench train-step --products --json` writes such a file");
        refused(
            &text.replace("\"ms\": 1", "\"ms\": 0").replace("\"ms\": 4", "\"ms\": 0"),
            "h200",
            "no products with times",
        );
        let missing = Efficiency::of_file(&dir.path().join("none"), &gpu).unwrap_err();
        assert!(missing.to_string().contains("cannot be read"), "{missing}");
    }

    #[test]
    fn a_day_is_slower_than_a_burst() {
        let assumed = Efficiency::assumed(&Gpu::named("h100").unwrap());
        let slow = assumed.slow().unwrap();
        assert_eq!((assumed.products, slow.products), (0.75, 0.65));
        assert_eq!(slow.flash, assumed.flash);
    }
}
