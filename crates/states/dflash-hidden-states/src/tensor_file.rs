//! Hidden states of one sample in a safetensors file: ours, speculators' or a stock vLLM's.
//!
//! A file is read in blocks, only as far as needed, and its header's claims are not trusted: a
//! damaged or foreign file costs no more than a good one.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use crc32fast::Hasher;
use dflash_formats::safetensors::{Dtype as StoredDtype, Header, TensorInfo};

use crate::digest::hex;
use crate::error::Error;
use crate::record::{Dtype, HiddenStates, f16_to_f32};
use crate::text::clean;

/// Metadata key of the layer ids in files that we write.
pub(crate) const LAYER_IDS: &str = "layer_ids";
/// Metadata key of the [`digest`] in files that we write.
pub(crate) const DIGEST: &str = "digest";

/// Metadata key that other writers set too, to the library that the tensors are for.
pub(crate) const FORMAT: &str = "format";

/// Maximum header size; a header of two tensors takes a few hundred bytes.
const LARGEST_HEADER: u64 = 1 << 20;
/// Bytes read at a time, unless a row is larger.
const BLOCK: usize = 1 << 18;
/// Maximum number of slots; no target has as many.
const MOST_SLOTS: usize = 1024;

/// What a file must contain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) layer_ids: &'a [u32],
    pub(crate) hidden_size: usize,
    /// Number of leading rows.
    pub(crate) tokens: usize,
}

/// An open file whose header has been read.
#[derive(Debug)]
pub(crate) struct TensorFile<R> {
    path: PathBuf,
    reader: R,
    header: Header,
}

/// Opens only regular files, since a pipe or a device would block the reader.
pub(crate) fn open_regular(path: &Path, follow_links: bool) -> io::Result<File> {
    let kind = if follow_links { fs::metadata(path)? } else { fs::symlink_metadata(path)? };
    if !kind.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    // It may have been replaced since the check.
    let flags = if follow_links { 0 } else { libc::O_NOFOLLOW };
    let flags = flags | libc::O_NONBLOCK;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// The checksum of the content of our files.
pub(crate) fn digest(
    dtype: StoredDtype,
    shape: &[usize],
    layer_ids: &str,
    token_ids: &[u8],
    rows: &[u8],
) -> String {
    let mut hasher = begin_digest(dtype, shape, layer_ids);
    hasher.update(token_ids);
    hasher.update(rows);
    hex(hasher.finalize())
}

fn begin_digest(dtype: StoredDtype, shape: &[usize], layer_ids: &str) -> Hasher {
    let mut hasher = Hasher::new();
    hasher.update(format!("{dtype:?} {shape:?} {layer_ids}").as_bytes());
    hasher
}

impl<R: Read + Seek> TensorFile<R> {
    /// Reads the header of a file of `size` bytes.
    ///
    /// # Errors
    /// [`Error::BadFile`], [`Error::ReadFile`].
    pub(crate) fn open(path: &Path, mut reader: R, size: u64) -> Result<Self, Error> {
        let header = Header::read(path, &mut reader, size, LARGEST_HEADER);
        let header = header.map_err(|error| match error {
            dflash_formats::Error::Read { path, source } => Error::ReadFile { path, source },
            dflash_formats::Error::Damaged { reason, .. } => bad_file(path, &reason),
            other => bad_file(path, &other.to_string()),
        })?;
        Ok(Self { path: path.into(), reader, header })
    }

    /// Number of tokens in the file, and the first of them, up to `most`.
    ///
    /// # Errors
    /// [`Error::BadFile`], [`Error::ReadFile`].
    pub(crate) fn token_ids(&mut self, most: usize) -> Result<(usize, Vec<i64>), Error> {
        let info = self.ids_info()?;
        let tokens = info.shape[0];
        let mut bytes = vec![0; 8 * tokens.min(most)];
        self.read_at(info.data_offsets.0, &mut bytes)?;
        let id = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("chunks of eight"));
        Ok((tokens, bytes.chunks_exact(8).map(id).collect()))
    }

    /// The wanted layers, up to the last wanted row. A file with a digest is verified completely.
    ///
    /// # Errors
    /// [`Error::BadFile`], [`Error::ReadFile`], [`Error::Shape`].
    pub(crate) fn states(&mut self, wanted: Wanted<'_>) -> Result<HiddenStates, Error> {
        let (ids, rows) = (self.ids_info()?, self.info("hidden_states")?);
        let stated = self.stated(LAYER_IDS);
        let layer_ids: Option<Vec<u32>> =
            stated.as_deref().and_then(|ids| serde_json::from_str(ids).ok());
        let columns = slots_of(&rows.shape, layer_ids.as_deref(), wanted);
        let origin = self.path.display().to_string();
        let misfit = || Error::Shape {
            origin: origin.clone(),
            expected: format!("layers {:?} of {} elements", wanted.layer_ids, wanted.hidden_size),
            got: clean(&format!("hidden_states {:?} of layers {layer_ids:?}", rows.shape), 300),
        };
        let Some(digest) = self.stated(DIGEST) else {
            self.check_foreign()?;
            let columns = columns.ok_or_else(misfit)?;
            self.check_rows(&ids, &rows)?;
            return self.gather(&rows, &columns, wanted, None);
        };
        let stated = stated.unwrap_or_default();
        let mut hasher = begin_digest(rows.dtype, &rows.shape, &stated);
        self.hash(&ids, &mut hasher)?;
        let states = match &columns {
            Some(columns) if self.check_rows(&ids, &rows).is_ok() => {
                Ok(self.gather(&rows, columns, wanted, Some(&mut hasher))?)
            }
            _ => {
                self.hash(&rows, &mut hasher)?;
                Err(misfit())
            }
        };
        if hex(hasher.finalize()) != digest {
            return Err(bad_file(&self.path, "it is damaged: it does not have its digest"));
        }
        states
    }

    /// Number of rows of hidden states according to the header.
    pub(crate) fn rows(&self) -> Option<usize> {
        self.header.metadata.info("hidden_states")?.shape.first().copied()
    }

    pub(crate) fn into_inner(self) -> R {
        self.reader
    }

    /// The header's metadata value of `key`.
    pub(crate) fn stated(&self, key: &str) -> Option<String> {
        self.header.metadata.metadata().as_ref()?.get(key).cloned()
    }

    fn info(&self, name: &str) -> Result<TensorInfo, Error> {
        let info = self.header.metadata.info(name).cloned();
        info.ok_or_else(|| bad_file(&self.path, &format!("it has no {name}")))
    }

    fn ids_info(&self) -> Result<TensorInfo, Error> {
        let info = self.info("token_ids")?;
        if info.dtype == StoredDtype::I64 && info.shape.len() == 1 {
            return Ok(info);
        }
        Err(bad_file(&self.path, &format!("token_ids is {:?} {:?}", info.dtype, info.shape)))
    }

    /// Files by other writers have no digest, and no metadata except possibly a format. Any other
    /// key is ours, from a file older than digests or a damaged one.
    fn check_foreign(&self) -> Result<(), Error> {
        let keys = self.header.metadata.metadata().iter().flat_map(HashMap::keys);
        let reason = match keys.filter(|key| *key != FORMAT).max_by_key(|key| *key == LAYER_IDS) {
            None => return Ok(()),
            Some(key) if key == LAYER_IDS => "an earlier release wrote it, without a digest",
            Some(key) => &format!("its metadata has \"{key}\" and no digest: it is damaged"),
        };
        Err(bad_file(&self.path, reason))
    }

    /// Checks that there is one row per token, of a supported type.
    fn check_rows(&self, ids: &TensorInfo, rows: &TensorInfo) -> Result<(), Error> {
        if !matches!(rows.dtype, StoredDtype::BF16 | StoredDtype::F32 | StoredDtype::F16) {
            return Err(bad_file(&self.path, &format!("hidden_states is {:?}", rows.dtype)));
        }
        let (tokens, got) = (ids.shape[0], rows.shape.first().copied().unwrap_or(0));
        if tokens == got {
            return Ok(());
        }
        Err(bad_file(&self.path, &format!("it has {got} rows for {tokens} tokens")))
    }

    /// The selected slots of the wanted rows. If there is a digest, the file is read to the end.
    fn gather(
        &mut self,
        rows: &TensorInfo,
        columns: &[usize],
        wanted: Wanted<'_>,
        mut hasher: Option<&mut Hasher>,
    ) -> Result<HiddenStates, Error> {
        let (stored, slots) = (rows.shape[0], rows.shape[1]);
        let tokens = stored.min(wanted.tokens);
        let width = wanted.hidden_size * rows.dtype.bitsize() / 8;
        let block_rows = (BLOCK / (slots * width).max(1)).max(1);
        let mut layers = vec![Vec::with_capacity(tokens * width); columns.len()];
        let mut block = Vec::new();
        let read = if hasher.is_some() { stored } else { tokens };
        for first in (0..read).step_by(block_rows) {
            block.resize(block_rows.min(read - first) * slots * width, 0);
            self.read_at(rows.data_offsets.0 + first * slots * width, &mut block)?;
            if let Some(hasher) = &mut hasher {
                hasher.update(&block);
            }
            let kept = block.chunks_exact(slots * width).take(tokens.saturating_sub(first));
            for row in kept {
                for (layer, slot) in layers.iter_mut().zip(columns) {
                    layer.extend_from_slice(&row[slot * width..][..width]);
                }
            }
        }
        let (dtype, layers): (_, Vec<Bytes>) = match rows.dtype {
            StoredDtype::BF16 => (Dtype::Bf16, layers.into_iter().map(Bytes::from).collect()),
            StoredDtype::F16 => {
                (Dtype::F32, layers.iter().map(|layer| f16_to_f32(layer).into()).collect())
            }
            _ => (Dtype::F32, layers.into_iter().map(Bytes::from).collect()),
        };
        HiddenStates::new(wanted.layer_ids.to_vec(), tokens, wanted.hidden_size, dtype, layers)
    }

    /// Adds a whole tensor to a digest.
    fn hash(&mut self, info: &TensorInfo, hasher: &mut Hasher) -> Result<(), Error> {
        let (mut at, end) = info.data_offsets;
        let mut block = vec![0; BLOCK.min(end - at)];
        while at < end {
            block.truncate(end - at);
            self.read_at(at, &mut block)?;
            hasher.update(&block);
            at += block.len();
        }
        Ok(())
    }

    fn read_at(&mut self, offset: usize, buffer: &mut [u8]) -> Result<(), Error> {
        let start = SeekFrom::Start(self.header.data_start + offset as u64);
        let read = self.reader.seek(start).and_then(|_| self.reader.read_exact(buffer));
        read.map_err(|source| Error::ReadFile { path: self.path.clone(), source })
    }
}

pub(crate) fn bad_file(path: &Path, reason: &str) -> Error {
    Error::BadFile { path: path.into(), reason: clean(reason, 300) }
}

/// The slot of each wanted layer: by the ids in the file, or else by position, where one extra slot
/// is the last layer's output.
fn slots_of(shape: &[usize], stated: Option<&[u32]>, wanted: Wanted<'_>) -> Option<Vec<usize>> {
    let &[_, slots, hidden] = shape else { return None };
    let count = wanted.layer_ids.len();
    if hidden != wanted.hidden_size || slots > MOST_SLOTS {
        return None;
    }
    match stated {
        Some(stated) if stated.len() != slots => None,
        Some(stated) => {
            let slot_of = |id| stated.iter().position(|other| other == id);
            wanted.layer_ids.iter().map(slot_of).collect()
        }
        None => (slots == count || slots == count + 1).then(|| (0..count).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_go_by_stated_ids_or_by_position() {
        let wanted = Wanted { layer_ids: &[2, 5], hidden_size: 4, tokens: 3 };
        let check = |shape: &[usize], stated: Option<&[u32]>| slots_of(shape, stated, wanted);
        assert_eq!(check(&[3, 3, 4], Some(&[1, 2, 5])), Some(vec![1, 2]));
        assert_eq!(check(&[3, 2, 4], None), Some(vec![0, 1]));
        assert_eq!(check(&[3, 3, 4], None), Some(vec![0, 1]));
        assert_eq!(check(&[3, 4, 4], None), None);
        assert_eq!(check(&[3, 2, 4], Some(&[2, 6])), None);
        assert_eq!(check(&[3, 2, 8], Some(&[2, 5])), None);
        assert_eq!(check(&[3, 8], None), None);
    }
}
