//! The target's own greedy answers to many prompts.
//!
//! A draft imitates its target best on text that the target writes, so training data gets its
//! answers replaced. Sequences share every matrix product and are replaced as they end, so the
//! batch stays full whatever the lengths.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use dflash_console::{Progress, Unit};
use dflash_model::place;
use dflash_model::target::{BatchCache, Target, TargetOptions};
use dflash_settings::RegenerateSettings;
use dflash_text::{ChatTokenizer, Message, Role};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use crate::Error;
use crate::partial::PartialOutput;
use crate::plain::{Limits, check, roomy};
use crate::prompts::{Prompt, usable_prompts};
use crate::sampling::most_likely;

/// What a regeneration did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RegenerateSummary {
    /// Rows in the output file.
    pub rows: usize,
    /// Of these, rows that an earlier, stopped run had made.
    pub resumed: usize,
    /// Rows left out because prompt and answer exceed the target's context.
    pub skipped: usize,
    /// Tokens made by this run.
    pub tokens: usize,
    /// Seconds it took, loading apart.
    pub seconds: f64,
}

/// Answers every row of the data and writes `question`, `answer`, `input_ids`, `loss_mask` and
/// `finished`, in the order of the data.
///
/// Rows without a `question` get their `messages` instead. A stopped run leaves `OUTPUT.partial`
/// and the same command continues it.
///
/// # Errors
/// Model or data that cannot be read, output that cannot be written; [`Error::Interrupted`].
pub fn regenerate(
    settings: &RegenerateSettings,
    target_dir: &Path,
    stop: &AtomicBool,
) -> Result<RegenerateSummary, Error> {
    let (device, dtype) = place(settings.device, settings.dtype, 0)?;
    let tokenizer = ChatTokenizer::load(target_dir)?;
    let target = Target::load(target_dir, &TargetOptions { device, dtype })?;
    let room = (target.config(), settings.max_new_tokens);
    let (prompts, skipped) = usable_prompts((&settings.data, settings.limit), &tokenizer, room)?;
    let mut output =
        PartialOutput::open(&settings.output, &rows_depend_on(settings, (target_dir, dtype)))?;
    let resumed = output.written();
    let limits = Limits::new(&target, &tokenizer, settings.max_new_tokens);
    let remaining: Vec<&[i64]> =
        prompts[resumed..].iter().map(|prompt| prompt.ids.as_slice()).collect();
    let mut decoder = BatchDecoder::new(&target, &remaining, &limits, settings.batch);
    let mut progress =
        Progress::new("regenerate", Unit::Items, prompts.len() as u64).starting_at(resumed as u64);
    let (mut tokens, mut done, started) = (0, resumed, Instant::now());
    while let Some(answers) = decoder.step(stop)? {
        for answer in answers {
            let number = resumed + answer.number;
            let row = row(&prompts[number], &answer.tokens, &limits, &tokenizer)?;
            output.push(number, &row)?;
            tokens += answer.tokens.len();
            done += 1;
            let speed = tokens as f64 / started.elapsed().as_secs_f64();
            progress.update(done as u64, format!("{speed:.0} tokens/s"));
        }
    }
    output.finish()?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(RegenerateSummary { rows: done, resumed, skipped, tokens, seconds })
}

/// What decides the rows: a partial file made with anything else is not continued.
fn rows_depend_on(settings: &RegenerateSettings, (target_dir, dtype): (&Path, Kind)) -> Value {
    let stamp = |path: &Path| {
        let facts = std::fs::metadata(path).ok();
        let modified = facts.as_ref().and_then(|facts| facts.modified().ok());
        format!("{modified:?} {:?}", facts.map(|facts| facts.len()))
    };
    json!({
        "target": target_dir,
        "target_config": stamp(&target_dir.join("config.json")),
        "data": settings.data,
        "data_file": stamp(&settings.data),
        "limit": settings.limit,
        "max_new_tokens": settings.max_new_tokens,
        "dtype": format!("{:?}", dtype),
    })
}

fn row(
    prompt: &Prompt,
    answer: &[i64],
    limits: &Limits,
    tokenizer: &ChatTokenizer,
) -> Result<Value, Error> {
    let finished = answer.last().is_some_and(|token| limits.stop_ids.contains(token));
    let text_ids = &answer[..answer.len() - usize::from(finished)];
    let text = tokenizer.decode(text_ids, false)?;
    let mut row = Map::new();
    match prompt.row.get("question") {
        Some(question) => {
            row.insert("question".into(), question.clone());
            row.insert("answer".into(), json!(text));
        }
        None => {
            let answered = Message::text(Role::Assistant, text);
            let messages: Vec<&Message> = prompt.messages.iter().chain([&answered]).collect();
            row.insert("messages".into(), json!(messages));
            row.extend(prompt.tools.iter().map(|tools| ("tools".into(), tools.clone())));
        }
    }
    let mask = [vec![0; prompt.ids.len()], vec![1; answer.len()]].concat();
    row.insert("input_ids".into(), json!([&prompt.ids, answer].concat()));
    row.insert("loss_mask".into(), json!(mask));
    row.insert("finished".into(), json!(finished));
    Ok(Value::Object(row))
}

/// Greedy answers to a list of prompts, many at a time.
#[derive(Debug)]
pub struct BatchDecoder<'a> {
    target: &'a Target,
    limits: &'a Limits,
    prompts: &'a [&'a [i64]],
    /// Prompts that have been started.
    started: usize,
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
    pub fn new(
        target: &'a Target,
        prompts: &'a [&'a [i64]],
        limits: &'a Limits,
        batch: usize,
    ) -> Self {
        let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
        let slots = batch.clamp(1, prompts.len().max(1));
        let cache = target.new_batch_cache(slots, roomy(longest + limits.max_new_tokens));
        Self { target, limits, prompts, started: 0, cache, live: Vec::new() }
    }

    /// Makes one more token for every live sequence, after starting new ones where there is room.
    /// Returns the answers that ended; `None` when all have.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when `stop` is set.
    pub fn step(&mut self, stop: &AtomicBool) -> Result<Option<Vec<Answered>>, Error> {
        check(stop)?;
        if self.live.is_empty() && self.started == self.prompts.len() {
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
        let waiting = self.prompts.len() - self.started;
        // Prompts are run together too: waiting for a few free slots makes fewer, larger products.
        let worthwhile = self.live.is_empty() || free >= self.cache.slots().div_ceil(16);
        let count = free.min(waiting);
        if count == 0 || !worthwhile {
            return None;
        }
        let range = self.started..self.started + count;
        self.started = range.end;
        let logits_bv = self.target.prefill_batch(&self.prompts[range.clone()], &mut self.cache);
        self.live.extend(range.map(|number| Answered { number, tokens: Vec::new() }));
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
