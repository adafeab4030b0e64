//! A digest of a model's weights that reads a few megabytes of any model.
//!
//! Training moves all elements of a matrix, so a few stripes of each tell two checkpoints apart.
//! Every tensor counts, and not only those of captured layers: what is fine-tuned may be one
//! projection of one layer, and a digest must not depend on what a run captures. Names, types and
//! shapes count; how tensors are spread over files does not.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::digest::Digest;
use crate::{Error, read_json};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The format's own limit.
const LONGEST_HEADER: u64 = 100_000_000;
/// A page: less costs as much to read.
const STRIPE: u64 = 4096;
/// Stripes of the embedding and of the lm_head, whose rows may have been trained apart.
const STRIPES_OF_A_TABLE: u64 = 16;
/// Stripes of any other tensor. 8B models have 400 tensors: 1,700 reads, 8 MB.
const STRIPES: u64 = 4;
/// Tables and other tensors up to these sizes count whole: all of a small model, the norms of a large
/// one.
const WHOLE: [u64; 2] = [4 << 20, 1 << 20];

/// A tensor's place.
#[derive(Debug, Deserialize)]
struct Place {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
    #[serde(skip)]
    shard: usize,
}

struct Shard {
    path: PathBuf,
    file: File,
    data_start: u64,
}

/// The digest; `None` where the directory has no weights, or not all of them.
pub(crate) fn digest(dir: &Path, tied: bool) -> Result<Option<String>, Error> {
    let Some(paths) = shard_paths(dir)? else { return Ok(None) };
    let (mut shards, mut places) = (Vec::new(), BTreeMap::new());
    for path in paths {
        let (shard, tensors) = Shard::open(path)?;
        let number = shards.len();
        places.extend(
            tensors.into_iter().map(|(name, place)| (name, Place { shard: number, ..place })),
        );
        shards.push(shard);
    }
    let mut digest = Digest::default();
    let mut stripe = vec![0; STRIPE as usize];
    for (name, place) in places.iter().filter(|(name, _)| counts(name, tied)) {
        digest.add(format!("{name} {} {:?}", place.dtype, place.shape).as_bytes());
        let shard = &shards[place.shard];
        for start in stripes(place, name) {
            let length = STRIPE.min(place.data_offsets.1 - start);
            let part = &mut stripe[..length as usize];
            shard.read(part, shard.data_start + start)?;
            digest.add(part);
        }
    }
    Ok(Some(digest.hex()))
}

/// Whether a tensor takes part. An lm_head that is the embedding may be stored or not; rotary
/// frequencies follow from the configuration; of the experts of a layer, which have as many
/// matrices as all else together, the first stands for all.
fn counts(name: &str, tied: bool) -> bool {
    let copy = tied && name.ends_with("lm_head.weight");
    let expert = name.split_once(".experts.").and_then(|(_, rest)| rest.split('.').next());
    let later_expert = expert.is_some_and(|number| number.parse().is_ok_and(|n: u64| n > 0));
    !copy && !later_expert && !name.ends_with("rotary_emb.inv_freq")
}

/// Where the stripes of a tensor begin, from its first byte to its last.
fn stripes(place: &Place, name: &str) -> impl Iterator<Item = u64> {
    let is_table = name.ends_with("embed_tokens.weight") || name.ends_with("lm_head.weight");
    let (wanted, whole) =
        if is_table { (STRIPES_OF_A_TABLE, WHOLE[0]) } else { (STRIPES, WHOLE[1]) };
    let (begin, end) = place.data_offsets;
    let all = (end - begin).div_ceil(STRIPE);
    let count = if end - begin <= whole { all } else { wanted.min(all) };
    let room = (end - begin).saturating_sub(STRIPE);
    (0..count).map(move |n| begin + (room as u128 * n as u128 / (count.max(2) - 1) as u128) as u64)
}

/// The files that hold the weights, as a loader would choose them.
fn shard_paths(dir: &Path) -> Result<Option<Vec<PathBuf>>, Error> {
    let single = dir.join(SINGLE);
    if single.is_file() {
        return Ok(Some(vec![single]));
    }
    if !dir.join(INDEX).is_file() {
        return Ok(None);
    }
    let index = read_json(&dir.join(INDEX))?;
    let files = index["weight_map"].as_object().into_iter().flatten();
    let names: BTreeSet<&str> = files.filter_map(|(_, file)| file.as_str()).collect();
    let paths: Vec<PathBuf> = names.into_iter().map(|name| dir.join(name)).collect();
    Ok((!paths.is_empty() && paths.iter().all(|path| path.is_file())).then_some(paths))
}

impl Shard {
    /// Opens a file and reads its header.
    fn open(path: PathBuf) -> Result<(Self, HashMap<String, Place>), Error> {
        let file =
            File::open(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
        let mut shard = Self { path, file, data_start: 8 };
        let length = shard.file.metadata().map_err(|source| shard.unreadable(source))?.len();
        let mut prefix = [0; 8];
        shard.read(&mut prefix, 0)?;
        let header_length = u64::from_le_bytes(prefix);
        if header_length > LONGEST_HEADER.min(length) {
            return Err(shard.damaged("its header is longer than the file"));
        }
        let mut header = vec![0; header_length as usize];
        shard.read(&mut header, 8)?;
        shard.data_start += header_length;
        let tensors = tensors(&header).map_err(|error| shard.damaged(&error.to_string()))?;
        let holds = |place: &Place| {
            let (begin, end) = place.data_offsets;
            begin <= end && end <= length.saturating_sub(shard.data_start)
        };
        match tensors.iter().find(|(_, place)| !holds(place)) {
            Some((name, _)) => Err(shard.damaged(&format!("{name} lies beyond its end"))),
            None => Ok((shard, tensors)),
        }
    }

    fn read(&self, part: &mut [u8], at: u64) -> Result<(), Error> {
        self.file.read_exact_at(part, at).map_err(|source| self.unreadable(source))
    }

    fn unreadable(&self, source: std::io::Error) -> Error {
        Error::Read { path: self.path.clone(), source }
    }

    fn damaged(&self, reason: &str) -> Error {
        Error::Header { path: self.path.clone(), reason: reason.to_owned() }
    }
}

fn tensors(header: &[u8]) -> serde_json::Result<HashMap<String, Place>> {
    let mut entries: HashMap<String, Value> = serde_json::from_slice(header)?;
    entries.remove("__metadata__");
    let entries = entries.into_iter();
    entries.map(|(name, entry)| Ok((name, serde_json::from_value(entry)?))).collect()
}
