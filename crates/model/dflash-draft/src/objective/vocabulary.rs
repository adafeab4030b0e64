//! The pruned vocabulary: the target tokens that a draft can propose.

use std::path::Path;

use dflash_tensor::checkpoint::{TensorFile, write_safetensors};
use dflash_tensor::{Result, kind_name};
use tch::{Kind, Tensor};

/// Vocabulary file of a checkpoint: `d2t` and `t2d` as speculators defines them.
const FILE: &str = "draft_vocabulary.safetensors";

/// Where speculators stores the same tensors.
const WEIGHTS: &str = "model.safetensors";

/// The target ids that the draft can propose, ascending; draft ids are indices into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftVocabulary {
    selected: Vec<i64>,
    /// Draft id of each target id, or -1.
    of_target: Vec<i64>,
}

impl DraftVocabulary {
    /// `selected` are ascending target ids below `target_vocab_size`.
    pub fn new(selected: Vec<i64>, target_vocab_size: usize) -> Self {
        let mut of_target = vec![-1; target_vocab_size];
        for (draft, &target) in selected.iter().enumerate() {
            of_target[target as usize] = draft as i64;
        }
        Self { selected, of_target }
    }

    /// Reads the vocabulary of a checkpoint directory, from its own file or, as speculators stores
    /// it, from the weights file; `None` if the vocabulary is not pruned.
    ///
    /// # Errors
    /// A damaged file, ids that are not ascending, or inconsistent tensors.
    pub fn load(dir: &Path) -> Result<Option<Self>> {
        for name in [FILE, WEIGHTS] {
            let path = dir.join(name);
            if !path.is_file() {
                continue;
            }
            let file = TensorFile::open(&path)?;
            if name == FILE || file.names().iter().any(|name| name == "d2t") {
                return Self::read(&file, &path).map(Some);
            }
        }
        Ok(None)
    }

    fn read(file: &TensorFile, path: &Path) -> Result<Self> {
        let offsets = list(file, path, "d2t", Kind::Int64)?;
        let stored = list(file, path, "t2d", Kind::Bool)?;
        let selected: Vec<i64> = offsets.iter().zip(0..).map(|(offset, id)| offset + id).collect();
        let refuse = |key, found: &str, expected| {
            dflash_formats::Error::config(path, key, found, expected).into()
        };
        let in_range = |&id: &i64| 0 <= id && id < stored.len() as i64;
        let ascending = selected.is_sorted_by(|a, b| a < b);
        if selected.is_empty() || !ascending || !selected.iter().all(in_range) {
            let expected = "each d2t[i] + i must be a target id above the one before";
            return Err(refuse("d2t", "not a list of ascending target ids", expected));
        }
        let vocabulary = Self::new(selected, stored.len());
        if !vocabulary.membership().iter().map(|&member| i64::from(member)).eq(stored) {
            let expected = "it must be true for the ids of d2t and for no others";
            return Err(refuse("t2d", "another selection than d2t", expected));
        }
        Ok(vocabulary)
    }

    /// Writes the vocabulary to a checkpoint directory.
    ///
    /// # Errors
    /// I/O.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let membership = Tensor::from_slice(&self.membership()).to_kind(Kind::Bool);
        let tensors = [
            ("d2t".to_string(), Tensor::from_slice(&self.offsets())),
            ("t2d".to_string(), membership),
        ];
        write_safetensors(&dir.join(FILE), &tensors)
    }

    /// Size of the full target vocabulary: rows of its embedding.
    pub fn target_size(&self) -> usize {
        self.of_target.len()
    }

    /// The selected target ids, ascending.
    pub fn selected(&self) -> &[i64] {
        &self.selected
    }

    /// speculators' `d2t`: target id minus draft id, by draft id.
    pub fn offsets(&self) -> Vec<i64> {
        self.selected.iter().zip(0..).map(|(target, draft)| target - draft).collect()
    }

    /// speculators' `t2d`: whether the draft can propose each target id.
    pub fn membership(&self) -> Vec<bool> {
        self.of_target.iter().map(|&draft| draft >= 0).collect()
    }

    /// Draft id of a target id, or -1.
    pub(super) fn draft_id(&self, target: i64) -> i64 {
        self.of_target.get(target as usize).copied().unwrap_or(-1)
    }
}

/// The one-dimensional tensor `name` of `kind` as numbers.
fn list(file: &TensorFile, path: &Path, name: &str, kind: Kind) -> Result<Vec<i64>> {
    let tensor = file.any_tensor(name)?;
    if tensor.dim() != 1 || tensor.kind() != kind {
        let found =
            format!("a tensor of {} with shape {:?}", kind_name(tensor.kind()), tensor.size());
        let expected = format!("a list of {} is needed", kind_name(kind));
        return Err(dflash_formats::Error::config(path, name, found, &expected).into());
    }
    Ok(Vec::try_from(tensor.to_kind(Kind::Int64))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_loads() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(DraftVocabulary::load(dir.path()).unwrap(), None);
        let vocabulary = DraftVocabulary::new(vec![2, 6, 7], 16);
        vocabulary.save(dir.path()).unwrap();
        assert_eq!(DraftVocabulary::load(dir.path()).unwrap(), Some(vocabulary.clone()));
        // as speculators does, in the weights file
        std::fs::rename(dir.path().join(FILE), dir.path().join(WEIGHTS)).unwrap();
        assert_eq!(DraftVocabulary::load(dir.path()).unwrap(), Some(vocabulary));
        let weights = [("fc.weight".to_string(), Tensor::from_slice(&[1.0f32]))];
        write_safetensors(&dir.path().join(WEIGHTS), &weights).unwrap();
        assert_eq!(DraftVocabulary::load(dir.path()).unwrap(), None);
    }

    #[test]
    fn damaged_vocabularies_are_named() {
        let message = |d2t: Tensor, t2d: Tensor| {
            let dir = tempfile::tempdir().unwrap();
            let tensors = [("d2t".to_string(), d2t), ("t2d".to_string(), t2d)];
            write_safetensors(&dir.path().join(FILE), &tensors).unwrap();
            DraftVocabulary::load(dir.path()).unwrap_err().to_string()
        };
        let ids = |offsets: &[i64]| Tensor::from_slice(offsets);
        let members = |bits: &[bool]| Tensor::from_slice(bits);
        let four = || members(&[true, false, true, false]);
        assert!(message(ids(&[0, 5]), four()).contains("`d2t` is not a list of ascending"));
        assert!(message(ids(&[1, -1]), four()).contains("`d2t`"));
        assert!(message(ids(&[]), four()).contains("`d2t`"));
        assert!(message(ids(&[0, 2]), four()).contains("`t2d` is another selection"));
        assert!(message(ids(&[0, 1]), ids(&[1, 0])).contains("`t2d` is a tensor of int64"));
        assert!(message(ids(&[0, 1]).unsqueeze(0), four()).contains("shape [1, 2]"));
    }
}
