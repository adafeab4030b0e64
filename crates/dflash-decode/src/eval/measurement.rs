//! One set answered in one way: plainly and with every draft, side by side.

use std::fmt::{self, Display, Formatter};
use std::sync::atomic::AtomicBool;

use dflash_evaluation::{Answer, Lossless, Measured, Verification, Way, Whole};
use dflash_model::target::Target;
use dflash_settings::{EvalSettings, NO_DRAFT};
use dflash_text::ChatTokenizer;

use super::drafts::{Drafter, Drafts};
use crate::Error;
use crate::lossless::compare;
use crate::plain::{Generation, Limits, PlainDecoder};
use crate::prompts::Prompt;
use crate::sampling::Sampler;

/// Tokens that the untimed first answer makes, each way.
const WARM_UP_TOKENS: usize = 32;

/// All decoders, and what they have shown so far.
#[derive(Debug)]
pub(super) struct Measurement<'a> {
    target: &'a Target,
    limits: Limits,
    tie_tolerance: Option<f64>,
    plain: PlainDecoder<'a>,
    plain_answers: Vec<Answer>,
    drafted: Vec<Drafted<'a>>,
}

/// A draft, and its answers.
#[derive(Debug)]
struct Drafted<'a> {
    drafter: Drafter<'a>,
    answers: Vec<Answer>,
    lossless: Option<Lossless>,
}

impl<'a> Measurement<'a> {
    pub(super) fn new(
        settings: &EvalSettings,
        (target, drafts): (&'a Target, &'a Drafts),
        (sampler, limits): (Sampler, Limits),
    ) -> Result<Self, Error> {
        let proof = sampler.is_greedy().then(|| Lossless::new(settings.tie_tolerance));
        let drafted = |drafter| Drafted { drafter, answers: Vec::new(), lossless: proof.clone() };
        let drafters = drafts.drafters(target, &sampler)?;
        Ok(Self {
            target,
            limits,
            tie_tolerance: settings.tie_tolerance,
            plain: PlainDecoder::new(target, sampler),
            plain_answers: Vec::new(),
            drafted: drafters.into_iter().map(drafted).collect(),
        })
    }

    /// An untimed answer each way: the first passes allocate, and fill caches.
    pub(super) fn warm_up(&mut self, prompt: &Prompt, stop: &AtomicBool) -> Result<(), Error> {
        let max_new_tokens = WARM_UP_TOKENS.min(self.limits.max_new_tokens);
        let limits = Limits { max_new_tokens, ..self.limits.clone() };
        self.plain.generate(&prompt.ids, &limits, stop)?;
        for drafted in &mut self.drafted {
            drafted.drafter.generate(&prompt.ids, &limits, stop)?;
        }
        Ok(())
    }

    /// Answers a row, turn by turn, each way; later turns follow the plain answers.
    pub(super) fn answer_row(
        &mut self,
        row: usize,
        prompt: &Prompt,
        tokenizer: &ChatTokenizer,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let room = (self.target.config(), self.limits.max_new_tokens);
        let mut turn = 0;
        prompt.dialogue(tokenizer, room, |ids| {
            let tokens = self.answer((row, turn), ids, stop)?;
            turn += 1;
            Ok(tokens)
        })
    }

    /// Answers one prompt each way; returns the plain answer's tokens.
    fn answer(
        &mut self,
        place: (usize, usize),
        ids: &[i64],
        stop: &AtomicBool,
    ) -> Result<Vec<i64>, Error> {
        let ways = self.drafted.len() + 1;
        let first = self.plain_answers.len() % ways;
        let mut plain: Option<Generation> = None;
        let mut texts: Vec<Vec<i64>> = vec![Vec::new(); self.drafted.len()];
        for way in (first..ways).chain(0..first) {
            let Some(index) = way.checked_sub(1) else {
                let generation = self.plain.generate(ids, &self.limits, stop)?;
                self.plain_answers.push(answer_of(place, ids, &generation, None));
                plain = Some(generation);
                continue;
            };
            let drafted = &mut self.drafted[index];
            let speculation = drafted.drafter.generate(ids, &self.limits, stop)?;
            let block_size = drafted.drafter.block_size();
            let verification = Verification::of(&speculation.accepted, block_size);
            let generation = speculation.generation;
            drafted.answers.push(answer_of(place, ids, &generation, Some(verification)));
            texts[index] = generation.tokens;
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

    /// What was measured of `set`: plain decoding first, then every draft.
    pub(super) fn finish(self, set: &str, way: Way, drafts: &Drafts) -> Vec<Measured> {
        let whole = Whole::default;
        let plain = Measured::new((set, way, NO_DRAFT), (self.plain_answers, whole()), None, None);
        let drafted = self.drafted.into_iter().zip(drafts.labels()).map(|(one, label)| {
            let answers = (one.answers, whole());
            Measured::new((set, way, label), answers, one.lossless, Some(&plain))
        });
        let drafted: Vec<Measured> = drafted.collect();
        std::iter::once(plain).chain(drafted).collect()
    }
}

fn answer_of(
    (row, turn): (usize, usize),
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
        // An answer of one token has no step, and so no acceptance length.
        verification: verification.filter(|counts| counts.steps > 0),
    }
}

/// Tau of each draft so far, for the progress line.
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
