//! A pruned draft vocabulary: which of the target's tokens the draft can say.

use std::path::Path;

use tch::{Kind, Tensor};

use crate::checkpoint::{TensorFile, write_safetensors};
use crate::{Error, Result};

/// File of the vocabulary in a checkpoint: `d2t` and `t2d` as speculators defines them.
const FILE: &str = "draft_vocabulary.safetensors";

/// The target's ids that the draft can say, ascending; draft ids are their ranks.
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

    /// Reads the vocabulary of a checkpoint directory; `None` where the draft says every token.
    ///
    /// # Errors
    /// A damaged file, or ids that do not ascend.
    pub fn load(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(FILE);
        if !path.is_file() {
            return Ok(None);
        }
        let file = TensorFile::open(&path)?;
        let offsets = Vec::<i64>::try_from(file.any_tensor("d2t")?)?;
        let target_size = file.any_tensor("t2d")?.size()[0];
        let selected: Vec<i64> = offsets.iter().zip(0..).map(|(offset, id)| offset + id).collect();
        let ascending = selected.is_sorted_by(|a, b| a < b);
        if !ascending || selected.iter().any(|&id| id < 0 || id >= target_size) {
            return Err(Error::Config {
                path,
                key: "d2t".into(),
                found: "no list of ascending target ids".into(),
                expected: "each d2t[i] + i must be a target id above the one before".into(),
            });
        }
        Ok(Some(Self::new(selected, target_size as usize)))
    }

    /// Writes the vocabulary into a checkpoint directory.
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

    /// The target's ids, ascending.
    pub fn selected(&self) -> &[i64] {
        &self.selected
    }

    /// speculators' `d2t`: target id minus draft id, per draft id.
    pub fn offsets(&self) -> Vec<i64> {
        self.selected.iter().zip(0..).map(|(target, draft)| target - draft).collect()
    }

    /// speculators' `t2d`: whether each target id is in the draft's vocabulary.
    pub fn membership(&self) -> Vec<bool> {
        self.of_target.iter().map(|&draft| draft >= 0).collect()
    }

    /// The draft's id of a target id, or -1.
    pub(super) fn draft_id(&self, target: i64) -> i64 {
        self.of_target.get(target as usize).copied().unwrap_or(-1)
    }
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
        assert_eq!(DraftVocabulary::load(dir.path()).unwrap(), Some(vocabulary));
    }
}
