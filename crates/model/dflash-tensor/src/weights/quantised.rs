//! fp8 checkpoints with one scale per block of a matrix, as released by DeepSeek, MiniMax and Qwen;
//! dequantized while they are read.

use dflash_formats::fields::Fields;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::Weights;
use crate::{Error, Result};

/// Size of the blocks that share a scale.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    rows: i64,
    columns: i64,
}

impl Weights {
    /// Checks from `quantization_config` that the weights are stored in a supported way.
    ///
    /// # Errors
    /// Another quantization method, which is named.
    pub(super) fn check_quantization(&self) -> Result<()> {
        const KEY: &str = "quantization_config";
        let file = Fields::read(&self.dir, "config.json")?;
        let text = file.object("text_config")?;
        let nested = || text.as_ref().map_or(Ok(None), |text| text.object(KEY));
        let Some(stored) = file.object(KEY)?.map_or_else(nested, |found| Ok(Some(found)))? else {
            return Ok(());
        };
        match stored.text("quant_method")?.as_deref() {
            Some("mxfp4") => Ok(()),
            Some("fp8") => {
                let _ = self.block.set(stored.required("weight_block_size", block)?);
                Ok(())
            }
            _ => Err(stored.refuse(
                "quant_method",
                "only fp8 in blocks and mxfp4 are read natively; name a checkpoint in bfloat16, or take the hidden states from vLLM",
            )),
        }
    }

    /// Whether tensor `name` is in fp8.
    ///
    /// # Errors
    /// A missing tensor or a non-weight type.
    pub(super) fn is_fp8(&self, name: &str) -> Result<bool> {
        match self.shard(name)?.readable_kind(name)? {
            Kind::Float8e4m3fn => Ok(true),
            kind @ (Kind::Uint8 | Kind::Int64 | Kind::Bool) => {
                let (path, name, found) = (self.dir.clone(), name.into(), format!("{kind:?}"));
                Err(Error::TensorType { path, name, found })
            }
            _ => Ok(false),
        }
    }

    /// As [`Weights::read_part_into`], for an fp8 matrix with block scales. Works on a few rows at
    /// a time, so it needs little memory beyond the destination.
    pub(super) fn read_fp8(
        &self,
        name: &str,
        dim: usize,
        start: i64,
        destination: &Tensor,
    ) -> Result<()> {
        let shard = self.shard(name)?;
        let scales_name = format!("{name}_scale_inv");
        let shape = shard.shape(name)?;
        let (Some(block), &[rows, columns]) = (self.block.get(), shape.as_slice()) else {
            return Err(self.unscaled(name));
        };
        let mut expected = destination.size();
        if shape.get(dim).is_some_and(|&size| start + expected[dim] <= size) {
            expected[dim] = shape[dim];
        }
        shard.check_shape(name, &expected)?;
        let groups = [rows, columns].map(|size| size as u64);
        let groups =
            [groups[0].div_ceil(block.rows as u64), groups[1].div_ceil(block.columns as u64)];
        let groups = groups.map(|count| count as i64);
        self.check_shape(&scales_name, &groups)?;
        let scales = self.shard(&scales_name)?.any_tensor(&scales_name)?.to_kind(Kind::Float);
        let (first_row, first_column) = if dim == 0 { (start, 0) } else { (0, start) };
        let wanted = destination.size();
        let mut row = first_row;
        while row < first_row + wanted[0] {
            // Up to the end of the row's scale block.
            let end = ((row / block.rows + 1) * block.rows).min(first_row + wanted[0]);
            let stored = shard.part(name, row * columns..end * columns)?;
            let values = stored.to_kind(Kind::Float).view([end - row, columns]);
            let scale =
                scales.get(row / block.rows).repeat_interleave_self_int(block.columns, 0, None);
            let scaled = values * scale.narrow(0, 0, columns);
            let mut part = destination.narrow(0, row - first_row, end - row);
            part.f_copy_(&scaled.narrow(1, first_column, wanted[1]))?;
            row = end;
        }
        self.count(&scales_name, self.bytes_of(&scales_name)?)
    }

    fn unscaled(&self, name: &str) -> Error {
        let (path, name) = (self.dir.clone(), name.into());
        Error::TensorType { path, name, found: "F8_E4M3 without a scale for each block".into() }
    }
}

fn block(fields: &Fields, key: &str) -> Result<Option<Block>> {
    let two = |value: &Value| match value.as_array()?.as_slice() {
        [rows, columns] => Some(Block { rows: rows.as_i64()?, columns: columns.as_i64()? }),
        _ => None,
    };
    let block = fields.typed(key, "two positive numbers are needed", two)?;
    let is_sound = |block: &Block| block.rows > 0 && block.columns > 0;
    if block.as_ref().is_some_and(|block| !is_sound(block)) {
        return Err(fields.refuse(key, "two positive numbers are needed"));
    }
    Ok(block)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::super::WeightRows;
    use super::*;
    use crate::DeviceKind;
    use crate::checkpoint::write_safetensors;
    use dflash_test_support::seeded;

    const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn saved(config: &str) -> (tempfile::TempDir, Tensor, Tensor) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let matrix = (Tensor::randn([7, 10], CPU) * 20.0).to_kind(Kind::Float8e4m3fn);
        let scales = Tensor::rand([3, 3], CPU);
        let tensors =
            [("m.weight".into(), matrix.copy()), ("m.weight_scale_inv".into(), scales.copy())];
        write_safetensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
        (dir, matrix, scales)
    }

    #[test]
    fn blocks_are_multiplied_by_their_scales_whole_and_in_parts() {
        let _draws = seeded(tch::manual_seed);
        let config =
            r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 4]}}"#;
        let (dir, matrix, scales) = saved(config);
        let weights = Weights::open(dir.path()).unwrap();
        weights.begin_load(|_| true).unwrap();
        let read = weights.read("m.weight", &[7, 10], DeviceKind::CPU_F32).unwrap();
        for (row, column) in [(0, 0), (2, 3), (3, 4), (6, 9), (5, 8)] {
            let stored = matrix.to_kind(Kind::Float).double_value(&[row, column]) as f32;
            let scale = scales.double_value(&[row / 3, column / 4]) as f32;
            assert_eq!(read.double_value(&[row, column]) as f32, stored * scale, "{row}, {column}");
        }
        let rows = Tensor::empty([3, 10], CPU);
        weights.read_part_into("m.weight", 0, 2, &rows).unwrap();
        assert_eq!(rows, read.narrow(0, 2, 3));
        let columns = Tensor::empty([7, 5], CPU);
        weights.read_part_into("m.weight", 1, 3, &columns).unwrap();
        assert_eq!(columns, read.narrow(1, 3, 5));
        let some = Tensor::empty([4, 10], CPU);
        let two = WeightRows { whole: 7, own: vec![5..7, 2..4] };
        weights.read_rows_into("m.weight", &two, &some).unwrap();
        assert_eq!(some, Tensor::cat(&[read.narrow(0, 5, 2), read.narrow(0, 2, 2)], 0));
    }

    #[test]
    fn what_is_quantised_otherwise_is_named() {
        let message = |config: &str| {
            let (dir, ..) = saved(config);
            let weights = Weights::open(dir.path()).unwrap();
            weights.begin_load(|_| true).unwrap_err().to_string()
        };
        let gptq = message(r#"{"text_config": {"quantization_config": {"quant_method": "gptq"}}}"#);
        assert!(
            gptq.contains("`text_config.quantization_config.quant_method` is \"gptq\""),
            "{gptq}"
        );
        let whole = message(r#"{"quantization_config": {"quant_method": "fp8"}}"#);
        assert!(whole.contains("weight_block_size"), "{whole}");
        let (dir, ..) = saved("{}");
        let weights = Weights::open(dir.path()).unwrap();
        let unscaled =
            weights.read("m.weight", &[7, 10], DeviceKind::CPU_F32).unwrap_err().to_string();
        assert!(unscaled.contains("m.weight has type F8_E4M3 without a scale"), "{unscaled}");
    }
}
