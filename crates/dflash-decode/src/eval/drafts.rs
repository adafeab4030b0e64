//! The drafts that are measured side by side.

use std::path::{Path, PathBuf};

use dflash_console::say;
use dflash_evaluation::DraftFacts;
use dflash_identity::TargetIdentity;
use dflash_model::draft::Draft;
use dflash_model::objective::DraftVocabulary;
use dflash_model::target::Target;
use dflash_settings::{EvalSettings, NGRAM_DRAFT};

use crate::Error;
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
    Trained { label: String, name: String, draft: Box<Draft>, vocabulary: Option<DraftVocabulary> },
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
        (target, target_dir): (&Target, &Path),
        sources: &[DraftSource],
    ) -> Result<Self, Error> {
        let mut drafts: Vec<Loaded> = Vec::new();
        for source in sources {
            let loaded = match source {
                DraftSource::None => continue,
                DraftSource::Ngram => {
                    Loaded::Ngram { size: settings.ngram_size, proposals: settings.ngram_tokens }
                }
                DraftSource::Trained { name, dir } => Loaded::Trained {
                    label: label(name, sources),
                    name: dir.display().to_string(),
                    draft: Box::new(Draft::load(dir, target.device(), target.dtype())?),
                    vocabulary: DraftVocabulary::load(dir)?,
                },
            };
            if let DraftSource::Trained { dir, .. } = source {
                check_target(settings, (target_dir, dir))?;
            }
            drafts.push(loaded);
        }
        Ok(Self { drafts })
    }

    /// Their names in tables, in order.
    pub(super) fn labels(&self) -> impl Iterator<Item = &str> {
        self.drafts.iter().map(Loaded::label)
    }

    pub(super) fn facts(&self) -> Vec<DraftFacts> {
        self.drafts.iter().map(Loaded::facts).collect()
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
                Loaded::Trained { draft, vocabulary, .. } => {
                    let vocabulary = vocabulary.as_ref();
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
            Self::Trained { label, .. } => label,
        }
    }

    fn facts(&self) -> DraftFacts {
        let label = self.label().to_owned();
        match self {
            Self::Ngram { size, proposals } => DraftFacts {
                name: format!("{label}: last {size} tokens or fewer, {proposals} proposals"),
                label,
                block_size: Some(proposals + 1),
                vocabulary: None,
            },
            Self::Trained { name, draft, vocabulary, .. } => DraftFacts {
                name: name.clone(),
                label,
                block_size: Some(draft.config().block_size),
                vocabulary: vocabulary.as_ref().map(|vocabulary| vocabulary.selected().len()),
            },
        }
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

/// Refuses a draft that was made for another target, as far as it says, unless that is wanted.
fn check_target(
    settings: &EvalSettings,
    (target_dir, draft_dir): (&Path, &Path),
) -> Result<(), Error> {
    let Some(made_for) = TargetIdentity::of_draft(draft_dir)? else { return Ok(()) };
    let name = settings.target.as_deref().unwrap_or_default();
    let target = TargetIdentity::read(target_dir, name)?;
    if made_for.is_same_as(&target) {
        return Ok(());
    }
    if settings.allow_other_target {
        say(format!("the draft was made for {made_for} and is measured on {target}"));
        return Ok(());
    }
    let (found, expected) = (made_for.to_string(), target.to_string());
    Err(Error::OtherTarget { path: draft_dir.into(), found, expected })
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
