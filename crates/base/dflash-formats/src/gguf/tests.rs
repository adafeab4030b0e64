//! Files written by us, and files that are damaged or not ours.

use super::*;

/// A file with tensors of several types, whose bytes are all 7.
fn sample(dir: &tempfile::TempDir) -> PathBuf {
    let path = dir.path().join("x.gguf");
    let tensor = |name: &str, tensor_type, shape: &[i64]| NewTensor {
        name: name.into(),
        tensor_type,
        shape: shape.to_vec(),
    };
    let tensors = [
        tensor("f32", TensorType::F32, &[2, 3]),
        tensor("q8", TensorType::Q80, &[2, 64]),
        tensor("ids", TensorType::I64, &[2]),
    ];
    let mut writer = GgufWriter::create(&path, &keys(), &tensors).unwrap();
    for bytes in [24, 68, 68, 16] {
        writer.append(&vec![7; bytes]).unwrap();
    }
    writer.finish().unwrap();
    path
}

fn keys() -> [(String, Value); 6] {
    [
        ("general.architecture", Value::Text("dflash".into())),
        ("dflash.block_size", Value::Integer(8)),
        ("a.list", Value::Integers(vec![2, 3])),
        ("a.flags", Value::Flags(vec![true, false])),
        ("a.names", Value::Texts(vec!["x".into(), "Ġy".into()])),
        ("a.eps", Value::Float(1e-6)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
}

#[test]
fn what_is_written_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let file = GgufFile::open(&sample(&dir)).unwrap();
    for (key, value) in keys() {
        assert_eq!(file.value(&key), Some(&value), "{key}");
    }
    let q8 = file.tensor("q8").unwrap();
    assert_eq!((&q8.shape[..], q8.tensor_type), (&[2, 64][..], TensorType::Q80));
    assert_eq!(file.bytes(q8, 32..128).unwrap(), vec![7; 3 * Q8_BYTES]);
    assert!(file.has("ids") && !file.has("other"));
    let missing = file.tensor("other").unwrap_err().to_string();
    assert!(missing.ends_with("x.gguf has no tensor other"), "{missing}");
}

#[test]
fn no_change_of_a_byte_of_the_header_panics_or_takes_much_memory() {
    let dir = tempfile::tempdir().unwrap();
    let whole = std::fs::read(sample(&dir)).unwrap();
    let path = dir.path().join("bad.gguf");
    let mut refused = 0;
    for at in 0..whole.len() - 192 {
        for value in [0, 1, 9, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            std::fs::write(&path, &bytes).unwrap();
            refused += usize::from(GgufFile::open(&path).is_err());
        }
    }
    assert!(refused > 300, "{refused}");
    // The last tensor ends 16 bytes before the alignment.
    for length in 0..whole.len() - 16 {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = GgufFile::open(&path).map(drop).unwrap_err().to_string();
        assert!(error.contains("bad.gguf is not a readable GGUF file"), "{error}");
    }
    for other in [&b"PK\x03\x04 and more of it"[..], b""] {
        std::fs::write(&path, other).unwrap();
        assert!(GgufFile::open(&path).is_err());
    }
}
