//! Stored hidden states: one safetensors file per dataset row, as speculators writes them.
//!
//! `hs_{row}.safetensors` holds `hidden_states` [tokens, slots, hidden] and `token_ids`; the
//! slots are the captured layers in ascending order and usually the last layer's output. The
//! format does not say which layers those are. Our files do, in their metadata.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use dflash_identity::TargetIdentity;
use safetensors::tensor::TensorView;
use safetensors::{Dtype as StoredDtype, SafeTensors};

use crate::error::Error;
use crate::fetch::Request;
use crate::record::{Dtype, HiddenStates, f16_to_f32};

/// Metadata key of the layer ids in files that we write.
const LAYER_IDS: &str = "layer_ids";
/// Metadata key of the target in files that we write.
const TARGET: &str = "target";

/// A directory of stored samples.
#[derive(Debug, Clone)]
pub struct OfflineFiles {
    dir: PathBuf,
    target: Option<TargetIdentity>,
}

/// What looking for a stored sample found.
#[derive(Debug)]
pub(crate) enum Stored {
    /// The sample.
    Found(HiddenStates),
    /// No file.
    Absent,
    /// A file of other tokens: the dataset has changed since.
    Stale(Error),
}

/// What a file must hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) layer_ids: &'a [u32],
    pub(crate) hidden_size: usize,
}

impl OfflineFiles {
    /// Files in `dir`, which need not exist yet.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, target: None }
    }

    /// The same files as ones of `target`: what is written says so, and what another target's
    /// files say is refused.
    #[must_use]
    pub fn of_target(self, target: Option<TargetIdentity>) -> Self {
        Self { target, ..self }
    }

    /// The file of dataset row `sample`.
    pub fn path(&self, sample: u64) -> PathBuf {
        self.dir.join(format!("hs_{sample}.safetensors"))
    }

    /// Whether any sample is stored; false also when the directory cannot be listed.
    pub(crate) fn has_any(&self) -> bool {
        let is_sample = |entry: fs::DirEntry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("hs_") && name.ends_with(".safetensors")
        };
        fs::read_dir(&self.dir).is_ok_and(|mut dir| dir.any(|entry| entry.is_ok_and(is_sample)))
    }

    /// Reads the sample of `request`. A longer stored prompt that starts with the request's
    /// tokens serves too: targets are causal.
    ///
    /// # Errors
    /// [`Error::ReadFile`], [`Error::BadFile`], [`Error::StatesOfOtherTarget`], [`Error::Shape`],
    /// or a bad row.
    pub(crate) fn read(&self, request: &Request, wanted: Wanted<'_>) -> Result<Stored, Error> {
        let path = self.path(request.sample);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Stored::Absent),
            Err(source) => return Err(Error::ReadFile { path, source }),
        };
        self.check_target(&path, &bytes)?;
        let (token_ids, states) = parse_file(&path, &bytes, wanted)?;
        let origin = path.display().to_string();
        if let Some(position) = first_difference(&token_ids, &request.input_ids) {
            let sample = request.sample;
            return Ok(Stored::Stale(Error::OtherTokens { origin, sample, position }));
        }
        let states = states.prefix(request.input_ids.len());
        states.check_rows(&origin)?;
        Ok(Stored::Found(states))
    }

    /// Other software's files do not say which target they are of; ours do.
    fn check_target(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        let bad = |reason: String| bad_file(path, reason);
        let (_, header) =
            SafeTensors::read_metadata(bytes).map_err(|error| bad(error.to_string()))?;
        let stated = header.metadata().as_ref().and_then(|metadata| metadata.get(TARGET));
        let (Some(target), Some(stated)) = (&self.target, stated) else { return Ok(()) };
        let stated: TargetIdentity =
            serde_json::from_str(stated).map_err(|error| bad(error.to_string()))?;
        if stated.is_same_as(target) {
            return Ok(());
        }
        let (path, found, expected) = (path.into(), stated.to_string(), target.to_string());
        Err(Error::StatesOfOtherTarget { path, found, expected })
    }

    /// Stores a sample for later runs, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Files`], for instance when the disk is full.
    pub fn write(
        &self,
        sample: u64,
        token_ids: &[i64],
        states: &HiddenStates,
    ) -> Result<(), Error> {
        fs::create_dir_all(&self.dir).map_err(dflash_files::Error::io("create", &self.dir))?;
        let path = self.path(sample);
        let shape = vec![states.tokens, states.layer_ids.len(), states.hidden_size];
        let rows = interleave(states);
        let ids: Vec<u8> = token_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let mut metadata = HashMap::from([
            ("format".to_owned(), "pt".to_owned()),
            (LAYER_IDS.to_owned(), format!("{:?}", states.layer_ids)),
        ]);
        if let Some(target) = &self.target {
            let target = serde_json::to_string(target).expect("strings print");
            metadata.insert(TARGET.to_owned(), target);
        }
        let bytes = (|| {
            let rows = TensorView::new(stored_dtype(states.dtype), shape, &rows)?;
            let ids = TensorView::new(StoredDtype::I64, vec![token_ids.len()], &ids)?;
            let tensors = [("hidden_states", rows), ("token_ids", ids)];
            safetensors::serialize(tensors, Some(metadata))
        })()
        .map_err(|error| bad_file(&path, error.to_string()))?;
        Ok(dflash_files::write_bytes(&path, &bytes)?)
    }
}

fn bad_file(path: &Path, reason: String) -> Error {
    Error::BadFile { path: path.into(), reason }
}

fn stored_dtype(dtype: Dtype) -> StoredDtype {
    match dtype {
        Dtype::Bf16 => StoredDtype::BF16,
        Dtype::F32 => StoredDtype::F32,
    }
}

/// [tokens, layers, hidden], the order of the file.
fn interleave(states: &HiddenStates) -> Vec<u8> {
    let width = states.row_bytes();
    let mut out = Vec::with_capacity(states.byte_len());
    for row in 0..states.tokens {
        for &id in &states.layer_ids {
            let layer = states.layer(id).unwrap_or_default();
            out.extend_from_slice(&layer[row * width..][..width]);
        }
    }
    out
}

/// Tokens and states of one file, ours, speculators' or a stock vLLM's.
///
/// # Errors
/// [`Error::BadFile`] and [`Error::Shape`].
pub(crate) fn parse_file(
    path: &Path,
    bytes: &[u8],
    wanted: Wanted<'_>,
) -> Result<(Vec<i64>, HiddenStates), Error> {
    let bad = |reason: String| bad_file(path, reason);
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| bad(error.to_string()))?;
    let file = SafeTensors::deserialize(bytes).map_err(|error| bad(error.to_string()))?;
    let tensor = |name| file.tensor(name).map_err(|error| bad(error.to_string()));
    let (rows, ids) = (tensor("hidden_states")?, tensor("token_ids")?);
    if ids.dtype() != StoredDtype::I64 || ids.shape().len() != 1 {
        return Err(bad(format!("token_ids is {:?} {:?}", ids.dtype(), ids.shape())));
    }
    let stated = header.metadata().as_ref().and_then(|metadata| metadata.get(LAYER_IDS));
    let stated = stated.and_then(|ids| serde_json::from_str(ids).ok());
    let token_ids = ids.data().chunks_exact(8).map(i64_of).collect();
    Ok((token_ids, split_slots(path, &rows, stated, wanted)?))
}

fn i64_of(bytes: &[u8]) -> i64 {
    i64::from_le_bytes(bytes.try_into().expect("chunks of eight"))
}

/// [tokens, slots, hidden] as one record of the wanted layers.
fn split_slots(
    path: &Path,
    rows: &TensorView<'_>,
    stated: Option<Vec<u32>>,
    wanted: Wanted<'_>,
) -> Result<HiddenStates, Error> {
    let (dtype, data) = match rows.dtype() {
        StoredDtype::BF16 => (Dtype::Bf16, Cow::Borrowed(rows.data())),
        StoredDtype::F32 => (Dtype::F32, Cow::Borrowed(rows.data())),
        StoredDtype::F16 => (Dtype::F32, Cow::Owned(f16_to_f32(rows.data()))),
        other => return Err(bad_file(path, format!("hidden_states is {other:?}"))),
    };
    let columns = slots_of(rows.shape(), stated.as_deref(), wanted);
    let (&[tokens, slots, hidden], Some(columns)) = (rows.shape(), columns) else {
        return Err(Error::Shape {
            origin: path.display().to_string(),
            expected: format!("layers {:?} of {} elements", wanted.layer_ids, wanted.hidden_size),
            got: format!("hidden_states {:?} of layers {stated:?}", rows.shape()),
        });
    };
    let width = hidden * dtype.size();
    let gather = |slot: &usize| -> Bytes {
        let mut out = Vec::with_capacity(tokens * width);
        for row in 0..tokens {
            out.extend_from_slice(&data[(row * slots + slot) * width..][..width]);
        }
        out.into()
    };
    let layers = columns.iter().map(gather).collect();
    HiddenStates::new(wanted.layer_ids.to_vec(), tokens, hidden, dtype, layers)
}

/// The slot of each wanted layer: by the ids that the file states, else by position, where one
/// slot more than wanted is the last layer's output.
fn slots_of(shape: &[usize], stated: Option<&[u32]>, wanted: Wanted<'_>) -> Option<Vec<usize>> {
    let &[_, slots, hidden] = shape else { return None };
    let count = wanted.layer_ids.len();
    if hidden != wanted.hidden_size {
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

/// Where `prompt` stops being a prefix of `stored`, if it does.
pub(crate) fn first_difference(stored: &[i64], prompt: &[i64]) -> Option<usize> {
    let differs = stored.iter().zip(prompt).position(|(a, b)| a != b);
    differs.or((stored.len() < prompt.len()).then_some(stored.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{f32s, sample};

    const WANTED: Wanted<'static> = Wanted { layer_ids: &[2, 5], hidden_size: 4 };

    fn request(input_ids: &[i64]) -> Request {
        Request { sample: 7, input_ids: input_ids.to_vec() }
    }

    /// A directory with sample 7 stored for tokens 10, 11, 12.
    fn stored(layer_ids: &[u32]) -> (tempfile::TempDir, OfflineFiles) {
        let dir = tempfile::tempdir().unwrap();
        let files = OfflineFiles::new(dir.path().join("hidden_states"));
        files.write(7, &[10, 11, 12], &sample(layer_ids, 3, 4)).unwrap();
        (dir, files)
    }

    fn found(files: &OfflineFiles, input_ids: &[i64]) -> HiddenStates {
        match files.read(&request(input_ids), WANTED).unwrap() {
            Stored::Found(states) => states,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_stored_sample_is_read_back() {
        let (_dir, files) = stored(&[2, 5, 8]);
        let states = sample(&[2, 5], 3, 4);
        assert!(files.has_any());
        assert_eq!(found(&files, &[10, 11, 12]), states);
        assert_eq!(found(&files, &[10, 11]), states.prefix(2));
    }

    #[test]
    fn absent_and_stale_samples_are_told_apart() {
        let (_dir, files) = stored(&[2, 5]);
        let other = Request { sample: 8, input_ids: vec![1] };
        assert!(matches!(files.read(&other, WANTED).unwrap(), Stored::Absent));
        for (tokens, at) in [(vec![10, 99, 12], 1), (vec![10, 11, 12, 13], 3)] {
            let Stored::Stale(Error::OtherTokens { position, .. }) =
                files.read(&request(&tokens), WANTED).unwrap()
            else {
                panic!("{tokens:?}")
            };
            assert_eq!(position, at);
        }
    }

    #[test]
    fn slots_go_by_stated_ids_or_by_position() {
        let check = |shape: &[usize], stated: Option<&[u32]>| slots_of(shape, stated, WANTED);
        assert_eq!(check(&[3, 3, 4], Some(&[1, 2, 5])), Some(vec![1, 2]));
        assert_eq!(check(&[3, 2, 4], None), Some(vec![0, 1]));
        assert_eq!(check(&[3, 3, 4], None), Some(vec![0, 1]));
        assert_eq!(check(&[3, 4, 4], None), None);
        assert_eq!(check(&[3, 2, 4], Some(&[2, 6])), None);
        assert_eq!(check(&[3, 2, 8], Some(&[2, 5])), None);
        assert_eq!(check(&[3, 8], None), None);
    }

    #[test]
    fn broken_files_are_named() {
        let (_dir, files) = stored(&[2, 3]);
        let text = files.read(&request(&[10]), WANTED).unwrap_err().to_string();
        assert!(text.contains("hs_7.safetensors") && text.contains("[2, 5]"), "{text}");
        let whole = fs::read(files.path(7)).unwrap();
        fs::write(files.path(7), &whole[..whole.len() - 9]).unwrap();
        assert!(matches!(files.read(&request(&[10]), WANTED), Err(Error::BadFile { .. })));
    }

    #[test]
    fn float16_files_are_widened() {
        let dir = tempfile::tempdir().unwrap();
        let files = OfflineFiles::new(dir.path().into());
        let rows: Vec<u8> =
            (1..=8).flat_map(|v| half::f16::from_f32(v as f32).to_le_bytes()).collect();
        let ids = 10i64.to_le_bytes();
        let rows = TensorView::new(StoredDtype::F16, vec![1, 2, 4], &rows).unwrap();
        let ids = TensorView::new(StoredDtype::I64, vec![1], &ids).unwrap();
        let tensors = [("hidden_states", rows), ("token_ids", ids)];
        fs::write(files.path(7), safetensors::serialize(tensors, None).unwrap()).unwrap();
        assert_eq!(f32s(found(&files, &[10]).layer(5).unwrap()), [5.0, 6.0, 7.0, 8.0]);
    }
}
