//! Counts of supervised tokens, and the files that hold them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::Sample;
use crate::error::Error;

/// The file of our datasets that holds the counts.
pub(crate) const FILE: &str = "token_freq.json";

/// How often each token is supervised.
#[derive(Debug, Default)]
pub(crate) struct TokenCounts(HashMap<i64, u64>);

impl TokenCounts {
    pub(crate) fn add(&mut self, sample: &Sample) {
        for (&id, _) in sample.input_ids.iter().zip(&sample.loss_mask).filter(|(_, mask)| **mask) {
            *self.0.entry(id).or_default() += 1;
        }
    }

    /// Ascending by id.
    pub(crate) fn into_sorted(self) -> Vec<(i64, u64)> {
        let mut counts: Vec<(i64, u64)> = self.0.into_iter().collect();
        counts.sort_unstable();
        counts
    }
}

/// `{"id": count, ...}`.
pub(crate) fn to_json(counts: &[(i64, u64)]) -> Vec<u8> {
    let entries: Vec<String> =
        counts.iter().map(|(id, count)| format!("\"{id}\": {count}")).collect();
    format!("{{{}}}\n", entries.join(", ")).into_bytes()
}

/// Reads what [`to_json`] wrote, ascending by id; `None` if there is no such file.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<(i64, u64)>>, Error> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|source| Error::Read { path: path.into(), source })?,
    };
    let counts: BTreeMap<i64, u64> = serde_json::from_slice(&text)
        .map_err(|source| Error::Json { path: path.into(), source })?;
    Ok(Some(counts.into_iter().collect()))
}

/// The dictionary as `torch.save` wrote it before it used zip files: five pickles in a row, of
/// which the fourth is the object. `torch.load(weights_only=True)` still reads that layout, and
/// speculators' trainer asks for `token_freq.pt` when the vocabulary is pruned.
pub(crate) fn to_torch(counts: &[(i64, u64)]) -> Vec<u8> {
    // torch.serialization.MAGIC_NUMBER, PROTOCOL_VERSION and the sizes of C types; see
    // `_legacy_save` there.
    const MAGIC: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
    const PROTOCOL: &[u8] = b"\x80\x02M\xe9\x03.";
    const SYSTEM: &[u8] = b"\x80\x02}(X\x10\0\0\0protocol_versionM\xe9\x03\
        X\x0d\0\0\0little_endian\x88\
        X\x0a\0\0\0type_sizes}(X\x05\0\0\0shortK\x02X\x03\0\0\0intK\x04X\x04\0\0\0longK\x04uu.";
    const NO_STORAGES: &[u8] = b"\x80\x02].";
    let mut out = [MAGIC, PROTOCOL, SYSTEM, b"\x80\x02}("].concat();
    for &(id, count) in counts {
        push_integer(&mut out, id as u64);
        push_integer(&mut out, count);
    }
    out.extend_from_slice(b"u.");
    out.extend_from_slice(NO_STORAGES);
    out
}

/// Pickle's `LONG1` with eight bytes, signed: `value` must be below 2^63.
fn push_integer(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(b"\x8a\x08");
    out.extend_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_supervised_tokens_count() {
        let mut counts = TokenCounts::default();
        for _ in 0..2 {
            counts.add(&Sample {
                input_ids: vec![5, 3, 3, 5],
                loss_mask: vec![false, true, true, true],
            });
        }
        let counts = counts.into_sorted();
        assert_eq!(counts, [(3, 4), (5, 2)]);
        assert_eq!(to_json(&counts), b"{\"3\": 4, \"5\": 2}\n");
        assert_eq!(to_json(&[]), b"{}\n");
    }

    #[test]
    fn the_torch_file_is_five_pickles() {
        let bytes = to_torch(&[(3, 4)]);
        let pickles = bytes.windows(2).filter(|pair| *pair == b"\x80\x02").count();
        assert_eq!(pickles, 5);
        let dictionary = b"\x80\x02}(\x8a\x08\x03\0\0\0\0\0\0\0\x8a\x08\x04\0\0\0\0\0\0\0u.";
        assert!(bytes.windows(dictionary.len()).any(|window| window == dictionary));
    }
}
