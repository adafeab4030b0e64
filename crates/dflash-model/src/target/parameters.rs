//! Where a target's weights come from: a checkpoint, or a seed.
//!
//! Projections that read the same input are fused into one matrix, so that a layer is four matrix
//! products instead of seven. Matrices are kept as [input, output], transposed from the files:
//! on CPU the few-row products of decoding run up to twice as fast that way. Shapes: `i` input,
//! `o` output of a projection, `t` tokens.

use dflash_torch_sys::decode::Projection;
use tch::{Device, Kind, Tensor};

use super::config::INITIALIZER_RANGE;
use super::weights::Weights;
use crate::Result;

/// Source of every parameter of one target.
#[derive(Debug)]
pub(crate) struct Init<'a> {
    /// The checkpoint, or `None` for fresh trainable float32 weights.
    pub(crate) weights: Option<&'a Weights>,
    /// Kind and device of the parameters.
    pub(crate) options: (Kind, Device),
}

/// One or several projections of the same input, fused.
#[derive(Debug)]
pub(crate) struct Linear {
    /// Name of the fused projection, with its module's path.
    name: String,
    /// Checkpoint names (without `.weight`) and output sizes of what is fused.
    parts: Vec<(String, i64)>,
    weight_io: Tensor,
    bias_o: Option<Tensor>,
}

/// What [`Init::linear`] makes.
#[derive(Debug)]
pub(crate) struct LinearSpec<'a> {
    /// Path of the module; empty at the top.
    pub(crate) module: &'a str,
    /// Our name for the fused projection.
    pub(crate) name: &'a str,
    /// The checkpoint's projections with their output sizes, in order.
    pub(crate) parts: &'a [(&'a str, i64)],
    /// Input size.
    pub(crate) input: i64,
    /// Whether the projections have biases.
    pub(crate) bias: bool,
}

impl LinearSpec<'_> {
    fn path(&self, name: &str) -> String {
        match self.module {
            "" => name.to_owned(),
            module => format!("{module}.{name}"),
        }
    }
}

impl Init<'_> {
    /// A fused projection.
    pub(crate) fn linear(&self, spec: &LinearSpec) -> Result<Linear> {
        let output = spec.parts.iter().map(|(_, size)| size).sum();
        let mut linear = Linear {
            name: spec.path(spec.name),
            parts: spec.parts.iter().map(|(name, size)| (spec.path(name), *size)).collect(),
            weight_io: self.fresh(&[spec.input, output], 0.0),
            bias_o: spec.bias.then(|| self.fresh(&[output], 0.0)),
        };
        match self.weights {
            Some(weights) => linear.read(weights)?,
            None => {
                linear.weight_io = self.trainable(&[spec.input, output]);
                linear.bias_o = linear.bias_o.map(|bias| bias.set_requires_grad(true));
            }
        }
        Ok(linear)
    }

    /// The weight of a norm.
    pub(crate) fn norm(&self, name: &str, size: i64) -> Result<Tensor> {
        match self.weights {
            Some(weights) => weights.read(name, &[size], self.options),
            None => Ok(self.fresh(&[size], 1.0).set_requires_grad(true)),
        }
    }

    /// A matrix in the checkpoint's own layout.
    pub(crate) fn matrix(&self, name: &str, shape: &[i64]) -> Result<Tensor> {
        match self.weights {
            Some(weights) => weights.read(name, shape, self.options),
            None => Ok(self.trainable(shape)),
        }
    }

    fn fresh(&self, shape: &[i64], value: f64) -> Tensor {
        Tensor::full(shape, value, self.options)
    }

    fn trainable(&self, shape: &[i64]) -> Tensor {
        (Tensor::randn(shape, self.options) * INITIALIZER_RANGE).set_requires_grad(true)
    }
}

impl Linear {
    /// `x_ti W + b` [T, O].
    pub(crate) fn apply(&self, x_ti: &Tensor) -> Tensor {
        match &self.bias_o {
            Some(bias_o) => bias_o.addmm(x_ti, &self.weight_io),
            None => x_ti.mm(&self.weight_io),
        }
    }

    /// `residual_to + x_ti W + b` [T, O] in one product.
    pub(crate) fn add_to(&self, residual_to: &Tensor, x_ti: &Tensor) -> Tensor {
        let sum = residual_to.addmm(x_ti, &self.weight_io);
        match &self.bias_o {
            Some(bias_o) => sum + bias_o,
            None => sum,
        }
    }

    /// The weight [I, O] and its bias.
    pub(crate) fn projection(&self) -> Projection<'_> {
        Projection { weight_io: &self.weight_io, bias_o: self.bias_o.as_ref() }
    }

    /// The weight [I, O].
    pub(crate) fn weight_io(&self) -> Tensor {
        self.weight_io.shallow_clone()
    }

    /// The weight's columns [I, o] of the outputs `ids_o`, in one piece.
    pub(crate) fn columns(&self, ids_o: &Tensor) -> Tensor {
        self.weight_io.index_select(1, ids_o)
    }

    /// The fused parameters as they are trained.
    pub(crate) fn parameters(&self) -> Vec<(String, Tensor)> {
        let named = |suffix: &str, tensor: &Tensor| {
            (format!("{}.{suffix}", self.name), tensor.shallow_clone())
        };
        let mut parameters = vec![named("weight", &self.weight_io)];
        parameters.extend(self.bias_o.iter().map(|bias_o| named("bias", bias_o)));
        parameters
    }

    /// The checkpoint's tensors, as views.
    pub(crate) fn checkpoint(&self) -> Vec<(String, Tensor)> {
        let mut tensors = Vec::new();
        let mut start = 0;
        for (name, size) in &self.parts {
            let weight = self.weight_io.narrow(1, start, *size).transpose(0, 1);
            tensors.push((format!("{name}.weight"), weight));
            if let Some(bias_o) = &self.bias_o {
                tensors.push((format!("{name}.bias"), bias_o.narrow(0, start, *size)));
            }
            start += size;
        }
        tensors
    }

    fn read(&mut self, weights: &Weights) -> Result<()> {
        for (name, view) in self.checkpoint() {
            weights.read_into(&name, &view)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::write_safetensors;
    use dflash_test_support::seeded;

    const OPTIONS: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn spec(bias: bool) -> LinearSpec<'static> {
        LinearSpec { module: "m", name: "fused", parts: &[("a", 3), ("b", 2)], input: 4, bias }
    }

    #[test]
    fn fused_projections_are_the_separate_ones() {
        let _draws = seeded(tch::manual_seed);
        let dir = tempfile::tempdir().unwrap();
        let random = |shape: &[i64]| Tensor::randn(shape, OPTIONS);
        let stored = [
            ("m.a.weight", random(&[3, 4])),
            ("m.a.bias", random(&[3])),
            ("m.b.weight", random(&[2, 4])),
            ("m.b.bias", random(&[2])),
        ];
        let tensors = stored.each_ref().map(|(name, x)| ((*name).to_owned(), x.copy()));
        write_safetensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
        let weights = Weights::open(dir.path()).unwrap();
        let init = Init { weights: Some(&weights), options: OPTIONS };
        let linear = init.linear(&spec(true)).unwrap();
        let (x, residual) = (random(&[5, 4]), random(&[5, 5]));
        let apart = |number: usize| x.linear(&stored[number].1, Some(&stored[number + 1].1));
        let expected = Tensor::cat(&[apart(0), apart(2)], 1);
        assert!(linear.apply(&x).allclose(&expected, 1e-5, 1e-6, false));
        assert!(linear.add_to(&residual, &x).allclose(&(&residual + expected), 1e-5, 1e-6, false));
        for ((name, tensor), (stored_name, stored)) in linear.checkpoint().iter().zip(&stored) {
            assert_eq!((name.as_str(), tensor), (*stored_name, stored));
        }
        assert!(init.linear(&LinearSpec { module: "n", ..spec(false) }).is_err());
    }

    #[test]
    fn fresh_parameters_are_trainable_leaves_named_once() {
        let init = Init { weights: None, options: OPTIONS };
        let linear = init.linear(&spec(true)).unwrap();
        let names: Vec<_> = linear.parameters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["m.fused.weight", "m.fused.bias"]);
        assert!(linear.parameters().iter().all(|(_, x)| x.requires_grad() && x.is_leaf()));
        let top = LinearSpec { module: "", ..spec(false) };
        assert_eq!(init.linear(&top).unwrap().parameters()[0].0, "fused.weight");
    }
}
