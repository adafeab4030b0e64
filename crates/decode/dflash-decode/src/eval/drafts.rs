//! The drafts under evaluation, each at the requested numbers of proposals.

use std::path::{Path, PathBuf};

use dflash_draft::LoadedDraft;
use dflash_eval::{AUTO_SUFFIX, DraftFacts};
use dflash_identity::{TargetIdentity, file_digest};
use dflash_io::say;
use dflash_run::{Checkpoint, Evaluation};
use dflash_settings::{EvalSettings, NGRAM_DRAFT, Speculate};
use dflash_target::Target;

use crate::Error;
use crate::engine::{Engine, EngineOptions};
use crate::models::{DraftSource, LoadedProposer, check_target};

#[derive(Debug)]
pub(super) struct Drafts {
    drafts: Vec<Loaded>,
    /// The numbers of proposals to evaluate.
    lengths: Vec<Speculate>,
}

#[derive(Debug)]
struct Loaded {
    label: String,
    proposer: LoadedProposer,
    /// Maximum tokens proposed at a time.
    proposals: usize,
    /// Directory of a trained draft, and digest of its weights file.
    dir: Option<PathBuf>,
    weights: Option<String>,
}

/// A draft at one number of proposals.
#[derive(Debug, Clone)]
pub(super) struct DraftMode<'a> {
    draft: &'a Loaded,
    speculate: Speculate,
    /// Its name in tables.
    pub(super) label: String,
}

impl Drafts {
    /// Loads the drafts of `sources` for `target`.
    ///
    /// # Errors
    /// A draft that cannot be loaded or was made for another target.
    pub(super) fn load(
        settings: &EvalSettings,
        target: &Target,
        identity: &TargetIdentity,
        sources: &[DraftSource],
    ) -> Result<Self, Error> {
        let mut drafts: Vec<Loaded> = Vec::new();
        for source in sources {
            drafts.push(match source {
                DraftSource::None => continue,
                DraftSource::Ngram => {
                    let (size, tokens) = (settings.ngram_size, settings.ngram_tokens);
                    Loaded {
                        label: NGRAM_DRAFT.to_owned(),
                        proposer: LoadedProposer::Ngram { size, tokens },
                        proposals: tokens,
                        dir: None,
                        weights: None,
                    }
                }
                DraftSource::Trained { name, dir } => {
                    let trained = Loaded::trained(label(name, sources), dir, target)?;
                    check_target(identity, dir, settings.allow_other_target)?;
                    trained
                }
            });
        }
        Ok(Self { drafts, lengths: settings.speculate.clone() })
    }

    /// Stores each draft's part of the report with its run checkpoint, if that is writable;
    /// failures are ignored, since the figures are printed as well.
    pub(super) fn keep_beside(&self, evaluations: &[Evaluation]) {
        for draft in &self.drafts {
            let Some(dir) = &draft.dir else { continue };
            if let Err(error) = draft.keep_beside(dir, evaluations) {
                let dir = dir.display();
                say(format!("the report could not be stored in the checkpoint {dir}: {error}"));
            }
        }
    }

    /// Each draft at each number of proposals, in order.
    pub(super) fn modes(&self) -> Vec<DraftMode<'_>> {
        let mode = |draft: &'_ Loaded, speculate| {
            let label = match speculate {
                Speculate::Tokens(tokens) if tokens >= draft.proposals => draft.label.clone(),
                Speculate::Auto => format!("{}{AUTO_SUFFIX}", draft.label),
                other => format!("{} {other}", draft.label),
            };
            (label, speculate)
        };
        let mut modes: Vec<DraftMode<'_>> = Vec::new();
        for draft in &self.drafts {
            let all = [Speculate::Tokens(draft.proposals), Speculate::Auto];
            let lengths = if self.lengths.is_empty() { &all[..] } else { &self.lengths };
            for &speculate in lengths {
                let (label, speculate) = mode(draft, speculate);
                if !modes.iter().any(|mode| mode.label == label) {
                    modes.push(DraftMode { draft, speculate, label });
                }
            }
        }
        modes
    }

    pub(super) fn facts(&self) -> Vec<DraftFacts> {
        self.modes().iter().map(DraftMode::facts).collect()
    }
}

impl<'a> DraftMode<'a> {
    /// An engine of `target` with this draft.
    ///
    /// # Errors
    /// A draft that does not match the target.
    pub(super) fn engine(
        &self,
        target: &'a Target,
        options: EngineOptions,
    ) -> Result<Engine<'a>, Error> {
        let options = EngineOptions { speculate: self.speculate, ..options };
        Engine::new(target, self.draft.proposer.proposals(), options)
    }

    fn facts(&self) -> DraftFacts {
        let draft = self.draft;
        let most = match self.speculate {
            Speculate::Tokens(tokens) => tokens.min(draft.proposals),
            _ => draft.proposals,
        };
        let mut head = None;
        let (name, vocabulary) = match &draft.proposer {
            LoadedProposer::Draft(loaded) => {
                let dir = draft.dir.as_deref().unwrap_or(Path::new(""));
                let own = &loaded.draft.config().head;
                head = (!own.is_plain()).then(|| own.kind.clone());
                (dir.display().to_string(), loaded.pruned_size())
            }
            LoadedProposer::Ngram { size, .. } => {
                (format!("{}: last {size} tokens or fewer, {most} proposals", draft.label), None)
            }
            LoadedProposer::None => (draft.label.clone(), None),
        };
        // Only figures for whole blocks are a draft's own and stored with its weights.
        let is_whole = self.label == draft.label;
        DraftFacts {
            name,
            label: self.label.clone(),
            block_size: Some(most + 1),
            vocabulary,
            weights: draft.weights.clone().filter(|_| is_whole),
            head,
        }
    }
}

impl Loaded {
    fn trained(label: String, dir: &Path, target: &Target) -> Result<Self, Error> {
        let weights = dir.join("model.safetensors");
        let loaded = LoadedDraft::load(dir, target.device(), target.dtype())?;
        Ok(Self {
            label,
            proposals: loaded.draft.config().block().proposals(),
            proposer: LoadedProposer::Draft(Box::new(loaded)),
            dir: Some(dir.to_owned()),
            weights: weights.is_file().then(|| file_digest(&weights)).transpose()?,
        })
    }

    fn keep_beside(&self, dir: &Path, evaluations: &[Evaluation]) -> Result<(), dflash_run::Error> {
        let Some(checkpoint) = Checkpoint::of_run(dir)? else { return Ok(()) };
        let own = |it: &&Evaluation| it.draft_weights == self.weights;
        let kept: Vec<&Evaluation> = evaluations.iter().filter(own).collect();
        kept.iter().try_for_each(|it| checkpoint.keep_evaluation(it))?;
        if !kept.is_empty() {
            let (dir, figures) = (dir.display(), kept.len());
            say(format!(
                "stored in the checkpoint {dir}: {figures} results, which `dflash push` publishes; \
                 --no-record turns this off"
            ));
        }
        Ok(())
    }
}

/// The last path component of a name, or the full name if two drafts share it.
fn label(name: &str, sources: &[DraftSource]) -> String {
    fn last(name: &str) -> &str {
        name.trim_end_matches('/').rsplit('/').next().unwrap_or(name)
    }
    let same = sources.iter().filter(
        |source| matches!(source, DraftSource::Trained { name: other, .. } if last(other) == last(name)),
    );
    if same.count() > 1 { name.to_owned() } else { last(name).to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_short_unless_two_are_alike() {
        let trained = |name: &str| DraftSource::Trained { name: name.into(), dir: name.into() };
        let sources = [trained("a/run"), trained("b/other/"), DraftSource::Ngram];
        assert_eq!(label("a/run", &sources), "run");
        assert_eq!(label("b/other/", &sources), "other");
        let alike = [trained("a/run"), trained("b/run")];
        assert_eq!(label("a/run", &alike), "a/run");
    }
}
