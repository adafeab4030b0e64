//! Sources of a target's weights: a checkpoint, or a seed.
//!
//! Projections of the same input are fused, so a layer has four matrix products instead of seven.
//! Matrices are stored as [input, output], transposed from the files: on a CPU this makes few-row
//! decoding products up to twice as fast. Shapes: `i` input, `o` output of a projection, `t`
//! tokens.

use std::ops::Range;

use dflash_kernels::decode::{Layout, Projection, Weight};
use dflash_kernels::kernels::Kernels;
use dflash_tensor::weights::WeightRows;
use dflash_tensor::{DeviceKind, Result, Weights};
use tch::{Kind, Tensor};

use super::config::{INITIALIZER_RANGE, TargetConfig};
use super::layer::RmsNorm;
use super::packed_weight::{PackedWeight, Packing};
use super::parallel::Shard;

/// Source of every parameter of one target.
#[derive(Debug)]
pub(crate) struct Init<'a> {
    /// The checkpoint, or `None` for fresh trainable float32 weights.
    pub(crate) weights: Option<&'a Weights>,
    /// Device and type of the parameters.
    pub(crate) place: DeviceKind,
    /// Prefix of tensor names in the checkpoint, with its trailing dot.
    pub(crate) prefix: &'a str,
    /// This rank's shard of parallel layers.
    pub(crate) shard: Shard,
    /// How matrices are packed while they are read; `None` to keep them in libtorch's layout.
    pub(crate) packing: Option<Packing>,
}

/// How the ranks of a tensor-parallel target split a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    /// Replicated on every rank.
    Whole,
    /// A rank has some of the outputs of each part.
    Outputs,
    /// A rank has some of the inputs; the ranks' products are summed.
    Inputs,
}

/// Outputs of a projection, and how they are split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outputs {
    /// The same share of the outputs for every rank.
    Even(i64),
    /// Key or value heads of size `dim`. With more ranks than heads, each rank has one head.
    KeyHeads { heads: i64, dim: i64 },
}

impl Outputs {
    /// Total number of outputs.
    pub(crate) fn whole(self) -> i64 {
        match self {
            Self::Even(whole) => whole,
            Self::KeyHeads { heads, dim } => heads * dim,
        }
    }

    /// A rank's outputs.
    pub(crate) fn own(self, shard: &Shard) -> Range<i64> {
        match self {
            Self::Even(whole) => shard.own(whole),
            Self::KeyHeads { heads, dim } => {
                let Range { start, end } = shard.own_keys(heads);
                start * dim..end * dim
            }
        }
    }
}

/// One or several projections of the same input, fused.
#[derive(Debug)]
pub(crate) struct Linear {
    /// Name of the fused projection, including the module path.
    name: String,
    /// The fused projections, in order.
    parts: Vec<FusedPart>,
    weight: Held,
    bias_o: Option<Tensor>,
    split: Split,
    shard: Shard,
}

/// The weight [I, O].
#[derive(Debug)]
enum Held {
    /// In libtorch's layout.
    Plain(Tensor),
    Packed(PackedWeight),
}

/// A part of a fused projection.
#[derive(Debug)]
struct FusedPart {
    /// Tensor name, without `.weight`.
    name: String,
    /// Number of outputs, and this rank's range.
    whole: i64,
    own: Range<i64>,
}

/// Arguments of [`Init::linear`].
#[derive(Debug)]
pub(crate) struct LinearSpec<'a> {
    /// Module path; empty at the top level.
    pub(crate) module: &'a str,
    /// Our name for the fused projection.
    pub(crate) name: &'a str,
    /// The checkpoint's projections with their outputs, in order. Consecutive entries with the same
    /// name are stored as one tensor, of each of which a rank has its share.
    pub(crate) parts: &'a [(&'a str, Outputs)],
    /// Input size.
    pub(crate) input: i64,
    /// Whether the projections have biases.
    pub(crate) bias: bool,
    /// How ranks split them.
    pub(crate) split: Split,
}

impl LinearSpec<'_> {
    fn path(&self, name: &str) -> String {
        match self.module {
            "" => name.to_owned(),
            module => format!("{module}.{name}"),
        }
    }

    fn parts(&self, shard: &Shard) -> Vec<FusedPart> {
        let part = |&(name, outputs): &(&str, Outputs)| {
            let (name, whole) = (self.path(name), outputs.whole());
            let own = match self.split {
                Split::Outputs => outputs.own(shard),
                Split::Whole | Split::Inputs => 0..whole,
            };
            FusedPart { name, whole, own }
        };
        self.parts.iter().map(part).collect()
    }
}

impl FusedPart {
    /// Number of this rank's outputs.
    fn size(&self) -> i64 {
        self.own.end - self.own.start
    }

    /// This rank's rows of the stored tensor that consists of `parts`.
    fn rows(parts: &[Self]) -> WeightRows {
        let mut rows = WeightRows { whole: 0, own: Vec::new() };
        for Self { whole, own, .. } in parts {
            rows.own.push(rows.whole + own.start..rows.whole + own.end);
            rows.whole += whole;
        }
        rows
    }
}

impl Init<'_> {
    /// The tensor name for `name`, its Hugging Face path within the text model.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// This rank's share of `whole` heads or other units.
    pub(crate) fn share(&self, whole: i64) -> i64 {
        self.shard.share(whole)
    }

    /// Creates a fused projection.
    pub(crate) fn linear(&self, spec: &LinearSpec) -> Result<Linear> {
        let parts = spec.parts(&self.shard);
        let output = parts_size(&parts);
        let input = match spec.split {
            Split::Inputs => self.share(spec.input),
            Split::Outputs | Split::Whole => spec.input,
        };
        let weight_io = match self.weights {
            Some(_) => self.room(&[input, output]),
            None => self.trainable(&[spec.input, output]),
        };
        let linear = self.unread(spec, parts, Held::Plain(weight_io));
        self.weights.map_or(Ok(()), |weights| linear.read(weights))?;
        Ok(linear)
    }

    /// Creates a fused projection that is packed as `layout` if packing is enabled.
    pub(crate) fn packable(&self, spec: &LinearSpec, layout: Layout) -> Result<Linear> {
        let (Some(weights), Some(packing)) = (self.weights, self.packing) else {
            return self.linear(spec);
        };
        let parts = spec.parts(&self.shard);
        let rows = |part: &FusedPart| (format!("{}.weight", part.name), part.whole);
        let rows: Vec<(String, i64)> = parts.iter().map(rows).collect();
        let weight = PackedWeight::read(weights, &rows, spec.input, packing, layout)?;
        let linear = self.unread(spec, parts, Held::Packed(weight));
        linear.read_biases(weights)?;
        Ok(linear)
    }

    /// A fused projection with allocated biases, not yet read.
    fn unread(&self, spec: &LinearSpec, parts: Vec<FusedPart>, weight: Held) -> Linear {
        let bias_o = spec.bias.then(|| self.room(&[parts_size(&parts)]));
        let is_fresh = self.weights.is_none();
        Linear {
            name: spec.path(spec.name),
            parts,
            weight,
            bias_o: bias_o.map(|bias| if is_fresh { bias.set_requires_grad(true) } else { bias }),
            split: spec.split,
            shard: self.shard.clone(),
        }
    }

    /// Weight of a norm.
    pub(crate) fn norm(&self, name: &str, size: i64) -> Result<Tensor> {
        match self.weights {
            Some(weights) => weights.read(name, &[size], self.place),
            None => Ok(self.fresh(&[size], 1.0).set_requires_grad(true)),
        }
    }

    /// Weight of a norm that multiplies by 1 + w, in float32 since rounding would lose precision.
    pub(crate) fn norm_plus_one(&self, name: &str, size: i64) -> Result<Tensor> {
        match self.weights {
            Some(weights) => Ok(weights.read(name, &[size], self.float32_place())? + 1.0),
            None => Ok(self.fresh(&[size], 1.0).set_requires_grad(true)),
        }
    }

    /// An RMS norm with the target's weight convention.
    pub(crate) fn rms_norm(&self, name: &str, size: i64, config: &TargetConfig) -> Result<RmsNorm> {
        let weight = match config.outer.norm_plus_one {
            true => self.norm_plus_one(name, size)?,
            false => self.norm(name, size)?,
        };
        Ok(RmsNorm { weight, eps: config.rms_norm_eps, kernels: Kernels::Fast })
    }

    /// A matrix in the checkpoint's layout.
    pub(crate) fn matrix(&self, name: &str, shape: &[i64]) -> Result<Tensor> {
        match self.weights {
            Some(weights) => weights.read(name, shape, self.place),
            None => Ok(self.trainable(shape)),
        }
    }

    /// A float32 tensor in the checkpoint's layout, whatever type the model runs in.
    pub(crate) fn float32(&self, name: &str, shape: &[i64]) -> Result<Tensor> {
        let place = self.float32_place();
        match self.weights {
            Some(weights) => weights.read(name, shape, place),
            None => Ok(Tensor::randn(shape, place.options()) * INITIALIZER_RANGE),
        }
    }

    fn float32_place(&self) -> DeviceKind {
        DeviceKind { kind: Kind::Float, ..self.place }
    }

    /// Zeros, or uninitialised memory to read the checkpoint into.
    fn room(&self, shape: &[i64]) -> Tensor {
        match self.weights {
            Some(_) => Tensor::empty(shape, self.place.options()),
            None => self.fresh(shape, 0.0),
        }
    }

    fn fresh(&self, shape: &[i64], value: f64) -> Tensor {
        Tensor::full(shape, value, self.place.options())
    }

    fn trainable(&self, shape: &[i64]) -> Tensor {
        (Tensor::randn(shape, self.place.options()) * INITIALIZER_RANGE).set_requires_grad(true)
    }
}

impl Linear {
    /// `x_ti W + b` [T, O].
    pub(crate) fn apply(&self, x_ti: &Tensor) -> Tensor {
        let weight_io = match &self.weight {
            Held::Packed(weight) => return weight.apply(x_ti, self.bias_o.as_ref()),
            Held::Plain(weight_io) => weight_io,
        };
        if self.is_summed() {
            let sum = self.shard.summed(x_ti.mm(weight_io));
            return self.bias_o.iter().fold(sum, |sum, bias_o| sum + bias_o);
        }
        match &self.bias_o {
            Some(bias_o) => bias_o.addmm(x_ti, weight_io),
            None => x_ti.mm(weight_io),
        }
    }

    /// `residual_to + x_ti W + b` [T, O] in one operation.
    pub(crate) fn add_to(&self, residual_to: &Tensor, x_ti: &Tensor) -> Tensor {
        if self.is_summed() {
            return residual_to + self.apply(x_ti);
        }
        let sum = match &self.weight {
            Held::Packed(weight) => weight.add_to(residual_to, x_ti),
            Held::Plain(weight_io) => residual_to.addmm(x_ti, weight_io),
        };
        match &self.bias_o {
            Some(bias_o) => sum + bias_o,
            None => sum,
        }
    }

    /// [`Self::add_to`] in place of `residual_to`, which the caller owns: saves a copy. Not in
    /// place when gradients are recorded, which need that memory.
    pub(crate) fn add_onto(&self, mut residual_to: Tensor, x_ti: &Tensor) -> Tensor {
        match &self.weight {
            Held::Plain(weight_io)
                if !self.is_summed()
                    && [&residual_to, x_ti, weight_io].iter().all(|x| !x.requires_grad()) =>
            {
                let sum = residual_to.addmm_(x_ti, weight_io);
                self.bias_o.iter().fold(sum, |sum, bias_o| sum + bias_o)
            }
            _ => self.add_to(&residual_to, x_ti),
        }
    }

    /// Whether the result must be summed over ranks that have the other inputs.
    fn is_summed(&self) -> bool {
        self.split == Split::Inputs && self.shard.is_parallel()
    }

    /// The weight and its bias.
    pub(crate) fn projection(&self) -> Projection<'_> {
        let weight = match &self.weight {
            Held::Plain(weight_io) => Weight::Plain(weight_io),
            Held::Packed(weight) => weight.weight(),
        };
        Projection { weight, bias_o: self.bias_o.as_ref() }
    }

    /// The weight [I, O]; a copy if it is packed.
    pub(crate) fn weight_io(&self) -> Tensor {
        match &self.weight {
            Held::Plain(weight_io) => weight_io.shallow_clone(),
            Held::Packed(weight) => weight.unpacked(),
        }
    }

    /// Whether its weight is only held packed.
    pub(crate) fn is_packed(&self) -> bool {
        matches!(self.weight, Held::Packed(_))
    }

    /// Converts the weight to libtorch's layout.
    pub(crate) fn unpack(&mut self) {
        self.weight = Held::Plain(self.weight_io());
    }

    /// Contiguous weight columns [I, o] of the outputs `ids_o`.
    pub(crate) fn columns(&self, ids_o: &Tensor) -> Tensor {
        match &self.weight {
            Held::Plain(weight_io) => weight_io.index_select(1, ids_o),
            Held::Packed(weight) => weight.columns(ids_o),
        }
    }

    /// The fused trainable parameters.
    pub(crate) fn parameters(&self) -> Vec<(String, Tensor)> {
        let named = |suffix: &str, tensor: &Tensor| {
            (format!("{}.{suffix}", self.name), tensor.shallow_clone())
        };
        let mut parameters = vec![named("weight", &self.weight_io())];
        parameters.extend(self.bias_o.iter().map(|bias_o| named("bias", bias_o)));
        parameters
    }

    /// The checkpoint's tensors, as views.
    pub(crate) fn checkpoint(&self) -> Vec<(String, Tensor)> {
        let mut tensors = Vec::new();
        for (parts, weight_oi, bias_o) in self.stored() {
            let name = &parts[0].name;
            tensors.push((format!("{name}.weight"), weight_oi));
            tensors.extend(bias_o.map(|bias_o| (format!("{name}.bias"), bias_o)));
        }
        tensors
    }

    /// Per stored tensor: its parts, and views of this rank's weight [O, I] and bias.
    fn stored(&self) -> Vec<(&[FusedPart], Tensor, Option<Tensor>)> {
        let weight_io = self.weight_io();
        let view = |(parts, start, size)| {
            let weight_oi = weight_io.narrow(1, start, size).transpose(0, 1);
            let bias_o = self.bias_o.as_ref().map(|bias_o| bias_o.narrow(0, start, size));
            (parts, weight_oi, bias_o)
        };
        self.stored_parts().map(view).collect()
    }

    /// Per stored tensor: its parts, their first output, and their number of outputs.
    fn stored_parts(&self) -> impl Iterator<Item = (&[FusedPart], i64, i64)> {
        let mut start = 0;
        self.parts.chunk_by(|one, next| one.name == next.name).map(move |parts| {
            let size = parts_size(parts);
            start += size;
            (parts, start - size, size)
        })
    }

    fn read(&self, weights: &Weights) -> Result<()> {
        for (parts, weight_oi, _) in self.stored() {
            let (name, rows) = (&parts[0].name, FusedPart::rows(parts));
            let weight = format!("{name}.weight");
            match self.is_summed() {
                true => {
                    let own = weight_oi.size()[1];
                    weights.check_shape(&weight, &[rows.whole, self.shard.whole(own)])?;
                    weights.read_part_into(&weight, 1, self.shard.start(own), &weight_oi)?;
                }
                false => weights.read_rows_into(&weight, &rows, &weight_oi)?,
            }
        }
        self.read_biases(weights)
    }

    fn read_biases(&self, weights: &Weights) -> Result<()> {
        let Some(bias_o) = &self.bias_o else { return Ok(()) };
        for (parts, start, size) in self.stored_parts() {
            let (name, rows) = (format!("{}.bias", parts[0].name), FusedPart::rows(parts));
            weights.read_rows_into(&name, &rows, &bias_o.narrow(0, start, size))?;
        }
        Ok(())
    }
}

/// Total number of this rank's outputs.
fn parts_size(parts: &[FusedPart]) -> i64 {
    parts.iter().map(FusedPart::size).sum()
}

#[cfg(test)]
mod tests {
    use super::Outputs::{Even, KeyHeads};
    use super::*;
    use dflash_tensor::checkpoint::write_safetensors;
    use dflash_test_support::seeded;

    fn spec(bias: bool) -> LinearSpec<'static> {
        LinearSpec {
            module: "m",
            name: "fused",
            parts: &[("a", Even(3)), ("b", Even(2))],
            input: 4,
            bias,
            split: Split::Whole,
        }
    }

    #[test]
    fn fused_projections_are_the_separate_ones() {
        let _draws = seeded(tch::manual_seed);
        let dir = tempfile::tempdir().unwrap();
        let random = |shape: &[i64]| Tensor::randn(shape, DeviceKind::CPU_F32.options());
        let stored = [
            ("m.a.weight", random(&[3, 4])),
            ("m.a.bias", random(&[3])),
            ("m.b.weight", random(&[2, 4])),
            ("m.b.bias", random(&[2])),
        ];
        let tensors = stored.each_ref().map(|(name, x)| ((*name).to_owned(), x.copy()));
        write_safetensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
        let weights = Weights::open(dir.path()).unwrap();
        let init = Init {
            weights: Some(&weights),
            place: DeviceKind::CPU_F32,
            prefix: "",
            shard: Shard::WHOLE,
            packing: None,
        };
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

    /// Two parts of one stored tensor and one of another: a rank's rows are its share of each.
    #[test]
    fn a_rank_reads_its_rows_of_every_part() {
        let _draws = seeded(tch::manual_seed);
        let dir = tempfile::tempdir().unwrap();
        let random = |shape: &[i64]| Tensor::randn(shape, DeviceKind::CPU_F32.options());
        let stored = [
            ("m.ab.weight", random(&[6, 4])),
            ("m.ab.bias", random(&[6])),
            ("m.c.weight", random(&[2, 4])),
            ("m.c.bias", random(&[2])),
        ];
        let tensors = stored.each_ref().map(|(name, x)| ((*name).to_owned(), x.copy()));
        write_safetensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
        let weights = Weights::open(dir.path()).unwrap();
        let of_rank = |shard| {
            let init = Init {
                weights: Some(&weights),
                place: DeviceKind::CPU_F32,
                prefix: "",
                shard,
                packing: None,
            };
            let parts = &[("ab", Even(4)), ("ab", Even(2)), ("c", Even(2))];
            init.linear(&LinearSpec { parts, split: Split::Outputs, ..spec(true) }).unwrap()
        };
        let x = random(&[5, 4]);
        let apart = |number: usize| x.linear(&stored[number].1, Some(&stored[number + 1].1));
        let whole = Tensor::cat(&[apart(0), apart(2)], 1);
        assert!(of_rank(Shard::WHOLE).apply(&x).allclose(&whole, 1e-5, 1e-6, false));
        for (part, columns) in [(0, [0i64, 1, 4, 6]), (1, [2, 3, 5, 7])] {
            let own = of_rank(Shard::new(part, 2, None)).apply(&x);
            let expected = whole.index_select(1, &Tensor::from_slice(&columns));
            assert!(own.allclose(&expected, 1e-5, 1e-6, false), "part {part}");
        }
        let names: Vec<_> =
            of_rank(Shard::WHOLE).checkpoint().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, stored.map(|(name, _)| name));
        // Each part alone would fit in the stored tensor, but not all together.
        let init = Init {
            weights: Some(&weights),
            place: DeviceKind::CPU_F32,
            prefix: "",
            shard: Shard::new(0, 2, None),
            packing: None,
        };
        let parts = &[("ab", Even(2)), ("ab", Even(2))];
        let short = init.linear(&LinearSpec { parts, split: Split::Outputs, ..spec(true) });
        let short = short.unwrap_err().to_string();
        assert!(short.contains("m.ab.weight has shape [6, 4], expected [4, 4]"), "{short}");
        let parts = &[("ab", Even(6))];
        let narrow = LinearSpec { parts, input: 2, split: Split::Inputs, ..spec(true) };
        let narrow = init.linear(&narrow).unwrap_err().to_string();
        assert!(narrow.contains("m.ab.weight has shape [6, 4], expected [6, 2]"), "{narrow}");
    }

    /// With two heads and four ranks, each rank has the head that its queries read.
    #[test]
    fn ranks_that_are_more_than_the_key_heads_have_one_each() {
        let check = |outputs: Outputs, of: usize, expected: &[Range<i64>]| {
            let own = (0..of).map(|part| outputs.own(&Shard::new(part, of, None)));
            assert_eq!(own.collect::<Vec<_>>(), expected, "{outputs:?} of {of}");
        };
        check(Even(8), 4, &[0..2, 2..4, 4..6, 6..8]);
        check(KeyHeads { heads: 4, dim: 3 }, 2, &[0..6, 6..12]);
        check(KeyHeads { heads: 2, dim: 3 }, 2, &[0..3, 3..6]);
        check(KeyHeads { heads: 2, dim: 3 }, 4, &[0..3, 0..3, 3..6, 3..6]);
        check(KeyHeads { heads: 1, dim: 3 }, 3, &[0..3, 0..3, 0..3]);
    }

    #[test]
    fn fresh_parameters_are_trainable_leaves_named_once() {
        let init = Init {
            weights: None,
            place: DeviceKind::CPU_F32,
            prefix: "",
            shard: Shard::WHOLE,
            packing: None,
        };
        let linear = init.linear(&spec(true)).unwrap();
        let names: Vec<_> = linear.parameters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["m.fused.weight", "m.fused.bias"]);
        assert!(linear.parameters().iter().all(|(_, x)| x.requires_grad() && x.is_leaf()));
        let top = LinearSpec { module: "", ..spec(false) };
        assert_eq!(init.linear(&top).unwrap().parameters()[0].0, "fused.weight");
    }
}
