//! Widens the demo's target so that its weights are read from memory, as those of real models are.
//!
//! Each MLP gets additional channels of zeros: rows of the gate and up projections, columns of the
//! down projection. A channel's contribution to the output is silu(0) * 0, times zero, so no logit
//! changes. But every token reads these weights.

use std::fs;
use std::path::Path;

use dflash_io::PendingDir;
use dflash_tensor::checkpoint::{Entry, TensorFile, TensorWriter, pieces};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::error::Error;

const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
/// Channels are added in multiples of this: kernels and packed layouts prefer even numbers.
const CHANNELS: u64 = 64;

/// Where a projection of an MLP gets its zeros.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Rows,
    Columns,
}

/// Writes the target in `from` to `to`, widened to about `bytes` of weights; returns their size.
///
/// # Errors
/// I/O, or a directory that is not the demo's target.
pub(crate) fn widen(from: &Path, to: &Path, bytes: u64) -> Result<u64, Error> {
    let pending = PendingDir::create_replacing(to)?;
    let file = TensorFile::open(&from.join(WEIGHTS))?;
    let entries = entries(&file)?;
    let extra = extra_channels(&entries, bytes) as i64;
    let wide: Vec<Entry> = entries.iter().map(|entry| widened(entry, extra)).collect();
    let mut writer = TensorWriter::create(&pending.path().join(WEIGHTS), &wide)?;
    for entry in &entries {
        let tensor = file.any_tensor(&entry.name)?;
        match side(&entry.name) {
            None => writer.append(&tensor)?,
            Some(Side::Columns) => writer.append(&tensor.constant_pad_nd([0, extra]))?,
            Some(Side::Rows) => {
                writer.append(&tensor)?;
                for piece in pieces(0..extra * entry.shape[1]) {
                    let count = piece.end - piece.start;
                    writer.append(&Tensor::zeros([count], (entry.kind, Device::Cpu)))?;
                }
            }
        }
    }
    writer.finish()?;
    copy_others(from, pending.path(), extra)?;
    pending.commit()?;
    Ok(wide.iter().map(size).sum())
}

fn entries(file: &TensorFile) -> Result<Vec<Entry>, Error> {
    let mut names = file.names();
    names.sort();
    let entry = |name: String| {
        // `Target::save` writes no other type.
        let kind = file.stored_kind(&name)?.unwrap_or(Kind::BFloat16);
        Ok(Entry { kind, shape: file.shape(&name)?, name })
    };
    names.into_iter().map(entry).collect()
}

fn side(name: &str) -> Option<Side> {
    let is = |part: &str| name.ends_with(&format!(".mlp.{part}.weight"));
    match () {
        () if is("gate_proj") || is("up_proj") => Some(Side::Rows),
        () if is("down_proj") => Some(Side::Columns),
        () => None,
    }
}

/// Number of channels to add to every MLP so that the weights take `bytes`; none if they are large
/// enough already.
fn extra_channels(entries: &[Entry], bytes: u64) -> u64 {
    let channel = |entry: &Entry| match side(&entry.name) {
        None => 0,
        Some(Side::Rows) => size(entry) / entry.shape[0].unsigned_abs(),
        Some(Side::Columns) => size(entry) / entry.shape[1].unsigned_abs(),
    };
    let each: u64 = entries.iter().map(channel).sum();
    let lacking = bytes.saturating_sub(entries.iter().map(size).sum());
    lacking / (each * CHANNELS).max(1) * CHANNELS
}

fn widened(entry: &Entry, extra: i64) -> Entry {
    let mut wide = entry.clone();
    match side(&entry.name) {
        None => {}
        Some(Side::Rows) => wide.shape[0] += extra,
        Some(Side::Columns) => wide.shape[1] += extra,
    }
    wide
}

/// Bytes of a tensor.
fn size(entry: &Entry) -> u64 {
    entry.shape.iter().product::<i64>().unsigned_abs() * entry.kind.elt_size_in_bytes() as u64
}

/// Copies tokenizer and template, and writes a configuration with the new width.
fn copy_others(from: &Path, to: &Path, extra: i64) -> Result<(), Error> {
    let fault = || dflash_io::Error::io("copy", from);
    for entry in fs::read_dir(from).map_err(fault())? {
        let entry = entry.map_err(fault())?;
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_file() && name != WEIGHTS && name != CONFIG {
            fs::copy(&path, to.join(&name)).map_err(dflash_io::Error::io("copy", path))?;
        }
    }
    let path = from.join(CONFIG);
    let text = fs::read(&path).map_err(dflash_io::Error::io("read", &path))?;
    let broken = |source| {
        dflash_tensor::Error::from(dflash_formats::Error::Json { path: path.clone(), source })
    };
    let mut config: Value = serde_json::from_slice(&text).map_err(broken)?;
    let channels = config["intermediate_size"].as_i64().unwrap_or_default() + extra;
    config["intermediate_size"] = channels.into();
    Ok(dflash_io::write_bytes(&to.join(CONFIG), format!("{config:#}").as_bytes())?)
}

#[cfg(test)]
mod tests {
    use dflash_target::{Target, TargetConfig, TargetOptions};

    use super::*;

    const DOWN: &str = "model.layers.0.mlp.down_proj.weight";

    fn shape(dir: &Path, name: &str) -> Vec<i64> {
        TensorFile::open(&dir.join(WEIGHTS)).unwrap().shape(name).unwrap()
    }

    /// Logits of a document, from the first layer to the last.
    fn logits(dir: &Path) -> Tensor {
        let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
        let target = Target::load(dir, &options).unwrap();
        let ids = Tensor::arange(24, (Kind::Int64, Device::Cpu));
        let last = target.num_layers() as u32;
        target.logits(&target.forward_packed(&ids, &[0, 24], &[last]).remove(0))
    }

    #[test]
    fn a_widened_target_says_the_same() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("target"), root.path().join("wide"));
        let config = TargetConfig::qwen3(32, 3, 50);
        Target::random(config, 7, Device::Cpu).save(&from, Kind::BFloat16).unwrap();
        fs::write(from.join("tokenizer.json"), "{}").unwrap();
        let bytes = widen(&from, &to, 2_000_000).unwrap();
        let file = fs::metadata(to.join(WEIGHTS)).unwrap().len();
        assert!((1_960_000..=2_000_000).contains(&bytes) && file - bytes < 8192, "{bytes} {file}");
        let (before, after) = (shape(&from, DOWN), shape(&to, DOWN));
        assert!(after[0] == 32 && after[1] > 30 * before[1], "{before:?} {after:?}");
        assert!(to.join("tokenizer.json").is_file());
        let (narrow, wide) = (logits(&from), logits(&to));
        let apart = (&narrow - &wide).abs().max().double_value(&[]);
        let largest = narrow.abs().max().double_value(&[]);
        assert!(largest > 0.01 && apart <= 1e-6 * largest.max(1.0), "{apart} of {largest}");
    }

    #[test]
    fn what_is_wide_enough_stays_as_it_is() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("target"), root.path().join("wide"));
        Target::random(TargetConfig::qwen3(32, 1, 50), 7, Device::Cpu)
            .save(&from, Kind::BFloat16)
            .unwrap();
        widen(&from, &to, 1).unwrap();
        assert_eq!(shape(&to, DOWN), shape(&from, DOWN));
    }
}
