//! The drafts that are measured side by side.

use std::path::{Path, PathBuf};

use dflash_console::say;
use dflash_evaluation::DraftFacts;
use dflash_identity::{TargetIdentity, file_digest};
use dflash_model::draft::Draft;
use dflash_model::objective::DraftVocabulary;
use dflash_model::target::Target;
use dflash_run::{Checkpoint, Evaluation};
use dflash_settings::{EvalSettings, NGRAM_DRAFT};

use crate::Error;
use crate::drafter::check_block;
use crate::engine::{Engine, EngineOptions};
use crate::models::check_target;
use crate::ngram::NgramDecoder;
use crate::plain::Limits;
use crate::sampling::Sampler;
use crate::speculative::{Speculation, Speculator};

/// Where proposals come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftSource {
    /// Nowhere: plain decoding, which is measured in any case.
    None,
    /// The text so far.
    Ngram,
    /// A trained draft.
    Trained {
        /// What the user calls it.
        name: String,
        /// Its directory.
        dir: PathBuf,
    },
}

/// All drafts, loaded.
#[derive(Debug)]
pub(super) struct Drafts {
    drafts: Vec<Loaded>,
}

#[derive(Debug)]
enum Loaded {
    Ngram { size: usize, proposals: usize },
    Trained(Box<Trained>),
}

#[derive(Debug)]
pub(super) struct Trained {
    label: String,
    dir: PathBuf,
    draft: Draft,
    vocabulary: Option<DraftVocabulary>,
    /// Digest of its file of weights.
    weights: Option<String>,
}

/// One way to decode with proposals.
#[derive(Debug)]
pub(super) enum Drafter<'a> {
    Ngram(Box<NgramDecoder<'a>>),
    Trained(Box<Speculator<'a>>),
}

impl Drafts {
    /// Loads the drafts of `sources` for `target`.
    ///
    /// # Errors
    /// A draft that cannot be loaded, or was made for another target.
    pub(super) fn load(
        settings: &EvalSettings,
        (target, identity): (&Target, &TargetIdentity),
        sources: &[DraftSource],
    ) -> Result<Self, Error> {
        let mut drafts: Vec<Loaded> = Vec::new();
        for source in sources {
            drafts.push(match source {
                DraftSource::None => continue,
                DraftSource::Ngram => {
                    check_block(target, settings.ngram_tokens + 1)?;
                    Loaded::Ngram { size: settings.ngram_size, proposals: settings.ngram_tokens }
                }
                DraftSource::Trained { name, dir } => {
                    let trained = Trained::load(label(name, sources), dir, target)?;
                    check_target(identity, dir, settings.allow_other_target)?;
                    Loaded::Trained(Box::new(trained))
                }
            });
        }
        Ok(Self { drafts })
    }

    /// Keeps each draft's part of the report beside the checkpoint of a run that it is, where that can
    /// be written to: the figures are printed all the same.
    pub(super) fn keep_beside(&self, evaluations: &[Evaluation]) {
        for trained in self.trained() {
            if let Err(error) = trained.keep_beside(evaluations) {
                let dir = trained.dir.display();
                say(format!("the report is not kept beside the checkpoint {dir}: {error}"));
            }
        }
    }

    /// Their names in tables, in order.
    pub(super) fn labels(&self) -> impl Iterator<Item = &str> {
        self.drafts.iter().map(Loaded::label)
    }

    pub(super) fn facts(&self) -> Vec<DraftFacts> {
        self.drafts.iter().map(Loaded::facts).collect()
    }

    /// Engines of `target`, one for each trained draft, with its name in tables.
    ///
    /// # Errors
    /// A draft that does not fit the target.
    pub(super) fn engines<'a>(
        &'a self,
        target: &'a Target,
        options: EngineOptions,
    ) -> Result<Vec<(&'a str, Engine<'a>)>, Error> {
        let engine = |trained: &'a Trained| {
            let draft = (&trained.draft, trained.vocabulary.as_ref());
            Ok((trained.label.as_str(), Engine::speculative(target, draft, options)?))
        };
        self.trained().map(engine).collect()
    }

    /// Those that have weights.
    pub(super) fn trained(&self) -> impl Iterator<Item = &Trained> {
        self.drafts.iter().filter_map(|loaded| match loaded {
            Loaded::Trained(trained) => Some(&**trained),
            Loaded::Ngram { .. } => None,
        })
    }

    /// Decoders of `target`, one for each draft, that choose tokens by `sampler`.
    ///
    /// # Errors
    /// A draft that does not fit the target.
    pub(super) fn drafters<'a>(
        &'a self,
        target: &'a Target,
        sampler: &Sampler,
    ) -> Result<Vec<Drafter<'a>>, Error> {
        let drafter = |loaded: &'a Loaded| {
            Ok(match loaded {
                Loaded::Ngram { size, proposals } => Drafter::Ngram(Box::new(NgramDecoder::new(
                    target,
                    (*size, *proposals),
                    sampler.clone(),
                ))),
                Loaded::Trained(trained) => {
                    let (draft, vocabulary) = (&trained.draft, trained.vocabulary.as_ref());
                    let speculator = Speculator::new(target, draft, vocabulary, sampler.clone())?;
                    Drafter::Trained(Box::new(speculator))
                }
            })
        };
        self.drafts.iter().map(drafter).collect()
    }
}

impl Loaded {
    fn label(&self) -> &str {
        match self {
            Self::Ngram { .. } => NGRAM_DRAFT,
            Self::Trained(trained) => &trained.label,
        }
    }

    fn facts(&self) -> DraftFacts {
        let label = self.label().to_owned();
        match self {
            Self::Ngram { size, proposals } => DraftFacts {
                name: format!("{label}: last {size} tokens or fewer, {proposals} proposals"),
                label,
                block_size: Some(proposals + 1),
                ..DraftFacts::default()
            },
            Self::Trained(trained) => DraftFacts {
                name: trained.dir.display().to_string(),
                label,
                block_size: Some(trained.draft.config().block_size),
                vocabulary: trained.vocabulary.as_ref().map(|tokens| tokens.selected().len()),
                weights: trained.weights.clone(),
            },
        }
    }
}

impl Trained {
    fn load(label: String, dir: &Path, target: &Target) -> Result<Self, Error> {
        let weights = dir.join("model.safetensors");
        Ok(Self {
            label,
            dir: dir.to_owned(),
            draft: Draft::load(dir, target.device(), target.dtype())?,
            vocabulary: DraftVocabulary::load(dir)?,
            weights: weights.is_file().then(|| file_digest(&weights)).transpose()?,
        })
    }

    fn keep_beside(&self, evaluations: &[Evaluation]) -> Result<(), dflash_run::Error> {
        let Some(checkpoint) = Checkpoint::of_run(&self.dir)? else { return Ok(()) };
        let own = |it: &&Evaluation| it.draft_weights == self.weights;
        evaluations.iter().filter(own).try_for_each(|it| checkpoint.keep_evaluation(it))
    }
}

impl Drafter<'_> {
    pub(super) fn block_size(&self) -> usize {
        match self {
            Self::Ngram(decoder) => decoder.block_size(),
            Self::Trained(speculator) => speculator.block_size(),
        }
    }

    pub(super) fn generate(
        &mut self,
        prompt: &[i64],
        limits: &Limits,
        stop: &std::sync::atomic::AtomicBool,
    ) -> Result<Speculation, Error> {
        match self {
            Self::Ngram(decoder) => decoder.generate(prompt, limits, stop),
            Self::Trained(speculator) => speculator.generate(prompt, limits, stop),
        }
    }
}

/// The last part of a name; all of it where two drafts share that.
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
