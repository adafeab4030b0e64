//! A digest of a model's weights that reads a few megabytes of any model.
//!
//! Training changes all elements of a matrix, so a few stripes of each tell two checkpoints apart.
//! Every tensor counts, not only those of auxiliary layers: fine-tuning may change one projection
//! of one layer, and a digest must not depend on a run's layers. Names, types and shapes count; the
//! distribution of tensors over files does not.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use dflash_formats::safetensors::{Header, INDEX, SINGLE, TensorInfo, weight_map};

use crate::Error;
use crate::digest::Digest;

/// One page: reading less costs as much.
const STRIPE: u64 = 4096;
/// Stripes of the embedding and of the lm_head, whose rows may be trained individually.
const STRIPES_OF_A_TABLE: u64 = 16;
/// Stripes of any other tensor. 8B models have 400 tensors: 1,700 reads, 8 MB.
const STRIPES: u64 = 4;
/// Tables and other tensors up to these sizes are read whole: all of a small model, the norms of a
/// large one.
const WHOLE: [u64; 2] = [4 << 20, 1 << 20];

struct Shard {
    path: PathBuf,
    file: File,
    header: Header,
}

/// The digest; `None` if the directory has no weights, or not all of them.
pub(crate) fn digest(dir: &Path, tied: bool) -> Result<Option<String>, Error> {
    let Some(paths) = shard_paths(dir)? else { return Ok(None) };
    let shards = paths.into_iter().map(Shard::open).collect::<Result<Vec<_>, _>>()?;
    let mut tensors = BTreeMap::new();
    for shard in &shards {
        let own = shard.header.metadata.tensors().into_iter();
        tensors.extend(own.map(|(name, tensor)| (name, (shard, tensor))));
    }
    let mut digest = Digest::default();
    let mut stripe = vec![0; STRIPE as usize];
    for (name, (shard, tensor)) in tensors.iter().filter(|(name, _)| counts(name, tied)) {
        digest.add(format!("{name} {:?} {:?}", tensor.dtype, tensor.shape).as_bytes());
        for start in stripes(tensor, name) {
            let length = STRIPE.min(tensor.data_offsets.1 as u64 - start);
            let part = &mut stripe[..length as usize];
            shard.read(part, shard.header.data_start + start)?;
            digest.add(part);
        }
    }
    Ok(Some(digest.hex()))
}

/// Whether a tensor counts. An lm_head that is the embedding may be stored or not; rotary
/// frequencies follow from the configuration; of a layer's experts, which have as many matrices as
/// everything else together, only the first counts.
fn counts(name: &str, tied: bool) -> bool {
    let copy = tied && name.ends_with("lm_head.weight");
    let expert = name.split_once(".experts.").and_then(|(_, rest)| rest.split('.').next());
    let later_expert = expert.is_some_and(|number| number.parse().is_ok_and(|n: u64| n > 0));
    !copy && !later_expert && !name.ends_with("rotary_emb.inv_freq")
}

/// The offsets of a tensor's stripes, spread from its first byte to its last.
fn stripes(tensor: &TensorInfo, name: &str) -> impl Iterator<Item = u64> {
    let is_table = name.ends_with("embed_tokens.weight") || name.ends_with("lm_head.weight");
    let (wanted, whole) =
        if is_table { (STRIPES_OF_A_TABLE, WHOLE[0]) } else { (STRIPES, WHOLE[1]) };
    let (begin, end) = (tensor.data_offsets.0 as u64, tensor.data_offsets.1 as u64);
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
    let names: BTreeSet<String> = weight_map(dir)?.into_values().collect();
    let paths: Vec<PathBuf> = names.into_iter().map(|name| dir.join(name)).collect();
    Ok((!paths.is_empty() && paths.iter().all(|path| path.is_file())).then_some(paths))
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, Error> {
        let (file, header) = Header::open(&path)?;
        Ok(Self { path, file, header })
    }

    fn read(&self, part: &mut [u8], at: u64) -> Result<(), Error> {
        let fault = |source| Error::Read { path: self.path.clone(), source };
        self.file.read_exact_at(part, at).map_err(fault)
    }
}
