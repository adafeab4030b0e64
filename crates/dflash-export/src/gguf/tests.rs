//! Types as ggml defines them, and files that are not whole or not ours.

use std::path::PathBuf;

use super::file::Value;
use super::*;

fn wave(count: i64) -> Tensor {
    let positions = Tensor::arange(count, (Kind::Float, Device::Cpu));
    (positions * 1.3).sin() * 0.7
}

/// A file with one tensor of each type.
fn sample(dir: &tempfile::TempDir) -> PathBuf {
    let path = dir.path().join("x.gguf");
    let named = |name: &str, tensor_type, tensor| Named { name: name.into(), tensor_type, tensor };
    let tensors = [
        named("f32", TensorType::F32, wave(6).view([2, 3])),
        named("q8", TensorType::Q80, wave(128).view([2, 64])),
        named("bf16", TensorType::Bf16, wave(5)),
        named("f16", TensorType::F16, wave(5)),
        named("ids", TensorType::I64, Tensor::from_slice(&[3i64, 1 << 40])),
    ];
    let keys = [
        ("a.text".to_owned(), Value::Text("dflash".into())),
        ("a.list".to_owned(), Value::Integers(vec![2, 3])),
        ("a.flags".to_owned(), Value::Flags(vec![true, false])),
        ("a.names".to_owned(), Value::Texts(vec!["x".into(), "Ġy".into()])),
        ("a.eps".to_owned(), Value::Float(1e-6)),
    ];
    write::file(&path, &keys, &tensors).unwrap();
    path
}

fn read(file: &GgufFile, name: &str, shape: &[i64], kind: Kind) -> Tensor {
    let tensor = Tensor::zeros(shape, (kind, Device::Cpu));
    file.read_into(name, &tensor).unwrap();
    tensor
}

#[test]
fn what_is_written_reads_back_in_every_type() {
    let dir = tempfile::tempdir().unwrap();
    let file = GgufFile::open(&sample(&dir)).unwrap();
    assert!(read(&file, "f32", &[2, 3], Kind::Float).equal(&wave(6).view([2, 3])));
    let rounded = |kind| wave(5).to_kind(kind).to_kind(Kind::Float);
    assert!(read(&file, "bf16", &[5], Kind::Float).equal(&rounded(Kind::BFloat16)));
    assert!(read(&file, "f16", &[5], Kind::Float).equal(&rounded(Kind::Half)));
    let ids = read(&file, "ids", &[2], Kind::Int64);
    assert_eq!(Vec::<i64>::try_from(ids).unwrap(), [3, 1 << 40]);
    assert_eq!(file.value("a.eps"), Some(&Value::Float(1e-6)));
    assert_eq!(file.value("a.list"), Some(&Value::Integers(vec![2, 3])));
    assert_eq!(file.value("a.flags"), Some(&Value::Flags(vec![true, false])));
    let names = Value::Texts(vec!["x".into(), "Ġy".into()]);
    assert_eq!(file.value("a.names"), Some(&names));
    let error = file.read_into("f32", &Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)));
    assert!(error.unwrap_err().to_string().contains("shape [2, 3], expected [3, 2]"));
}

/// The first block of `q8` as gguf-py 0.19 quantizes and dequantizes the same values.
#[test]
fn q8_0_is_ggmls() {
    let dir = tempfile::tempdir().unwrap();
    let path = sample(&dir);
    let bytes = std::fs::read(&path).unwrap();
    let block: Vec<u8> = include_str!("q8_block.hex")
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    assert_eq!(block.len(), 34);
    assert!(bytes.windows(34).any(|window| window == block), "{block:x?}");
    let read = read(&GgufFile::open(&path).unwrap(), "q8", &[2, 64], Kind::Float);
    let difference = (read - wave(128).view([2, 64])).abs().max().double_value(&[]);
    assert!((1e-4..0.7 / 127.0 * 0.6).contains(&difference), "{difference}");
}

#[test]
fn no_change_of_a_byte_of_the_header_panics_or_takes_much_memory() {
    let dir = tempfile::tempdir().unwrap();
    let whole = std::fs::read(sample(&dir)).unwrap();
    let path = dir.path().join("bad.gguf");
    let mut refused = 0;
    for at in 0..480.min(whole.len()) {
        for value in [0, 1, 9, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            std::fs::write(&path, &bytes).unwrap();
            refused += usize::from(GgufFile::open(&path).is_err());
        }
    }
    for length in 0..whole.len() - 1 {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = GgufFile::open(&path).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("bad.gguf"), "{error}");
    }
    assert!(refused > 300, "{refused}");
}
