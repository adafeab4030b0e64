//! Checks that everything a run combines belongs to the same target.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dflash_data::Dataset;
use dflash_hidden_states::TargetLogits;
use dflash_identity::{TargetIdentity, tokenizer_digest};
use dflash_run::{Checkpoint, State};
use dflash_target::{TargetFacts, TargetIo};

use crate::Error;

/// Refuses a checkpoint of a run for another target. Those of earlier releases do not record it;
/// the properties that a draft takes from its target are compared later.
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

/// Refuses data of another tokenizer or chat template. Samples depend on nothing else of a target:
/// models of a family can share data, which is reported.
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

/// A note if the starting draft was made for another target, which may have a common origin.
pub(crate) fn check_pretrained(
    dir: &Path,
    target: &TargetIdentity,
) -> Result<Option<String>, Error> {
    let other = TargetIdentity::of_draft(dir)?.filter(|other| !other.is_same_as(target));
    Ok(other.map(|other| {
        format!("the draft to start from was made for {other}: it has to adapt to {target}")
    }))
}

/// The parts of the target for checking a stock vLLM; `are_normed` returns whether its last states
/// turned out to be after the final norm.
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
