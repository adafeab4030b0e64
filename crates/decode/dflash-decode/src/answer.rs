//! One request answered by an engine that holds nothing else.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::Error;
use crate::engine::{Engine, Finish, Output, Request};
use crate::limits::check;

/// One answer and how its steps went.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Generation {
    /// Its tokens, the end token included where one was made.
    pub tokens: Vec<i64>,
    /// Whether an end token was made, rather than the length limit reached.
    pub finished: bool,
    /// Seconds from the prompt to the first token.
    pub prefill_seconds: f64,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
    /// Of each step after the first token, the proposals and how many of them were accepted: not cut by
    /// the answer's end, and none in a step of plain decoding.
    pub steps: Vec<(usize, usize)>,
}

impl Generation {
    /// Seconds from the prompt to the last token.
    pub fn seconds(&self) -> f64 {
        self.prefill_seconds + self.decode_seconds
    }

    /// Accepted proposals of each step.
    pub fn accepted(&self) -> Vec<usize> {
        self.steps.iter().map(|(_, accepted)| *accepted).collect()
    }

    /// Takes what a step made, which took so many seconds.
    pub(crate) fn add(&mut self, output: &Output, seconds: f64) {
        if self.tokens.is_empty() {
            self.prefill_seconds += seconds;
        } else {
            self.decode_seconds += seconds;
            let block = output.block.as_ref();
            self.steps.push(block.map_or((0, 0), |block| (block.proposed.len(), block.accepted)));
        }
        self.tokens.extend(output.tokens.iter().map(|token| token.id));
        self.finished = output.finish == Some(Finish::Stop);
    }
}

/// Runs `request` to its end, or until `take` wants no more. Time that `take` needs is not counted.
///
/// # Errors
/// [`Error::Interrupted`] when `stop` is set; [`Error::OutOfMemory`]; those of `take`.
///
/// # Panics
/// As [`Engine::add`].
pub fn answer(
    engine: &mut Engine<'_>,
    request: Request,
    stop: &AtomicBool,
    mut take: impl FnMut(Output) -> Result<bool, Error>,
) -> Result<Generation, Error> {
    let mut generation = Generation::default();
    let began = Instant::now();
    let id = engine.add(request);
    let mut seconds = began.elapsed().as_secs_f64();
    let mut outcome = Ok(());
    while !engine.is_empty() && outcome.is_ok() {
        let began = Instant::now();
        let outputs = check(stop).and_then(|()| engine.step());
        seconds += began.elapsed().as_secs_f64();
        outcome = outputs.and_then(|outputs| {
            for output in outputs {
                generation.add(&output, std::mem::take(&mut seconds));
                if !take(output)? {
                    engine.remove(id);
                }
            }
            Ok(())
        });
    }
    engine.remove(id);
    outcome.map(|()| generation)
}
