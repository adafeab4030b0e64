//! What the header of a safetensors file says, and whether the file is as long as it says.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::Error;

/// The format's own limit, bytes.
const LONGEST_HEADER: u64 = 100_000_000;

#[derive(Debug, Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Numbers in the file at `path`, and their type where it is one.
///
/// # Errors
/// A file that is not whole.
pub(crate) fn parameters(path: &Path) -> Result<(u64, Option<String>), Error> {
    let fault = |source| Error::Read { path: path.into(), source };
    let damaged = |reason: String| Error::Damaged { path: path.into(), reason };
    let mut file = File::open(path).map_err(fault)?;
    let length = file.metadata().map_err(fault)?.len();
    let mut prefix = [0; 8];
    file.read_exact(&mut prefix).map_err(|_| damaged("it is shorter than its header".into()))?;
    let header_length = u64::from_le_bytes(prefix);
    if header_length > LONGEST_HEADER.min(length.saturating_sub(8)) {
        return Err(damaged("it is shorter than its header".to_owned()));
    }
    let mut header = vec![0; header_length as usize];
    file.read_exact(&mut header).map_err(fault)?;
    let tensors = tensors(&header).map_err(|error| damaged(error.to_string()))?;
    let end = tensors.iter().map(|tensor| tensor.data_offsets.1).max().unwrap_or_default();
    if end.saturating_add(8 + header_length) != length {
        let expected = end.saturating_add(8 + header_length);
        return Err(damaged(format!("it has {length} of {expected} bytes")));
    }
    let count = |tensor: &Tensor| tensor.shape.iter().product::<u64>();
    let first = tensors.first().map(|tensor| tensor.dtype.clone());
    let one_type = tensors.iter().all(|tensor| Some(&tensor.dtype) == first.as_ref());
    Ok((tensors.iter().map(count).sum(), first.filter(|_| one_type)))
}

fn tensors(header: &[u8]) -> serde_json::Result<Vec<Tensor>> {
    let mut entries: HashMap<String, Value> = serde_json::from_slice(header)?;
    entries.remove("__metadata__");
    entries.into_values().map(serde_json::from_value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_cut_short_is_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],
            "data_offsets":[0,12]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[12,20]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 20]);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(parameters(&path).unwrap(), (10, Some("BF16".to_owned())));
        for length in [0, 7, 20, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..length]).unwrap();
            let refused = parameters(&path).unwrap_err().to_string();
            assert!(refused.contains("model.safetensors is damaged: it "), "{refused}");
        }
    }
}
