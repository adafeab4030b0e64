//! Stored hidden states: one safetensors file per dataset row, as speculators writes them.
//!
//! `hs_{row}.safetensors` holds `hidden_states` [tokens, slots, hidden] and `token_ids`; the slots
//! are the auxiliary layers in ascending order and usually the last layer's output. The format does
//! not say which layers those are. Our files record them in their metadata, together with a digest.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dflash_identity::TargetIdentity;
use safetensors::Dtype as StoredDtype;
use safetensors::tensor::TensorView;

use crate::error::Error;
use crate::fetch::Request;
use crate::record::{Dtype, HiddenStates};
use crate::tensor_file::{
    DIGEST, FORMAT, LAYER_IDS, TensorFile, Wanted, bad_file, digest, open_regular,
};

/// Metadata key of the target in files that we write.
const TARGET: &str = "target";

/// A directory of stored samples.
#[derive(Debug, Clone)]
pub struct OfflineFiles {
    dir: PathBuf,
    target: Option<TargetIdentity>,
}

/// The result of looking for a stored sample.
#[derive(Debug)]
pub(crate) enum Stored {
    /// The sample.
    Found(HiddenStates),
    /// No file.
    Absent,
    /// A file with other tokens: the dataset has changed since.
    Stale(Error),
}

impl OfflineFiles {
    /// Files in `dir`, which need not exist yet.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, target: None }
    }

    /// The same files, for `target`: files that are written record it, and files of another target
    /// are refused.
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

    /// Reads the sample of `request`. A longer stored prompt that starts with the request's tokens
    /// can be used too, because targets are causal.
    ///
    /// # Errors
    /// [`Error::ReadFile`], [`Error::BadFile`], [`Error::StatesOfOtherTarget`], [`Error::Shape`],
    /// or a bad row.
    pub(crate) fn read(&self, request: &Request, wanted: Wanted<'_>) -> Result<Stored, Error> {
        let path = self.path(request.sample);
        let fault = |source| Error::ReadFile { path: path.clone(), source };
        let file = match open_regular(&path, true) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Stored::Absent),
            Err(source) => return Err(fault(source)),
        };
        let size = file.metadata().map_err(fault)?.len();
        let mut file = TensorFile::open(&path, file, size)?;
        self.check_target(&path, file.stated(TARGET))?;
        let (_, token_ids) = file.token_ids(request.input_ids.len())?;
        let origin = path.display().to_string();
        if let Some(position) = first_difference(&token_ids, &request.input_ids) {
            let sample = request.sample;
            return Ok(Stored::Stale(Error::OtherTokens { origin, sample, position }));
        }
        let states = file.states(wanted)?;
        states.check_rows(&origin)?;
        Ok(Stored::Found(states))
    }

    /// Whether the file of a sample records which layers its states are of.
    ///
    /// # Errors
    /// [`Error::ReadFile`], [`Error::BadFile`].
    pub(crate) fn says_layers(&self, sample: u64) -> Result<bool, Error> {
        let path = self.path(sample);
        let fault = |source| Error::ReadFile { path: path.clone(), source };
        let file = open_regular(&path, true).map_err(fault)?;
        let size = file.metadata().map_err(fault)?.len();
        Ok(TensorFile::open(&path, file, size)?.stated(LAYER_IDS).is_some())
    }

    /// Other software's files do not record their target; ours do.
    fn check_target(&self, path: &Path, stated: Option<String>) -> Result<(), Error> {
        let (Some(target), Some(stated)) = (&self.target, stated) else { return Ok(()) };
        let stated: TargetIdentity =
            serde_json::from_str(&stated).map_err(|error| bad_file(path, &error.to_string()))?;
        if stated.is_same_as(target) {
            return Ok(());
        }
        let (path, found, expected) = (path.into(), stated.to_string(), target.to_string());
        Err(Error::StatesOfOtherTarget { path, found, expected })
    }

    /// Stores a sample for later runs, completely or not at all.
    ///
    /// # Errors
    /// [`Error::Files`], for instance when the disk is full.
    pub fn write(
        &self,
        sample: u64,
        token_ids: &[i64],
        states: &HiddenStates,
    ) -> Result<(), Error> {
        fs::create_dir_all(&self.dir).map_err(dflash_io::Error::io("create", &self.dir))?;
        let path = self.path(sample);
        let shape = vec![states.tokens, states.layer_ids.len(), states.hidden_size];
        let rows = interleave(states);
        let ids: Vec<u8> = token_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let (dtype, layer_ids) = (stored_dtype(states.dtype), format!("{:?}", states.layer_ids));
        let digest = digest(dtype, &shape, &layer_ids, &ids, &rows);
        let mut metadata = HashMap::from([
            (FORMAT.to_owned(), "pt".to_owned()),
            (LAYER_IDS.to_owned(), layer_ids),
            (DIGEST.to_owned(), digest),
        ]);
        if let Some(target) = &self.target {
            let target = serde_json::to_string(target).expect("strings print");
            metadata.insert(TARGET.to_owned(), target);
        }
        let bytes = (|| {
            let rows = TensorView::new(dtype, shape, &rows)?;
            let ids = TensorView::new(StoredDtype::I64, vec![token_ids.len()], &ids)?;
            let tensors = [("hidden_states", rows), ("token_ids", ids)];
            safetensors::serialize(tensors, Some(metadata))
        })()
        .map_err(|error| bad_file(&path, &error.to_string()))?;
        Ok(dflash_io::write_bytes(&path, &bytes)?)
    }
}

fn stored_dtype(dtype: Dtype) -> StoredDtype {
    match dtype {
        Dtype::Bf16 => StoredDtype::BF16,
        Dtype::F32 => StoredDtype::F32,
    }
}

/// [tokens, layers, hidden], the file's order.
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

/// The position where `prompt` and `stored` differ, if they do.
pub(crate) fn first_difference(stored: &[i64], prompt: &[i64]) -> Option<usize> {
    let differs = stored.iter().zip(prompt).position(|(a, b)| a != b);
    differs.or((stored.len() < prompt.len()).then_some(stored.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{f32s, sample};

    fn read(files: &OfflineFiles, request: &Request) -> Result<Stored, Error> {
        let tokens = request.input_ids.len();
        files.read(request, Wanted { layer_ids: &[2, 5], hidden_size: 4, tokens })
    }

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
        match read(files, &request(input_ids)).unwrap() {
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
        assert!(matches!(read(&files, &other).unwrap(), Stored::Absent));
        for (tokens, at) in [(vec![10, 99, 12], 1), (vec![10, 11, 12, 13], 3)] {
            let Stored::Stale(Error::OtherTokens { position, .. }) =
                read(&files, &request(&tokens)).unwrap()
            else {
                panic!("{tokens:?}")
            };
            assert_eq!(position, at);
        }
    }

    #[test]
    fn broken_files_are_named() {
        let (_dir, files) = stored(&[2, 3]);
        let text = read(&files, &request(&[10])).unwrap_err().to_string();
        assert!(text.contains("hs_7.safetensors") && text.contains("[2, 5]"), "{text}");
        let whole = fs::read(files.path(7)).unwrap();
        fs::write(files.path(7), &whole[..whole.len() - 9]).unwrap();
        assert!(matches!(read(&files, &request(&[10])), Err(Error::BadFile { .. })));
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

    #[test]
    fn a_damaged_file_is_never_taken_for_a_good_one() {
        let (_dir, files) = stored(&[2, 5, 8]);
        let (whole, states) = (fs::read(files.path(7)).unwrap(), sample(&[2, 5], 3, 4));
        let mut random = dflash_test_support::random();
        for _ in 0..10_000 {
            let bytes = crate::tests::damaged(&whole, &mut random);
            fs::write(files.path(7), bytes).unwrap();
            match read(&files, &request(&[10, 11, 12])) {
                Ok(Stored::Found(found)) => assert_eq!(found, states),
                Ok(Stored::Stale(_)) | Err(Error::BadFile { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn what_is_no_regular_file_or_claims_too_much_is_not_read() {
        let (dir, files) = stored(&[2, 5]);
        let path = files.path(7);
        // Larger than any memory, but not on disk.
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 42).unwrap();
        assert!(matches!(read(&files, &request(&[10])), Err(Error::BadFile { .. })));
        fs::remove_file(&path).unwrap();
        std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        let text = format!("{:?}", read(&files, &request(&[10])).unwrap_err());
        assert!(text.contains("not a regular file"), "{text}");
        drop(dir);
    }

    #[test]
    fn a_file_without_its_digest_is_written_anew() {
        let (_dir, files) = stored(&[2, 5]);
        let bytes = fs::read(files.path(7)).unwrap();
        let place = |key| String::from_utf8_lossy(&bytes).find(key).unwrap();
        let mut old = bytes.clone();
        for (key, reason) in [("digest", "earlier release"), ("layer_ids", "it is damaged")] {
            old[place(key)] = b'x';
            fs::write(files.path(7), &old).unwrap();
            let text = read(&files, &request(&[10])).unwrap_err().to_string();
            assert!(text.contains(reason) && text.contains("remove it"), "{text}");
        }
    }
}
