//! One set answered several prompts at a time by the engine: plainly, and then with every draft.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use dflash_evaluation::{Answer, Lossless, Measured, Verification, Way, Whole};
use dflash_model::target::Target;
use dflash_settings::{EvalSettings, NO_DRAFT, Speculate};
use dflash_text::ChatTokenizer;

use super::Asked;
use super::drafts::Drafts;
use crate::engine::{Engine, EngineOptions, Output, Proposals, Request};
use crate::limits::{Limits, check};
use crate::lossless::compare;
use crate::prompts::Prompt;
use crate::sampling::Sampling;
use crate::{Error, SequenceId};

/// Tokens of prompts that one step reads at most, as `dflash serve` has it by default.
const PREFILL_TOKENS: usize = 2048;
/// Tokens of the untimed first answers.
const WARM_UP_TOKENS: usize = 32;

/// A set, how it is answered, and by what.
pub(super) struct Together<'a> {
    pub(super) settings: &'a EvalSettings,
    pub(super) target: &'a Target,
    pub(super) drafts: &'a Drafts,
    pub(super) asked: &'a Asked<'a>,
    pub(super) limits: Limits,
    pub(super) way: Way,
}

/// The answer to a prompt, and the prompt.
#[derive(Debug)]
struct Said {
    prompt: Vec<i64>,
    tokens: Vec<i64>,
}

/// Row and turn.
type Place = (usize, usize);

/// All answers of one drafter.
#[derive(Debug, Default)]
struct Round {
    answers: Vec<Answer>,
    said: HashMap<Place, Said>,
    seconds: f64,
}

/// A prompt that is being answered.
struct Active {
    place: Place,
    prompt: Prompt,
    began: Instant,
    first_token_s: Option<f64>,
    tokens: Vec<i64>,
    accepted: Vec<usize>,
}

impl Together<'_> {
    /// Plain decoding first, then every draft at every length. `done` is called after each answer.
    ///
    /// # Errors
    /// A draft that does not fit the target; [`Error::Interrupted`].
    pub(super) fn measure(
        &self,
        stop: &AtomicBool,
        mut done: impl FnMut(),
    ) -> Result<Vec<Measured>, Error> {
        let (set, way) = (self.asked.set, self.way);
        let mut plain_engine = Engine::new(self.target, Proposals::None, self.options())?;
        let plain = self.round(&mut plain_engine, None, (stop, &mut done))?;
        let whole = |seconds| Whole { seconds: Some(seconds), verification: None };
        let plain_answers = (plain.answers.clone(), whole(plain.seconds));
        let mut results = vec![Measured::new((set, way, NO_DRAFT), plain_answers, None, None)];
        for draft in self.drafts.ways() {
            let mut engine = draft.engine(self.target, self.options())?;
            let round = self.round(&mut engine, Some(&plain.said), (stop, &mut done))?;
            let lossless = (self.way.temperature == 0.0).then(|| self.lossless(&plain, &round));
            let answers = (round.answers, whole(round.seconds));
            let name = (set, way, draft.label.as_str());
            let measured = Measured::new(name, answers, lossless, Some(&results[0]));
            let step_seconds = engine.step_seconds(way.concurrency);
            results.push(Measured { step_seconds, ..measured });
        }
        Ok(results)
    }

    fn options(&self) -> EngineOptions {
        EngineOptions {
            max_sequences: self.way.concurrency,
            max_model_len: self.target.config().max_position_embeddings as usize,
            prefill_tokens: PREFILL_TOKENS,
            prefix_bytes: 0,
            speculate: Speculate::Off,
        }
    }

    /// All prompts, as many at a time as the engine holds. Later turns follow the answers of `plain`
    /// decoding, where these are known, so that all drafts answer the same prompts.
    fn round(
        &self,
        engine: &mut Engine<'_>,
        plain: Option<&HashMap<Place, Said>>,
        (stop, done): (&AtomicBool, &mut dyn FnMut()),
    ) -> Result<Round, Error> {
        self.warm_up(engine, stop)?;
        let prompts = self.asked.prompts.iter().cloned().enumerate();
        let mut waiting: VecDeque<(Place, Prompt)> =
            prompts.map(|(row, prompt)| ((row, 0), prompt)).collect();
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
        round.seconds = began.elapsed().as_secs_f64();
        round.answers.sort_by_key(|answer| (answer.row, answer.turn));
        Ok(round)
    }

    /// Untimed answers: the first passes allocate, and fill caches.
    fn warm_up(&self, engine: &mut Engine<'_>, stop: &AtomicBool) -> Result<(), Error> {
        let tokens = WARM_UP_TOKENS.min(self.limits.max_new_tokens);
        for prompt in self.asked.prompts.iter().take(self.way.concurrency) {
            engine.add(self.request((0, 0), prompt, tokens));
        }
        while !engine.is_empty() {
            check(stop)?;
            engine.step()?;
        }
        Ok(())
    }

    fn request(&self, place: Place, prompt: &Prompt, max_new_tokens: usize) -> Request {
        let limits = Limits { max_new_tokens, ..self.limits.clone() };
        let seed = super::seed_of(self.settings.seed, place);
        Request::new(&prompt.ids, &limits, Sampling::at(self.way.temperature), seed)
    }

    /// What is asked after an answer, if anything.
    fn next_turn(
        &self,
        one: &Active,
        plain: Option<&HashMap<Place, Said>>,
    ) -> Result<Option<(Place, Prompt)>, Error> {
        let known = plain.and_then(|plain| plain.get(&one.place)).map(|said| &said.tokens);
        let tokenizer: &ChatTokenizer = &self.asked.tokenizer;
        let room = (self.target.config(), self.limits.max_new_tokens);
        let next = one.prompt.after(known.unwrap_or(&one.tokens), tokenizer, room)?;
        let (row, turn) = one.place;
        Ok(next.map(|prompt| ((row, turn + 1), prompt)))
    }

    /// Every text against the plain one.
    fn lossless(&self, plain: &Round, drafted: &Round) -> Lossless {
        let mut lossless = Lossless::new(self.settings.tie_tolerance);
        for answer in &drafted.answers {
            let place = (answer.row, answer.turn);
            let [plain, drafted] = [&plain.said[&place], &drafted.said[&place]];
            let texts = [plain.tokens.as_slice(), &drafted.tokens];
            let tolerance = self.settings.tie_tolerance;
            lossless.record(compare(self.target, &plain.prompt, texts, tolerance));
        }
        lossless
    }
}

impl Active {
    fn new(place: Place, prompt: Prompt) -> Self {
        let (tokens, accepted) = (Vec::new(), Vec::new());
        Self { place, prompt, began: Instant::now(), first_token_s: None, tokens, accepted }
    }

    fn take(&mut self, output: &Output) {
        // The first token is the prompt's, no step's.
        if !self.tokens.is_empty() {
            self.accepted.push(output.block.as_ref().map_or(0, |block| block.accepted));
        }
        self.first_token_s.get_or_insert_with(|| self.began.elapsed().as_secs_f64());
        self.tokens.extend(output.tokens.iter().map(|token| token.id));
    }
}

impl Round {
    fn record(&mut self, one: Active, proposals: usize) {
        let total_s = one.began.elapsed().as_secs_f64();
        let verification = Verification::of(&one.accepted, proposals + 1);
        let (row, turn) = one.place;
        self.answers.push(Answer {
            row,
            turn,
            prompt_tokens: one.prompt.ids.len(),
            tokens: one.tokens.len(),
            first_token_s: one.first_token_s.unwrap_or(total_s),
            total_s,
            // An answer of one token has no step, and plain decoding has none.
            verification: Some(verification).filter(|counts| counts.steps > 0 && proposals > 0),
        });
        self.said.insert(one.place, Said { prompt: one.prompt.ids, tokens: one.tokens });
    }
}
