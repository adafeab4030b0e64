//! The target's own greedy answers to many prompts.
//!
//! A draft imitates its target best on text that the target writes, so training data gets its
//! answers replaced. Sequences share every matrix product and are replaced as they end, so the
//! batch stays full whatever the lengths.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use dflash_console::{Progress, Unit};
use dflash_model::ops::most_likely;
use dflash_model::place;
use dflash_model::target::{BatchCache, Target, TargetConfig, TargetOptions};
use dflash_settings::RegenerateSettings;
use dflash_text::ChatTokenizer;
use tch::Tensor;

use crate::Error;
use crate::dialogue::{Dialogue, Next, Speaker};
use crate::partial::{Found, PartialOutput, find};
use crate::plain::{Limits, check, roomy};
use crate::rows::{Place, read_rows};
use crate::stamp::Stamp;

/// What a regeneration did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RegenerateSummary {
    /// Rows of the data whose answers are in the output file.
    pub rows: usize,
    /// Of these, rows that an earlier run had answered.
    pub resumed: usize,
    /// Rows left out because prompt and answer exceed the target's context.
    pub skipped: usize,
    /// Conversations that end early because a later turn does.
    pub shortened: usize,
    /// Tokens made by this run.
    pub tokens: usize,
    /// Seconds it took, loading apart.
    pub seconds: f64,
}

/// Answers every row of the data and writes `question`, `answer`, `input_ids`, `loss_mask` and
/// `finished`, in the order of the data.
///
/// Rows that are not a question alone get their `messages` instead. Every answer of a conversation
/// is made anew, from the new ones before it; where the template rewrites those, a conversation
/// gives several rows. A stopped run leaves `OUTPUT.partial`, and the same command continues it; a
/// larger `limit` continues a finished file.
///
/// # Errors
/// Model or data that cannot be read, output that cannot be written or is of other making;
/// [`Error::Interrupted`].
pub fn regenerate(
    settings: &RegenerateSettings,
    target_dir: &Path,
    stop: &AtomicBool,
) -> Result<RegenerateSummary, Error> {
    let (device, dtype) = place(settings.device, settings.dtype, 0)?;
    let tokenizer = ChatTokenizer::load(target_dir)?;
    let config = TargetConfig::load(target_dir)?;
    let limits = Limits::new(&config, &tokenizer, settings.max_new_tokens);
    let speaker = Speaker { tokenizer: &tokenizer, config: &config, limits: &limits };
    let (dialogues, skipped) = usable_dialogues(settings, speaker)?;
    let stamp = Stamp::new(settings, target_dir, (&config, &tokenizer, &limits), dtype)?;
    let found = find(&settings.output, &stamp, dialogues.len(), settings.overwrite)?;
    let resumed = found.prompts();
    let mut summary = RegenerateSummary {
        rows: dialogues.len(),
        resumed,
        skipped,
        shortened: 0,
        tokens: 0,
        seconds: 0.0,
    };
    if matches!(found, Found::Finished(..)) && resumed == dialogues.len() {
        return Ok(summary);
    }
    let mut output = PartialOutput::open(&settings.output, &stamp, found)?;
    let target = Target::load(target_dir, &TargetOptions { device, dtype })?;
    let started = Instant::now();
    let data = settings.data.as_path();
    let mut work =
        Work::new((data, dialogues), output.written(), speaker, (&target, settings.batch));
    while let Some(answers) = work.decoder.step(stop)? {
        for answer in answers {
            work.take(answer, &mut output, &mut summary)?;
        }
    }
    output.finish()?;
    summary.seconds = started.elapsed().as_secs_f64();
    Ok(summary)
}

/// The rows of the data as dialogues, without those that leave no room for a first answer, and how
/// many those are.
fn usable_dialogues(
    settings: &RegenerateSettings,
    speaker: Speaker<'_>,
) -> Result<(Vec<Dialogue>, usize), Error> {
    let read = |row, place: Place<'_>| Dialogue::new(&row, place, speaker);
    let mut dialogues = read_rows((&settings.data, settings.limit), read)?;
    let read = dialogues.len();
    dialogues.retain(|dialogue| dialogue.fits(speaker));
    if dialogues.is_empty() {
        let context = speaker.config.max_position_embeddings;
        return Err(Error::NoPrompts { path: settings.data.clone(), context });
    }
    let skipped = read - dialogues.len();
    Ok((dialogues, skipped))
}

/// Dialogues between their answers.
struct Work<'a> {
    data: &'a Path,
    speaker: Speaker<'a>,
    /// By number; `None` once written.
    dialogues: Vec<Option<Dialogue>>,
    decoder: BatchDecoder<'a>,
    /// How many were done before this run.
    resumed: usize,
    done: usize,
    started: Instant,
    progress: Progress,
}

impl<'a> Work<'a> {
    fn new(
        (data, dialogues): (&'a Path, Vec<Dialogue>),
        resumed: usize,
        speaker: Speaker<'a>,
        (target, batch): (&'a Target, usize),
    ) -> Self {
        let remaining: Vec<&[i64]> = dialogues[resumed..].iter().map(Dialogue::ids).collect();
        let decoder = BatchDecoder::new(target, &remaining, speaker.limits, batch);
        let progress = Progress::new("regenerate", Unit::Items, dialogues.len() as u64)
            .starting_at(resumed as u64);
        let dialogues = dialogues.into_iter().map(Some).collect();
        let started = Instant::now();
        Self { data, speaker, dialogues, decoder, resumed, done: resumed, started, progress }
    }

    /// Takes an answer; its dialogue goes on or is written.
    fn take(
        &mut self,
        answer: Answered,
        output: &mut PartialOutput,
        summary: &mut RegenerateSummary,
    ) -> Result<(), Error> {
        summary.tokens += answer.tokens.len();
        let number = self.resumed + answer.number;
        let Some(mut dialogue) = self.dialogues[number].take() else { return Ok(()) };
        let line = dialogue.line();
        let next = dialogue.answer(&answer.tokens, self.speaker).map_err(|source| Error::Row {
            path: self.data.into(),
            line,
            source,
        })?;
        if let Next::Answer = next {
            self.decoder.ask_next(answer.number, dialogue.ids());
            self.dialogues[number] = Some(dialogue);
            return Ok(());
        }
        summary.shortened += usize::from(matches!(next, Next::Shortened));
        output.push(number, &dialogue.into_rows())?;
        self.done += 1;
        let speed = summary.tokens as f64 / self.started.elapsed().as_secs_f64();
        self.progress.update(self.done as u64, format!("{speed:.0} tokens/s"));
        Ok(())
    }
}

/// Greedy answers to a list of prompts, many at a time.
#[derive(Debug)]
pub struct BatchDecoder<'a> {
    target: &'a Target,
    limits: &'a Limits,
    /// Prompts that have not been started, with their numbers.
    waiting: VecDeque<(usize, Vec<i64>)>,
    cache: BatchCache,
    /// The answers in the making, in slot order.
    live: Vec<Answered>,
}

/// An answer, finished or in the making.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// Index of its prompt.
    pub number: usize,
    /// Its tokens, the end token included where one was made.
    pub tokens: Vec<i64>,
}

impl<'a> BatchDecoder<'a> {
    /// A decoder that runs up to `batch` (at least 1) of `prompts` together.
    pub fn new(target: &'a Target, prompts: &[&[i64]], limits: &'a Limits, batch: usize) -> Self {
        let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
        let slots = batch.clamp(1, prompts.len().max(1));
        let cache = target.new_batch_cache(slots, roomy(longest + limits.max_new_tokens));
        let waiting = prompts.iter().map(|prompt| prompt.to_vec()).enumerate().collect();
        Self { target, limits, waiting, cache, live: Vec::new() }
    }

    /// Adds a prompt that is run before all that wait, under the number of one that has ended: the
    /// next turn of its conversation.
    pub fn ask_next(&mut self, number: usize, prompt: &[i64]) {
        self.waiting.push_front((number, prompt.to_vec()));
    }

    /// Makes one more token for every live sequence, after starting new ones where there is room.
    /// Returns the answers that ended; `None` when all have.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when `stop` is set.
    pub fn step(&mut self, stop: &AtomicBool) -> Result<Option<Vec<Answered>>, Error> {
        check(stop)?;
        if self.live.is_empty() && self.waiting.is_empty() {
            return Ok(None);
        }
        let first_new = self.live.len();
        if first_new > 0 {
            let ids: Vec<i64> = self.live.iter().map(Answered::last).collect();
            let logits_bv = self.target.decode_batch(&ids, &mut self.cache);
            self.extend(0, &logits_bv);
        }
        let mut ended = self.remove_ended();
        if let Some(logits_bv) = self.admit() {
            self.extend(self.live.len() - logits_bv.size()[0] as usize, &logits_bv);
            ended.extend(self.remove_ended());
        }
        Ok(Some(ended))
    }

    /// Starts prompts in the free slots; returns the logits after them.
    fn admit(&mut self) -> Option<Tensor> {
        let free = self.cache.slots() - self.live.len();
        // Prompts are run together too: waiting for a few free slots makes fewer, larger products.
        let worthwhile = self.live.is_empty() || free >= self.cache.slots().div_ceil(16);
        let count = free.min(self.waiting.len());
        if count == 0 || !worthwhile {
            return None;
        }
        let (numbers, prompts): (Vec<usize>, Vec<Vec<i64>>) = self.waiting.drain(..count).unzip();
        let prompts: Vec<&[i64]> = prompts.iter().map(Vec::as_slice).collect();
        let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
        let needed = longest + self.limits.max_new_tokens;
        if needed > self.cache.capacity() {
            self.target.grow_batch_cache(&mut self.cache, roomy(needed));
        }
        let logits_bv = self.target.prefill_batch(&prompts, &mut self.cache);
        self.live.extend(numbers.into_iter().map(|number| Answered { number, tokens: Vec::new() }));
        Some(logits_bv)
    }

    /// Appends the most likely token of each row to the live sequences from `first` on.
    fn extend(&mut self, first: usize, logits_bv: &Tensor) {
        let chosen = Vec::<i64>::try_from(most_likely(logits_bv)).expect("ids are integers");
        for (live, token) in self.live[first..].iter_mut().zip(chosen) {
            live.tokens.push(token);
        }
    }

    fn remove_ended(&mut self) -> Vec<Answered> {
        let mut ended = Vec::new();
        // From the last slot down, so that a slot moved into a gap has been looked at.
        for slot in (0..self.live.len()).rev() {
            if self.live[slot].ended(self.limits) {
                ended.push(self.live.swap_remove(slot));
                self.cache.swap_remove(slot);
            }
        }
        ended
    }
}

impl Answered {
    fn last(&self) -> i64 {
        *self.tokens.last().expect("a live sequence has its first token")
    }

    fn ended(&self, limits: &Limits) -> bool {
        self.tokens.len() >= limits.max_new_tokens || limits.stop_ids.contains(&self.last())
    }
}
