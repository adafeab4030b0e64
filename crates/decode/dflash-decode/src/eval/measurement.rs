//! Evaluates one set prompt by prompt: plainly and with every draft.

use std::fmt::{self, Display, Formatter};
use std::sync::atomic::AtomicBool;

use dflash_chat::ChatTokenizer;
use dflash_eval::{Answer, EvalMode, Lossless, Measured, Verification, Whole};
use dflash_settings::{EvalSettings, NO_DRAFT, Speculate};
use dflash_target::Target;

use super::RowTurn;
use super::drafts::{DraftMode, Drafts};
use crate::Error;
use crate::answer::{Generation, answer};
use crate::engine::{Engine, EngineOptions, Proposals, Request};
use crate::limits::Limits;
use crate::lossless::compare;
use crate::prompts::{Prompt, Room};
use crate::sampling::Sampling;

/// Tokens of the untimed first answer per mode.
const WARM_UP_TOKENS: usize = 32;

/// All decoders, and their results so far.
#[derive(Debug)]
pub(super) struct Measurement<'a> {
    target: &'a Target,
    limits: Limits,
    sampling: Sampling,
    seed: u64,
    tie_tolerance: Option<f64>,
    plain: Engine<'a>,
    plain_answers: Vec<Answer>,
    drafted: Vec<Drafted<'a>>,
}

#[derive(Debug)]
struct Drafted<'a> {
    mode: DraftMode<'a>,
    engine: Engine<'a>,
    answers: Vec<Answer>,
    lossless: Option<Lossless>,
}

impl<'a> Measurement<'a> {
    pub(super) fn new(
        settings: &EvalSettings,
        target: &'a Target,
        drafts: &'a Drafts,
        sampling: Sampling,
        limits: Limits,
    ) -> Result<Self, Error> {
        let proof = sampling.is_greedy().then(|| Lossless::new(settings.tie_tolerance));
        let options = EngineOptions::one_by_one(target, Speculate::Off);
        let drafted = |mode: DraftMode<'a>| {
            let engine = mode.engine(target, options)?;
            Ok(Drafted { mode, engine, answers: Vec::new(), lossless: proof.clone() })
        };
        Ok(Self {
            target,
            limits,
            sampling,
            seed: settings.seed,
            tie_tolerance: settings.tie_tolerance,
            plain: Engine::new(target, Proposals::None, options)?,
            plain_answers: Vec::new(),
            drafted: drafts.modes().into_iter().map(drafted).collect::<Result<_, Error>>()?,
        })
    }

    /// An untimed answer per mode: the first passes allocate memory and fill caches.
    pub(super) fn warm_up(&mut self, prompt: &Prompt, stop: &AtomicBool) -> Result<(), Error> {
        let max_new_tokens = WARM_UP_TOKENS.min(self.limits.max_new_tokens);
        let limits = Limits { max_new_tokens, ..self.limits.clone() };
        let request = Request::new(&prompt.ids, &limits, self.sampling, self.seed);
        let drafted = self.drafted.iter_mut().map(|drafted| &mut drafted.engine);
        for engine in std::iter::once(&mut self.plain).chain(drafted) {
            answer(engine, request.clone(), stop, |_| Ok(true))?;
        }
        Ok(())
    }

    /// Answers a row, turn by turn, in each mode; later turns follow the plain answers.
    pub(super) fn answer_row(
        &mut self,
        row: usize,
        prompt: &Prompt,
        tokenizer: &ChatTokenizer,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let room = Room { config: self.target.config(), max_new: self.limits.max_new_tokens };
        let mut turn = 0;
        prompt.dialogue(tokenizer, room, |ids| {
            let tokens = self.answer_all(RowTurn { row, turn }, ids, stop)?;
            turn += 1;
            Ok(tokens)
        })
    }

    /// Answers one prompt in each mode; returns the plain answer's tokens.
    fn answer_all(
        &mut self,
        place: RowTurn,
        ids: &[i64],
        stop: &AtomicBool,
    ) -> Result<Vec<i64>, Error> {
        let modes = self.drafted.len() + 1;
        let first = self.plain_answers.len() % modes;
        // Each answer has its own random numbers, the same in each mode.
        let seed = super::seed_of(self.seed, place);
        let request = Request::new(ids, &self.limits, self.sampling, seed);
        let mut plain: Option<Generation> = None;
        let mut texts: Vec<Vec<i64>> = vec![Vec::new(); self.drafted.len()];
        for mode in (first..modes).chain(0..first) {
            let Some(index) = mode.checked_sub(1) else {
                let made = answer(&mut self.plain, request.clone(), stop, |_| Ok(true))?;
                self.plain_answers.push(answer_of(place, ids, &made, None));
                plain = Some(made);
                continue;
            };
            let drafted = &mut self.drafted[index];
            let made = answer(&mut drafted.engine, request.clone(), stop, |_| Ok(true))?;
            let verification = Verification::of(&made.accepted(), drafted.engine.proposals());
            drafted.answers.push(answer_of(place, ids, &made, Some(verification)));
            texts[index] = made.tokens;
        }
        let plain = plain.expect("plain decoding is one of the ways").tokens;
        for (drafted, text) in self.drafted.iter_mut().zip(&texts) {
            if let Some(lossless) = &mut drafted.lossless {
                let both = [plain.as_slice(), text.as_slice()];
                lossless.record(compare(self.target, ids, both, self.tie_tolerance));
            }
        }
        Ok(plain)
    }

    /// Results for `set`: plain decoding first, then every draft.
    pub(super) fn finish(self, set: &str, mode: EvalMode) -> Vec<Measured> {
        let whole = Whole::default;
        let plain = Measured::new(set, mode, NO_DRAFT, self.plain_answers, whole(), None, None);
        let drafted = self.drafted.into_iter().map(|one| {
            let label = one.mode.label.as_str();
            let (answers, lossless) = (one.answers, one.lossless);
            let step_seconds = one.engine.step_seconds(1);
            let measured =
                Measured::new(set, mode, label, answers, whole(), lossless, Some(&plain));
            Measured { step_seconds, ..measured }
        });
        let drafted: Vec<Measured> = drafted.collect();
        std::iter::once(plain).chain(drafted).collect()
    }
}

fn answer_of(
    RowTurn { row, turn }: RowTurn,
    prompt: &[i64],
    generation: &Generation,
    verification: Option<Verification>,
) -> Answer {
    Answer {
        row,
        turn,
        prompt_tokens: prompt.len(),
        tokens: generation.tokens.len(),
        first_token_s: generation.prefill_seconds,
        total_s: generation.seconds(),
        cut: !generation.finished,
        // An answer of one token has no step, and so no acceptance length.
        verification: verification.filter(|counts| counts.steps > 0),
    }
}

/// Shows each draft's tau so far in the progress line.
impl Display for Measurement<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} answers", self.plain_answers.len())?;
        for drafted in &self.drafted {
            let each = drafted.answers.iter().filter_map(|answer| answer.verification.as_ref());
            if let Some(length) = Verification::sum(each).acceptance_length() {
                write!(f, ", acceptance length {length:.2}")?;
            }
        }
        Ok(())
    }
}
