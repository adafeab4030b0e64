//! Answers one request with an otherwise idle engine.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::Error;
use crate::engine::{Engine, Finish, Output, Request};
use crate::limits::check;

/// One answer with statistics of its steps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Generation {
    /// Its tokens, including the end token if generated.
    pub tokens: Vec<i64>,
    /// Whether it ended with an end token rather than at the length limit.
    pub finished: bool,
    /// Seconds from the prompt to the first token.
    pub prefill_seconds: f64,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
    /// For each step after the first token, the number of proposals and of accepted ones: not cut
    /// at the answer's end, and zero for plain steps.
    pub steps: Vec<(usize, usize)>,
}

impl Generation {
    /// Seconds from the prompt to the last token.
    pub fn seconds(&self) -> f64 {
        self.prefill_seconds + self.decode_seconds
    }

    /// Number of accepted proposals per step.
    pub fn accepted(&self) -> Vec<usize> {
        self.steps.iter().map(|(_, accepted)| *accepted).collect()
    }

    /// Adds a step's output, which took `seconds`.
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

/// Runs `request` to its end, or until `take` returns false. Time spent in `take` is not counted.
///
/// # Errors
/// [`Error::Interrupted`] when `stop` is set; [`Error::OutOfMemory`]; errors from `take`.
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
