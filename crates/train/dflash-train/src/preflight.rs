//! Verifies before the first step that a source's hidden states are the target's.
//!
//! The target's final norm and lm_head, applied to the last states of a sample, give the target's
//! log-probabilities. If the source reports those (a stock vLLM does), they must agree. If it
//! reports none, the loss on the sample shows an error, provided the target is trained. On
//! disagreement, other interpretations of the same states are tried, and the one that fits names
//! the cause.
//!
//! A stock vLLM and other software's files do not say which layers their states come from. The
//! embedding's output and the last layer are verified by content; for the others the user has to
//! confirm the layers once.

mod cause;
mod fit;
mod readings;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::atomic::Ordering;

use dflash_chat::ChatTokenizer;
use dflash_dist::Communicator;
use dflash_hidden_states::Probe;
use dflash_run::{Agreement, RunDir, SourceCheck};
use dflash_target::TargetIo;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::prepared::Prepared;
use crate::rows::RowSource;
use cause::Cause;
use readings::{Found, Sample};

/// Results of checking a source.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Preflight {
    /// One per server or file checked.
    pub(crate) checks: Vec<SourceCheck>,
    /// Messages about them for the user.
    pub(crate) notes: Vec<String>,
}

impl Preflight {
    pub(crate) fn states_are_normed(&self) -> bool {
        self.checks.iter().any(|check| check.states_are_normed)
    }
}

impl Prepared<'_> {
    /// Rank 0 checks the source and shares the result with all ranks.
    pub(crate) fn check_source(
        &self,
        communicator: &dyn Communicator,
        source: &dyn RowSource,
        head: &TargetIo,
    ) -> Result<Preflight, Error> {
        let own = match communicator.rank() {
            0 => Some(self.preflight(source, head)),
            _ => None,
        };
        let told = match &own {
            Some(Ok(preflight)) => {
                serde_json::to_vec(preflight).expect("numbers and strings print")
            }
            // The reason is reported only by rank 0.
            _ => Vec::new(),
        };
        let told = communicator.all_gather_bytes(&told)?;
        let preflight = match own {
            Some(own) => own?,
            None => serde_json::from_slice(&told[0]).map_err(|_| Error::SourceRefused)?,
        };
        self.states_are_normed.store(preflight.states_are_normed(), Ordering::Relaxed);
        Ok(preflight)
    }

    fn preflight(&self, source: &dyn RowSource, head: &TargetIo) -> Result<Preflight, Error> {
        let probes = match source.probes() {
            // The stream notices the stop too, and then all ranks end together.
            Err(Error::Hidden(dflash_hidden_states::Error::Interrupted)) => {
                return Ok(Preflight::default());
            }
            probes => probes?,
        };
        let mut found = Preflight::default();
        for probe in &probes {
            let second = || {
                let others = source.second_probes()?;
                // Files are one source; servers are told apart by address.
                let same = others.iter().find(|other| {
                    other.origin == probe.origin || other.requests == 0 && probe.requests == 0
                });
                same.map(|probe| self.check_probe(probe, head)).transpose()
            };
            self.check_embedding(probe, head)?;
            let check = match self.check_probe(probe, head) {
                // Reported log-probabilities leave nothing to chance.
                first if !probe.log_probabilities.is_empty() => first?,
                first => confirmed(first, second)?,
            };
            found.notes.extend(notes(&check, head));
            found.notes.extend(self.target.no_last_state.map(str::to_owned));
            found.checks.push(check);
        }
        let normed = found.states_are_normed();
        match found.checks.iter().find(|check| check.states_are_normed != normed) {
            Some(check) => {
                let cause = "its last states are before the final norm, and those of another server \
                             of this run behind it; start all servers alike";
                Err(Error::OtherStates { origin: check.origin.clone(), cause: cause.to_owned() })
            }
            None => Ok(found),
        }
    }

    /// In any sample, layer 0 and no other must be the embedding's output.
    fn check_embedding(&self, probe: &Probe, head: &TargetIo) -> Result<(), Error> {
        let sample = Sample::new(probe, self.last_layer(), head);
        sample.check_embedding().map_err(|cause| refused(probe, &cause))
    }

    /// The layer whose states give the target's logits, if there is one.
    fn last_layer(&self) -> Option<u32> {
        let last = self.target.num_hidden_layers as u32;
        Some(last).filter(|_| self.target.no_last_state.is_none())
    }

    fn check_probe(&self, probe: &Probe, head: &TargetIo) -> Result<SourceCheck, Error> {
        let sample = Sample::new(probe, self.last_layer(), head);
        let found = match sample.read() {
            Err(Cause::Unknown(how)) => {
                Err(self.other_tokenizer(probe).unwrap_or(Cause::Unknown(how)))
            }
            found => found,
        };
        let found = found.map_err(|cause| refused(probe, &cause))?;
        let mut check = SourceCheck {
            origin: probe.origin.clone(),
            requests: probe.requests,
            tokens: probe.input_ids.len(),
            states_are_normed: matches!(found, Found::Agrees { normed: true, .. }),
            says_layers: probe.says_layers,
            ..SourceCheck::default()
        };
        match found {
            Found::Agrees { agreement, .. } => check.log_probabilities = Some(agreement),
            Found::Loss(loss) => check.loss = Some(loss),
            Found::Nothing => {}
        }
        check.proved_layer_ids = sample.proved(check.log_probabilities.is_some());
        check.trusted_layer_ids = self.trusted(&check)?;
        Ok(check)
    }

    /// The layers that rest on the user's word: the draft uses them, and nothing verifies them.
    fn trusted(&self, check: &SourceCheck) -> Result<Vec<u32>, Error> {
        if check.says_layers {
            return Ok(Vec::new());
        }
        let unproved = |id: &u32| !check.proved_layer_ids.contains(id);
        let ids: Vec<u32> = self.layer_ids().into_iter().filter(unproved).collect();
        let settings = &self.config.settings;
        let trusts = settings.hidden_states.trust_layer_ids;
        if ids.is_empty() || trusts || self.was_trusted(&settings.save_path, &ids) {
            return Ok(ids);
        }
        let (origin, proved) = (check.origin.clone(), check.proved_layer_ids.clone());
        Err(Error::LayersUnsaid { origin, wanted: self.layer_ids(), ids, proved })
    }

    /// Whether the user already confirmed these layers when the resumed run started.
    fn was_trusted(&self, save_path: &Path, ids: &[u32]) -> bool {
        let earlier = self.resume.as_ref().and_then(|_| RunDir::at(save_path).provenance().ok()?);
        earlier.is_some_and(|run| {
            run.source_checks
                .iter()
                .any(|check| ids.iter().all(|id| check.trusted_layer_ids.contains(id)))
        })
    }

    /// A token that the source's tokenizer decodes differently from the target's.
    fn other_tokenizer(&self, probe: &Probe) -> Option<Cause> {
        let tokenizer = ChatTokenizer::load(&self.config.target_dir).ok()?;
        let words = probe.log_probabilities.iter().filter_map(|reported| {
            let theirs = reported.text.as_deref().map(str::trim).filter(|text| is_plain(text))?;
            let ours = tokenizer.decode(&[reported.token], false).ok()?;
            Some((reported.token, theirs.to_owned(), ours.trim().to_owned()))
        });
        let words: Vec<_> = words.collect();
        let other = words.iter().filter(|(_, theirs, ours)| theirs != ours);
        // A single one may merely be spelled differently.
        let differ = 2 * other.clone().count() > words.len();
        let (token, theirs, ours) = other.clone().next().filter(|_| differ)?.clone();
        Some(Cause::Tokenizer { token, theirs, ours })
    }
}

fn refused(probe: &Probe, cause: &Cause) -> Error {
    Error::OtherStates { origin: probe.origin.clone(), cause: cause.to_string() }
}

/// Accepts a source if the `first` or the `second` sample passes: on a single text the loss may
/// look wrong for correct states.
fn confirmed(
    first: Result<SourceCheck, Error>,
    second: impl FnOnce() -> Result<Option<SourceCheck>, Error>,
) -> Result<SourceCheck, Error> {
    let Err(refusal @ Error::OtherStates { .. }) = first else { return first };
    match second() {
        Ok(Some(check)) => Ok(check),
        Ok(None) | Err(Error::OtherStates { .. }) => Err(refusal),
        Err(other) => Err(other),
    }
}

/// Whether all tokenizers decode a token to this text alike.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|letter| letter.is_ascii_alphanumeric())
}

/// Messages for the user about a check.
fn notes(check: &SourceCheck, head: &TargetIo) -> Vec<String> {
    let SourceCheck { origin, tokens, requests, .. } = check;
    let cost = match requests {
        0 => "one file".to_owned(),
        1 => "one request".to_owned(),
        n => format!("{n} requests"),
    };
    let mut notes = Vec::new();
    if let Some(Agreement { compared, root_mean_square, largest, bound }) = check.log_probabilities
    {
        notes.push(format!(
            "checked: {compared} log-probabilities of {tokens} tokens from {origin} are those of the \
             target's norm and head on its last states: {largest:.4} nats apart at most, \
             {root_mean_square:.4} in the root mean square (bound {bound:.4}); {cost}"
        ));
    }
    if let Some(loss) = check.loss {
        let guess = (head.lm_head_vh.size()[0] as f64).ln();
        notes.push(format!(
            "checked: by the last states of {origin} the target's loss on {tokens} tokens of the data \
             is {loss:.3} nats a token, where guessing has {guess:.3}; {cost}"
        ));
        if loss > guess - readings::LEARNT {
            notes.push(
                "that is no better than guessing: unless the target is untrained, these states are \
                 not its own, or the data has another tokenizer"
                    .to_owned(),
            );
        }
    }
    if check.log_probabilities.is_none() && check.loss.is_none() {
        notes.push(format!(
            "{origin} has no states of the last layer, or none that are finite: whether its states are \
             the target's is not checked"
        ));
    }
    if check.states_are_normed {
        notes.push(format!(
            "{origin} returns its last states after the final norm: they are used as such"
        ));
    }
    if !check.says_layers {
        notes.push(format!(
            "{origin} does not name its layers: {} verified, {} trusted",
            listed(&check.proved_layer_ids),
            listed(&check.trusted_layer_ids)
        ));
    }
    notes
}

/// Layer ids in command-line form.
pub(crate) fn listed(ids: &[u32]) -> String {
    match ids {
        [] => "none".to_owned(),
        ids => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
    }
}
