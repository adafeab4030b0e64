//! Targets packed while their files are read: bit-identical to those packed from whole tensors, in
//! little more memory than the files, with errors that name the file. Runs in its own process,
//! since memory and the load observer are global.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use dflash_golden::entries;
use dflash_target::{Target, TargetConfig, TargetOptions};
use dflash_tensor::checkpoint::{TensorFile, write_safetensors};
use dflash_tensor::{Kernels, Loading, on_loading, resident_mib};
use dflash_test_support::alone;
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

fn load(dir: &Path, dtype: Kind) -> Target {
    Target::load(dir, &TargetOptions { device: Device::Cpu, dtype }).unwrap()
}

/// The same target as libtorch tensors, from which the few-row path packs a copy.
fn unpacked(target: Target) -> Target {
    target.with_kernels(Kernels::Portable).with_kernels(Kernels::Fast)
}

/// Results for `ids`: states, logits and choices in one pass, in two, and token by token.
fn outputs(target: &Target, ids: &Tensor) -> Vec<Tensor> {
    let tokens = ids.size()[0];
    let chunked = |chunk: i64| {
        let mut cache = target.new_cache(tokens as usize);
        let each = (0..tokens).step_by(chunk as usize).map(|start| {
            let ids = ids.narrow(0, start, chunk.min(tokens - start));
            target.forward_cached(&ids, &mut cache, &[]).hidden_td
        });
        Tensor::cat(&each.collect::<Vec<_>>(), 0)
    };
    let hidden_td = chunked(tokens);
    let some = Tensor::from_slice(&[3i64, 0, 7]);
    vec![
        target.logits(&hidden_td),
        target.most_likely(&hidden_td),
        chunked(tokens / 2 + 1),
        chunked(1),
        hidden_td,
        target.rows(ids),
        target.lm_head_columns(&some),
    ]
}

/// The last states of `ids` run as a document.
fn many(target: &Target, ids: &Tensor) -> Tensor {
    let last = target.num_layers() as u32;
    target.forward_packed(ids, &[0, ids.size()[0]], &[last]).remove(0).to_kind(Kind::Float)
}

#[test]
fn a_target_packed_from_its_file_has_the_bits_of_one_packed_from_tensors() {
    let _alone = alone();
    let found = ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None));
    let is_dense =
        |dir: &Path| TargetConfig::load(dir).is_ok_and(|config| config.family.dense().is_some());
    let mut compared = 0;
    for entry in found.filter(|entry| is_dense(&entry.path)) {
        for dtype in KINDS {
            let what = format!("{} in {dtype:?}", entry.name);
            let packed = load(&entry.path, dtype);
            let plain = unpacked(load(&entry.path, dtype));
            let ids: Vec<i64> = (0..40).map(|at| at * 7 % 50).collect();
            let ids = Tensor::from_slice(&ids);
            for (found, expected) in outputs(&packed, &ids).iter().zip(outputs(&plain, &ids)) {
                assert_eq!(*found, expected, "{what}");
            }
            // Matmuls with more rows are summed in another order than libtorch's.
            let (found, expected) = (many(&packed, &ids), many(&plain, &ids));
            let most = expected.abs().max().double_value(&[]);
            let error = (found - expected).abs().max().double_value(&[]) / most;
            assert!(error < if dtype == Kind::Float { 1e-5 } else { 0.03 }, "{what}: {error:e}");
            for ((name, found), (_, expected)) in packed.parameters().iter().zip(plain.parameters())
            {
                assert_eq!(*found, expected, "{what}, {name}");
            }
            compared += 1;
        }
    }
    assert!(compared >= 8, "{compared} targets");
}

/// A target on disk whose weights dominate the process's memory, and the file's size, MiB.
fn large(kind: Kind) -> (tempfile::TempDir, f64) {
    let config = TargetConfig::qwen3(512, 6, 60_000);
    let target = Target::random(config, 5, Device::Cpu);
    let dir = tempfile::tempdir().unwrap();
    target.save(dir.path(), kind).unwrap();
    let bytes = dir.path().join("model.safetensors").metadata().unwrap().len();
    (dir, bytes as f64 / f64::from(1 << 20))
}

/// A single extra copy, of the embedding alone, would be 1.7 times the file.
#[test]
fn a_packed_target_takes_little_more_memory_than_its_file() {
    let _alone = alone();
    for (stored, dtype) in [(KINDS[0], KINDS[0]), (KINDS[1], KINDS[0]), (KINDS[1], KINDS[1])] {
        let (dir, file_mib) = large(stored);
        let before = resident_mib().unwrap();
        let target = load(dir.path(), dtype);
        let mut cache = target.new_cache(301);
        // A prompt of many rows, and a decoding step.
        for tokens in [300, 1] {
            let ids = Tensor::ones([tokens], (Kind::Int64, Device::Cpu));
            let output = target.forward_cached(&ids, &mut cache, &[]);
            let _ = target.most_likely(&output.hidden_td.narrow(0, 0, 1));
        }
        let held = resident_mib().unwrap() - before;
        assert!(
            held > 0.5 * file_mib && held < 1.3 * file_mib,
            "{stored:?} as {dtype:?}: {held:.0} MiB for a file of {file_mib:.0}"
        );
    }
}

/// File to truncate while it is read, if set.
static CUT: Mutex<Option<PathBuf>> = Mutex::new(None);

fn cut(loading: Loading<'_>) {
    let path = CUT.lock().unwrap().take_if(|_| loading.read > 0);
    if let Some(path) = path {
        OpenOptions::new().write(true).open(path).unwrap().set_len(4096).unwrap();
    }
}

#[test]
fn a_fault_of_the_file_is_named() {
    let _alone = alone();
    on_loading(cut);
    let refusal = |change: &dyn Fn(&str, Tensor) -> Tensor| {
        let found = entries("targets", None);
        let entry = found.into_iter().find(|entry| entry.name == "qwen3").unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(entry.path.join("config.json"), dir.path().join("config.json")).unwrap();
        let file = TensorFile::open(&entry.path.join("model.safetensors")).unwrap();
        let read = |name: String| {
            let tensor = change(&name, file.any_tensor(&name).unwrap());
            (name, tensor)
        };
        let path = dir.path().join("model.safetensors");
        write_safetensors(&path, &file.names().into_iter().map(read).collect::<Vec<_>>()).unwrap();
        let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
        (Target::load(dir.path(), &options).unwrap_err().to_string(), path)
    };
    const NAME: &str = "model.layers.1.mlp.up_proj.weight";
    let of_one = |name: &str, tensor: Tensor, other: fn(&Tensor) -> Tensor| {
        if name == NAME { other(&tensor) } else { tensor }
    };
    let (shape, path) =
        refusal(&|name, tensor| of_one(name, tensor, |x| x.narrow(0, 0, 3).contiguous()));
    let expected = format!("{}: tensor {NAME} has shape [3, ", path.display());
    assert!(shape.contains(NAME) && shape.contains("has shape [3, "), "{shape} for {expected}");
    let (kind, _) = refusal(&|name, tensor| of_one(name, tensor, |x| x.to_kind(Kind::Int64)));
    assert!(kind.contains(NAME) && kind.contains("Int64"), "{kind}");

    let (dir, _) = large(Kind::BFloat16);
    let path = dir.path().join("model.safetensors");
    *CUT.lock().unwrap() = Some(path.clone());
    let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
    let short = Target::load(dir.path(), &options).unwrap_err();
    let cause = std::error::Error::source(&short).map(ToString::to_string).unwrap_or_default();
    assert!(short.to_string().contains(path.to_str().unwrap()), "{short}");
    assert!(format!("{short} {cause}").contains("it has become shorter: 4096 bytes"), "{cause}");
}
