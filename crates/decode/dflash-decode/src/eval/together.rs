//! Evaluates one set at higher concurrency, in parts: each part plainly and with every draft, in
//! changing order, so that warm-up and machine load affect all equally.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use dflash_chat::ChatTokenizer;
use dflash_eval::{Answer, EvalMode, Lossless, Measured, SetPart, Verification, Whole, turns};
use dflash_settings::{EvalSettings, NO_DRAFT, Speculate};
use dflash_target::Target;

use super::drafts::Drafts;
use super::{Asked, RowTurn};
use crate::engine::{Engine, EngineOptions, Finish, Output, Proposals, Request};
use crate::limits::{Limits, check};
use crate::lossless::compare;
use crate::prompts::{Prompt, Room};
use crate::sampling::Sampling;
use crate::{Error, SequenceId};

/// Maximum prompt tokens per step, the default of `dflash serve`.
const PREFILL_TOKENS: usize = 2048;
/// Tokens of the untimed first answers.
const WARM_UP_TOKENS: usize = 32;

/// A set, its mode, and the decoders.
pub(super) struct Together<'a> {
    pub(super) settings: &'a EvalSettings,
    pub(super) target: &'a Target,
    pub(super) drafts: &'a Drafts,
    pub(super) asked: &'a Asked<'a>,
    pub(super) limits: Limits,
    pub(super) mode: EvalMode,
}

/// A prompt and its answer.
#[derive(Debug)]
struct Said {
    prompt: Vec<i64>,
    tokens: Vec<i64>,
}

/// All answers of one drafter.
#[derive(Debug, Default)]
struct Round {
    answers: Vec<Answer>,
    said: HashMap<RowTurn, Said>,
    parts: Vec<SetPart>,
}

/// A prompt being answered.
struct Active {
    place: RowTurn,
    prompt: Prompt,
    began: Instant,
    first_token_s: Option<f64>,
    tokens: Vec<i64>,
    accepted: Vec<usize>,
    /// Whether it ended at the length limit.
    cut: bool,
}

impl Together<'_> {
    /// Runs plain decoding and every draft at every length, alternating. Calls `done` after each
    /// answer.
    ///
    /// # Errors
    /// A draft that does not match the target; [`Error::Interrupted`].
    pub(super) fn measure(
        &self,
        stop: &AtomicBool,
        mut done: impl FnMut(),
    ) -> Result<Vec<Measured>, Error> {
        let modes = self.drafts.modes();
        let mut engines = vec![Engine::new(self.target, Proposals::None, self.options())?];
        for mode in &modes {
            engines.push(mode.engine(self.target, self.options())?);
        }
        for engine in &mut engines {
            self.warm_up(engine, stop)?;
        }
        let mut rounds: Vec<Round> = engines.iter().map(|_| Round::default()).collect();
        // If questions follow plain decoding's answers, it always goes first.
        let fixed = usize::from(self.asked.prompts.iter().any(Prompt::has_later_turns));
        let parts = turns::parts(self.asked.prompts.len(), self.mode.concurrency);
        for (number, part) in parts.into_iter().enumerate() {
            for at in turns::order(number, engines.len(), fixed) {
                let plain = (at > 0).then(|| &rounds[0].said);
                let round = self.round(&mut engines[at], part.clone(), plain, stop, &mut done)?;
                rounds[at].append(round);
            }
        }
        let names = std::iter::once(NO_DRAFT).chain(modes.iter().map(|mode| mode.label.as_str()));
        let mut results: Vec<Measured> = Vec::new();
        for ((name, engine), at) in names.zip(&engines).zip(0..) {
            let drafts = at > 0;
            let lossless = (drafts && self.mode.temperature == 0.0)
                .then(|| self.lossless(&rounds[0], &rounds[at]));
            let (answers, whole) = rounds[at].measured();
            let plain = results.first();
            let (set, mode) = (self.asked.set, self.mode);
            let measured = Measured::new(set, mode, name, answers, whole, lossless, plain);
            let step_seconds =
                if drafts { engine.step_seconds(self.mode.concurrency) } else { Vec::new() };
            results.push(Measured { step_seconds, ..measured });
        }
        Ok(results)
    }

    fn options(&self) -> EngineOptions {
        EngineOptions {
            max_sequences: self.mode.concurrency,
            max_model_len: self.target.config().max_position_embeddings as usize,
            prefill_tokens: PREFILL_TOKENS,
            prefix_bytes: 0,
            speculate: Speculate::Off,
        }
    }

    /// Answers all prompts of a part, as many at a time as the engine holds. Later turns follow the
    /// answers of `plain` decoding, if known, so that all drafts answer the same prompts.
    fn round(
        &self,
        engine: &mut Engine<'_>,
        rows: Range<usize>,
        plain: Option<&HashMap<RowTurn, Said>>,
        stop: &AtomicBool,
        done: &mut dyn FnMut(),
    ) -> Result<Round, Error> {
        let mut waiting: VecDeque<(RowTurn, Prompt)> =
            rows.map(|row| (RowTurn { row, turn: 0 }, self.asked.prompts[row].clone())).collect();
        let mut active: HashMap<SequenceId, Active> = HashMap::new();
        let (mut round, began) = (Round::default(), Instant::now());
        while !(waiting.is_empty() && active.is_empty()) {
            check(stop)?;
            while engine.has_room() {
                let Some((place, prompt)) = waiting.pop_front() else { break };
                let id = engine.add(self.request(place, &prompt, self.limits.max_new_tokens));
                active.insert(id, Active::new(place, prompt));
            }
            for output in engine.step()? {
                let one = active.get_mut(&output.id).expect("the engine has what was added");
                one.take(&output);
                if output.finish.is_some() {
                    let one = active.remove(&output.id).expect("it was there");
                    if let Some(next) = self.next_turn(&one, plain)? {
                        waiting.push_front(next);
                    }
                    round.record(one, engine.proposals());
                    done();
                }
            }
        }
        let tokens = round.answers.iter().map(|answer| answer.tokens).sum();
        round.parts = vec![SetPart { tokens, seconds: began.elapsed().as_secs_f64() }];
        Ok(round)
    }

    /// Untimed answers: the first passes allocate memory and fill caches.
    fn warm_up(&self, engine: &mut Engine<'_>, stop: &AtomicBool) -> Result<(), Error> {
        let tokens = WARM_UP_TOKENS.min(self.limits.max_new_tokens);
        for prompt in self.asked.prompts.iter().take(self.mode.concurrency) {
            engine.add(self.request(RowTurn { row: 0, turn: 0 }, prompt, tokens));
        }
        while !engine.is_empty() {
            check(stop)?;
            engine.step()?;
        }
        Ok(())
    }

    fn request(&self, place: RowTurn, prompt: &Prompt, max_new_tokens: usize) -> Request {
        let limits = Limits { max_new_tokens, ..self.limits.clone() };
        let seed = super::seed_of(self.settings.seed, place);
        Request::new(&prompt.ids, &limits, Sampling::at(self.mode.temperature), seed)
    }

    /// The next turn after an answer, if any.
    fn next_turn(
        &self,
        one: &Active,
        plain: Option<&HashMap<RowTurn, Said>>,
    ) -> Result<Option<(RowTurn, Prompt)>, Error> {
        let known = plain.and_then(|plain| plain.get(&one.place)).map(|said| &said.tokens);
        let tokenizer: &ChatTokenizer = &self.asked.tokenizer;
        let room = Room { config: self.target.config(), max_new: self.limits.max_new_tokens };
        let next = one.prompt.after(known.unwrap_or(&one.tokens), tokenizer, room)?;
        let RowTurn { row, turn } = one.place;
        Ok(next.map(|prompt| (RowTurn { row, turn: turn + 1 }, prompt)))
    }

    /// Compares every text with the plain one.
    fn lossless(&self, plain: &Round, drafted: &Round) -> Lossless {
        let mut lossless = Lossless::new(self.settings.tie_tolerance);
        for answer in &drafted.answers {
            let place = RowTurn { row: answer.row, turn: answer.turn };
            let [plain, drafted] = [&plain.said[&place], &drafted.said[&place]];
            let texts = [plain.tokens.as_slice(), &drafted.tokens];
            let tolerance = self.settings.tie_tolerance;
            lossless.record(compare(self.target, &plain.prompt, texts, tolerance));
        }
        lossless
    }
}

impl Active {
    fn new(place: RowTurn, prompt: Prompt) -> Self {
        let (tokens, accepted) = (Vec::new(), Vec::new());
        let (began, first_token_s) = (Instant::now(), None);
        Self { place, prompt, began, first_token_s, tokens, accepted, cut: false }
    }

    fn take(&mut self, output: &Output) {
        // The first token comes from the prompt, not from a step.
        if !self.tokens.is_empty() {
            self.accepted.push(output.block.as_ref().map_or(0, |block| block.accepted));
        }
        self.first_token_s.get_or_insert_with(|| self.began.elapsed().as_secs_f64());
        self.tokens.extend(output.tokens.iter().map(|token| token.id));
        self.cut = output.finish == Some(Finish::Length);
    }
}

impl Round {
    fn append(&mut self, part: Self) {
        self.answers.extend(part.answers);
        self.said.extend(part.said);
        self.parts.extend(part.parts);
    }

    fn measured(&self) -> (Vec<Answer>, Whole) {
        let mut answers = self.answers.clone();
        answers.sort_by_key(|answer| (answer.row, answer.turn));
        let seconds = Some(self.parts.iter().map(|part| part.seconds).sum());
        (answers, Whole { seconds, verification: None, parts: self.parts.clone() })
    }

    fn record(&mut self, one: Active, proposals: usize) {
        let total_s = one.began.elapsed().as_secs_f64();
        let verification = Verification::of(&one.accepted, proposals);
        let RowTurn { row, turn } = one.place;
        self.answers.push(Answer {
            row,
            turn,
            prompt_tokens: one.prompt.ids.len(),
            tokens: one.tokens.len(),
            first_token_s: one.first_token_s.unwrap_or(total_s),
            total_s,
            cut: one.cut,
            // An answer of one token has no step, and plain decoding has none.
            verification: Some(verification).filter(|counts| counts.steps > 0 && proposals > 0),
        });
        self.said.insert(one.place, Said { prompt: one.prompt.ids, tokens: one.tokens });
    }
}
