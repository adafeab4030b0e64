//! Tries the run's interpretation of a sample's states, and the wrong ones known from servers.

use dflash_hidden_states::{Dtype, HiddenStates, Probe};
use dflash_run::Agreement;
use dflash_target::TargetIo;
use tch::{Device, Kind, Tensor};

use super::cause::Cause;
use super::fit::{Reported, agrees, loss};

/// A target counts as trained if its loss is this many nats per token below uniform guessing; on a
/// few dozen tokens chance does not get that far.
pub(super) const LEARNT: f64 = 1.0;
/// Margins, in nats per token and as a share of the loss, by which another interpretation must be
/// better to be accepted: models are overconfident, so flatter logits alone improve the loss by
/// some tenths.
const BETTER: f64 = 1.0;
const BETTER_SHARE: f64 = 0.25;
/// Tolerance, as a share, for the embedding's output: half a unit of bfloat16 is 0.004.
const SAME: f64 = 0.01;
/// A scale closer to one than this is rounding.
const ONE: f64 = 0.02;
/// Soft caps of known models: Gemma's, Grok's, nanochat's.
const CAPS: [f64; 4] = [30.0, 50.0, 15.0, 20.0];
/// Minimum correlation of log-probabilities from related states.
const ALIKE: f64 = 0.5;

/// The states of one probe.
pub(super) struct Sample<'a> {
    probe: &'a Probe,
    head: &'a TargetIo,
    /// The layer whose states give the target's logits; `None` if no server provides one.
    last: Option<u32>,
    reported: Reported,
    /// The reported values without those at the ends.
    inner: Reported,
}

/// Result for a sample.
#[derive(Debug)]
pub(super) enum Found {
    /// The reported log-probabilities are the target's, for states after (`normed`) or before the
    /// norm.
    Agrees { normed: bool, agreement: Agreement },
    /// Nothing is reported; the loss in nats per token, which no other interpretation much
    /// improves.
    Loss(f64),
    /// The last states are missing or not finite.
    Nothing,
}

/// Another interpretation, with a function that computes its logits.
type Reading<'a> = (Cause, Box<dyn Fn() -> Tensor + 'a>);

impl<'a> Sample<'a> {
    pub(super) fn new(probe: &'a Probe, last: Option<u32>, head: &'a TargetIo) -> Self {
        let known: Vec<_> = probe
            .log_probabilities
            .iter()
            .filter(|of| (0..head.lm_head_vh.size()[0]).contains(&of.token))
            .cloned()
            .collect();
        let inner = Reported::inner(&known, probe.input_ids.len());
        Self { probe, head, last, reported: Reported::new(&known), inner }
    }

    /// Layers verified by content: the embedding's output if [`Self::check_embedding`] succeeded,
    /// and the last layer if log-probabilities agree.
    pub(super) fn proved(&self, agrees: bool) -> Vec<u32> {
        let has = |id: u32| self.probe.states.layer_ids.contains(&id);
        let last = self.last.filter(|_| agrees);
        Some(0).filter(|_| has(0)).into_iter().chain(last).collect()
    }

    /// # Errors
    /// Layer 0 is not the embedding's output, or another one is.
    pub(super) fn check_embedding(&self) -> Result<(), Cause> {
        let ids_t = Tensor::from_slice(&self.probe.input_ids).to_device(self.device());
        let ours_th = self.head.embed(&ids_t).to_kind(Kind::Float);
        for &id in &self.probe.states.layer_ids {
            let theirs_th = self.states(id);
            let apart = apart(&theirs_th, &ours_th);
            match (id, apart <= SAME) {
                (0, true) | (1.., false) => {}
                (1.., true) if self.probe.says_layers => {}
                (1.., true) => return Err(Cause::EmbeddingIs(id)),
                (0, false) => {
                    let scale = size_of(&(&theirs_th * &ours_th)) / size_of(&(&ours_th * &ours_th));
                    let scaled_th = &ours_th * scale;
                    return Err(match self::apart(&theirs_th, &scaled_th) <= SAME {
                        true => Cause::EmbeddingScale(scale),
                        false => Cause::OtherEmbedding { apart },
                    });
                }
            }
        }
        Ok(())
    }

    /// # Errors
    /// The cause, if the states are not those that the run expects.
    pub(super) fn read(&self) -> Result<Found, Cause> {
        let rows = self.head.lm_head_vh.size()[0];
        let reported = self.probe.log_probabilities.iter();
        if let Some(of) = reported.clone().find(|of| !(0..rows).contains(&of.token)) {
            return Err(Cause::Vocabulary { token: of.token, rows });
        }
        let has = |last: &u32| self.probe.states.layer_ids.contains(last);
        let Some(last) = self.last.filter(has) else { return Ok(Found::Nothing) };
        let own_tv = self.head.logits(&self.native(last));
        match self.reported.len() {
            0 => self.read_by_loss(last, &own_tv),
            _ => self.read_by_log_probabilities(last, &own_tv),
        }
    }

    fn read_by_log_probabilities(&self, last: u32, own_tv: &Tensor) -> Result<Found, Cause> {
        let fits = |logits_tv: &Tensor| self.reported.agreement(logits_tv, self.dtype());
        let own = fits(own_tv);
        if agrees(&own) {
            return Ok(Found::Agrees { normed: false, agreement: own });
        }
        for (cause, logits) in self.readings(last, own_tv) {
            let agreement = match cause {
                Cause::Shifted(_) if self.inner.len() == 0 => continue,
                Cause::Shifted(_) => self.inner.agreement(&logits(), self.dtype()),
                _ => fits(&logits()),
            };
            match (agrees(&agreement), cause) {
                (false, _) => {}
                (true, Cause::Normed) => return Ok(Found::Agrees { normed: true, agreement }),
                (true, cause) => return Err(cause),
            }
        }
        let scale = self.reported.best_scale(own_tv);
        if (scale - 1.0).abs() > ONE && agrees(&fits(&(own_tv.to_kind(Kind::Float) * scale))) {
            return Err(Cause::LogitScale(scale));
        }
        let correlation = self.reported.correlation(own_tv);
        if correlation >= ALIKE {
            return Err(Cause::EarlierLayer { last, correlation });
        }
        Err(Cause::Unknown(format!(
            "the target's norm and head applied to its last states give other log-probabilities than it reports: {:.3} nats apart in the root mean square, but rounding explains only {:.3}",
            own.root_mean_square, own.bound
        )))
    }

    /// Checks by loss, without log-probabilities: a trained target has a loss below uniform
    /// guessing, and a wrong interpretation of its states a much higher one. For an untrained
    /// target nothing can be decided.
    fn read_by_loss(&self, last: u32, own_tv: &Tensor) -> Result<Found, Cause> {
        let input_ids = &self.probe.input_ids;
        let guess = (self.head.lm_head_vh.size()[0] as f64).ln();
        let own = loss(own_tv, input_ids);
        let others = self.readings(last, own_tv).into_iter();
        // A source that names its layers has not confused them, and an earlier layer may happen to
        // predict a text better.
        let is_ruled_out =
            |cause: &Cause| self.probe.says_layers && matches!(cause, Cause::LastIs(_));
        let others = others.filter(|(cause, _)| !is_ruled_out(cause));
        let others = others.map(|(cause, logits)| (loss(&logits(), input_ids), cause));
        let best =
            others.filter(|(other, _)| other.is_finite()).min_by(|(a, _), (b, _)| a.total_cmp(b));
        match best {
            // Steps discard and count non-finite rows.
            Some((other, cause))
                if own.is_finite()
                    && other < guess - LEARNT
                    && other < own - BETTER.max(BETTER_SHARE * own) =>
            {
                Err(cause)
            }
            _ if own.is_finite() => Ok(Found::Loss(own)),
            _ => Ok(Found::Nothing),
        }
    }

    /// All other interpretations, most likely first.
    fn readings<'b>(&'b self, id: u32, own_tv: &'b Tensor) -> Vec<Reading<'b>> {
        let head = self.head;
        let last = move || self.native(id);
        let mut readings: Vec<Reading<'b>> = vec![(
            Cause::Normed,
            Box::new(move || head.shared().with_normed_states(true).logits(&last())),
        )];
        for sign in [1, -1] {
            readings.push((
                Cause::NormWeight(sign),
                Box::new(move || head.shared().with_norm_offset(sign.into()).logits(&last())),
            ));
        }
        let others = self.probe.states.layer_ids.iter().copied().filter(|&other| other != id);
        for id in others {
            readings.push((Cause::LastIs(id), Box::new(move || head.logits(&self.native(id)))));
        }
        for by in [1, -1] {
            // The wrapped-around ends are excluded from the comparison.
            let shifted = move || own_tv.roll([-by], [0]);
            readings.push((Cause::Shifted(by), Box::new(shifted)));
        }
        if head.lm_head_vh.data_ptr() != head.embedding_vh.data_ptr() {
            readings.push((
                Cause::Tied,
                Box::new(move || {
                    let lm_head_vh = head.embedding_vh.shallow_clone();
                    head.shared().with_lm_head(lm_head_vh).logits(&last())
                }),
            ));
        }
        let caps = CAPS.into_iter().map(Some).chain([None]);
        for cap in caps.filter(|cap| *cap != head.output().softcap) {
            let capped = move || head.shared().with_softcap(cap).logits(&last());
            readings.push((Cause::Capped(cap), Box::new(capped)));
        }
        readings
    }

    fn device(&self) -> Device {
        self.head.lm_head_vh.device()
    }

    fn dtype(&self) -> Dtype {
        self.probe.states.dtype
    }

    /// The states of a layer in float32, [T, H].
    fn states(&self, id: u32) -> Tensor {
        rows_of(&self.probe.states, id).to_device(self.device())
    }

    /// The same in the head's type.
    fn native(&self, id: u32) -> Tensor {
        self.states(id).to_kind(self.head.lm_head_vh.kind())
    }
}

/// The states of a layer in float32 on the host, [T, H].
fn rows_of(states: &HiddenStates, id: u32) -> Tensor {
    let (tokens, hidden) = (states.tokens, states.hidden_size);
    let mut bytes = vec![0; tokens * hidden * 4];
    let written = states.write_rows(id, 0..tokens, Dtype::F32, &mut bytes, hidden * 4);
    assert!(written, "the layer was found in the record");
    Tensor::from_data_size(&bytes, &[tokens as i64, hidden as i64], Kind::Float)
}

fn size_of(x: &Tensor) -> f64 {
    x.sum(Kind::Double).double_value(&[])
}

/// Norm of the difference relative to the norm of `b`.
fn apart(a: &Tensor, b: &Tensor) -> f64 {
    let difference = a - b;
    (size_of(&(&difference * &difference)) / size_of(&(b * b)).max(1e-30)).sqrt()
}
