//! The target's own greedy answers to many prompts.
//!
//! A draft imitates its target best on text that the target writes, so the answers of training data
//! are replaced. Sequences share every matrix product, and a finished one is replaced by the next,
//! so the batch stays full for answers of any length.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use dflash_chat::{ChatTokenizer, NameCounts, unread_prompt_columns};
use dflash_io::{Progress, Unit};
use dflash_settings::RegenerateSettings;
use dflash_target::TargetConfig;
use dflash_tensor::{DeviceKind, place};

use crate::Error;
use crate::dialogue::{Dialogue, Next, Speaker};
use crate::engine::{Engine, EngineOptions, Request, SequenceId};
use crate::limits::{Limits, check};
use crate::models::{DraftSource, Models, ModelsConfig};
use crate::partial::{Found, PartialOutput, find};
use crate::rows::{RowPlace, read_rows};
use crate::sampling::Sampling;
use crate::stamp::Stamp;

/// Maximum number of prompt tokens per step, so that decoding sequences do not wait for a whole
/// batch of prompts.
const PREFILL_TOKENS: usize = 4096;

/// The result of a regeneration.
#[derive(Debug, Clone, PartialEq)]
pub struct RegenerateSummary {
    /// Rows of the data whose answers are in the output file.
    pub rows: usize,
    /// Of these, rows that an earlier run had answered.
    pub resumed: usize,
    /// Rows skipped because prompt and answer exceed the target's context.
    pub skipped: usize,
    /// Conversations that end early because a later turn does.
    pub shortened: usize,
    /// Columns whose contents are not in the prompts, and how many rows have a value there.
    pub unread_columns: NameCounts,
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
    draft: DraftSource,
    stop: &AtomicBool,
) -> Result<RegenerateSummary, Error> {
    let DeviceKind { kind: dtype, .. } = place(settings.device, settings.dtype, 0)?;
    let tokenizer = ChatTokenizer::load(target_dir)?;
    let config = TargetConfig::load(target_dir)?;
    let limits = Limits::new(&config, &tokenizer, settings.max_new_tokens);
    let speaker = Speaker { tokenizer: &tokenizer, config: &config, limits: &limits };
    let Dialogues { usable: dialogues, skipped, unread_columns } = read(settings, speaker)?;
    let stamp = Stamp::new(settings, target_dir, speaker, dtype)?;
    let found = find(&settings.output, &stamp, dialogues.len(), settings.overwrite)?;
    let resumed = found.prompts();
    let mut summary = RegenerateSummary {
        rows: dialogues.len(),
        resumed,
        skipped,
        shortened: 0,
        unread_columns,
        tokens: 0,
        seconds: 0.0,
    };
    if matches!(found, Found::Finished(..)) && resumed == dialogues.len() {
        return Ok(summary);
    }
    let mut output = PartialOutput::open(&settings.output, &stamp, found)?;
    let models = Models::load(ModelsConfig {
        target_dir: target_dir.to_owned(),
        target_name: settings.target.clone(),
        draft,
        allow_other_target: settings.allow_other_target,
        device: settings.device,
        dtype: settings.dtype,
        threads: None,
        template_variables: None,
    })?;
    let started = Instant::now();
    let engine = models.engine(EngineOptions {
        max_sequences: settings.batch,
        max_model_len: config.max_position_embeddings as usize,
        prefill_tokens: PREFILL_TOKENS,
        prefix_bytes: 0,
        speculate: settings.speculate,
    })?;
    let data = settings.data.as_path();
    let mut work = Work::new(data, dialogues, output.written(), speaker, engine);
    while let Some(answers) = work.step(stop)? {
        for answer in answers {
            work.take(answer, &mut output, &mut summary)?;
        }
    }
    output.finish()?;
    summary.seconds = started.elapsed().as_secs_f64();
    Ok(summary)
}

/// The rows of the data as dialogues.
struct Dialogues {
    /// Those that leave room for a first answer.
    usable: Vec<Dialogue>,
    /// How many do not.
    skipped: usize,
    unread_columns: NameCounts,
}

fn read(settings: &RegenerateSettings, speaker: Speaker<'_>) -> Result<Dialogues, Error> {
    let mut unread_columns = NameCounts::default();
    let read = |row, place: RowPlace<'_>| {
        unread_columns.add_each(unread_prompt_columns(&row));
        Dialogue::new(&row, place, speaker)
    };
    let mut usable = read_rows(&settings.data, settings.limit, read)?;
    let read = usable.len();
    usable.retain(|dialogue| dialogue.fits(speaker));
    if usable.is_empty() {
        let context = speaker.config.max_position_embeddings;
        return Err(Error::NoPrompts { path: settings.data.clone(), context });
    }
    let skipped = read - usable.len();
    Ok(Dialogues { usable, skipped, unread_columns })
}

/// Dialogues between their answers.
struct Work<'a> {
    data: &'a Path,
    speaker: Speaker<'a>,
    /// By number; `None` once written.
    dialogues: Vec<Option<Dialogue>>,
    engine: Engine<'a>,
    /// The numbers of dialogues whose next prompt has not been started.
    waiting: VecDeque<usize>,
    /// The answers in the making.
    live: HashMap<SequenceId, Answered>,
    /// How many are done, those of an earlier run too.
    done: usize,
    started: Instant,
    progress: Progress,
}

impl<'a> Work<'a> {
    fn new(
        data: &'a Path,
        dialogues: Vec<Dialogue>,
        resumed: usize,
        speaker: Speaker<'a>,
        engine: Engine<'a>,
    ) -> Self {
        let waiting = (resumed..dialogues.len()).collect();
        let progress = Progress::new("regenerate", Unit::Items, dialogues.len() as u64)
            .starting_at(resumed as u64);
        let dialogues = dialogues.into_iter().map(Some).collect();
        let (live, started) = (HashMap::new(), Instant::now());
        Self { data, speaker, dialogues, engine, waiting, live, done: resumed, started, progress }
    }

    /// Starts prompts where there is room and makes a step of all answers. Returns those that ended; `None`
    /// when all have.
    fn step(&mut self, stop: &AtomicBool) -> Result<Option<Vec<Answered>>, Error> {
        check(stop)?;
        while self.engine.has_room() {
            let Some(number) = self.waiting.pop_front() else { break };
            let Some(dialogue) = &self.dialogues[number] else { continue };
            let ids = dialogue.ids();
            let request = Request::new(ids, self.speaker.limits, Sampling::GREEDY, 0);
            let answer = Answered { number, tokens: Vec::new() };
            self.live.insert(self.engine.add(request), answer);
        }
        if self.live.is_empty() {
            return Ok(None);
        }
        let mut ended = Vec::new();
        for output in self.engine.step()? {
            let Some(answer) = self.live.get_mut(&output.id) else { continue };
            answer.tokens.extend(output.tokens.iter().map(|token| token.id));
            if output.finish.is_some() {
                ended.extend(self.live.remove(&output.id));
            }
        }
        Ok(Some(ended))
    }

    /// Takes an answer; its dialogue goes on or is written.
    fn take(
        &mut self,
        answer: Answered,
        output: &mut PartialOutput,
        summary: &mut RegenerateSummary,
    ) -> Result<(), Error> {
        summary.tokens += answer.tokens.len();
        let number = answer.number;
        let Some(mut dialogue) = self.dialogues[number].take() else { return Ok(()) };
        let line = dialogue.line();
        let next = dialogue.answer(&answer.tokens, self.speaker).map_err(|source| Error::Row {
            path: self.data.into(),
            line,
            source,
        })?;
        if let Next::Answer = next {
            self.dialogues[number] = Some(dialogue);
            self.waiting.push_front(number);
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

/// An answer, finished or in the making.
#[derive(Debug)]
struct Answered {
    /// Number of its dialogue.
    number: usize,
    /// Its tokens, the end token included where one was made.
    tokens: Vec<i64>,
}
