//! Whether what a run brings together is of one target.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dflash_data::Dataset;
use dflash_hidden_states::TargetLogits;
use dflash_identity::{TargetIdentity, tokenizer_digest};
use dflash_run::{Checkpoint, State};
use dflash_target::{TargetFacts, TargetIo};

use crate::Error;

/// Refuses a checkpoint of a run for another target. Those of earlier releases do not say; what a
/// draft takes from its target is compared later.
pub(crate) fn check_resumed(checkpoint: &Checkpoint, target: &TargetIdentity) -> Result<(), Error> {
    let state = State::load(&checkpoint.dir).map_err(|error| checkpoint.clone().damaged(error))?;
    match state.position.target {
        Some(trained_for) if !trained_for.is_same_as(target) => {
            let (found, expected) = (trained_for.to_string(), target.to_string());
            Err(Error::OtherTarget { path: checkpoint.dir.clone(), found, expected })
        }
        _ => Ok(()),
    }
}

/// Refuses data of another tokenizer or chat template. Nothing else of a target is in the samples:
/// models of a family share them, and the data; that is said.
pub(crate) fn check_dataset(
    dataset: &Dataset,
    target_dir: &Path,
    target: &TargetIdentity,
) -> Result<Option<String>, Error> {
    let Some(prepared_for) = dataset.prepared_for()? else { return Ok(None) };
    if let (Some(theirs), Some(own)) = (&prepared_for.tokenizer, tokenizer_digest(target_dir)?)
        && *theirs != own
    {
        let named = |name: &str, digest: &str| format!("{name} (tokenizer {digest})");
        let (found, expected) = (named(&prepared_for.name, theirs), named(&target.name, &own));
        return Err(Error::OtherTokenizer { path: dataset.dir().into(), found, expected });
    }
    let other = prepared_for.target.filter(|other| !other.is_same_as(target));
    Ok(other.map(|other| {
        format!("the data was prepared for {other}, whose tokenizer is that of {target}")
    }))
}

/// Says that the draft to start from was made for another target, which is a fine thing to start
/// from where both have a common origin.
pub(crate) fn check_pretrained(
    dir: &Path,
    target: &TargetIdentity,
) -> Result<Option<String>, Error> {
    let other = TargetIdentity::of_draft(dir)?.filter(|other| !other.is_same_as(target));
    Ok(other.map(|other| {
        format!("the draft to start from was made for {other}: it has to adapt to {target}")
    }))
}

/// What a stock vLLM is checked with; `are_normed` says whether its last states turned out to be behind
/// the final norm.
pub(crate) fn logits(
    target_dir: &Path,
    target: &TargetFacts,
    are_normed: &Arc<AtomicBool>,
) -> TargetLogits {
    let (dir, target, are_normed) = (target_dir.to_owned(), target.clone(), Arc::clone(are_normed));
    TargetLogits(Arc::new(move |state: &[f32], ids: &[i64]| {
        let is_normed = are_normed.load(Ordering::Relaxed);
        Ok(tch::no_grad(|| TargetIo::logits_of(&dir, &target, state, is_normed, ids))?)
    }))
}
