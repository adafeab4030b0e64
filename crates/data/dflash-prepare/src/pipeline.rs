//! Records to samples on several threads, in the order of the input.
//!
//! One thread reads and distributes chunks; workers render and tokenize; the caller's thread takes
//! the results in order. Each chunk brings its own reply channel, and the replies queue up in
//! reading order. So the order is fixed and the number of chunks in flight is bounded, however fast
//! the workers are.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

use dflash_chat::{Conversation, Message, Role, Row, SegmentCache, parse_row, unread_columns};
use dflash_data::Sample;
use dflash_settings::PrepareSettings;

use crate::boundary::{Refusal, conversation_rows};
use crate::error::Error;
use crate::model::Model;
use crate::outcome::{DropReason, Tally, fit};
use crate::source::{self, Record};

/// Records of a chunk: enough to make handing it over cheap, few enough to spread the work evenly.
const CHUNK_RECORDS: usize = 64;
/// A chunk of long conversations ends here.
const CHUNK_BYTES: u64 = 1 << 18;
const CHUNKS_PER_WORKER: usize = 4;

/// What workers need to know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) model: &'a Model,
    pub(crate) settings: &'a PrepareSettings,
}

/// A chunk's results.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    pub(crate) samples: Vec<Sample>,
    pub(crate) tally: Tally,
    /// Samples of each file, in the order of reading.
    pub(crate) by_file: Vec<(Arc<Path>, u64)>,
    /// Bytes of the files read for the chunk.
    pub(crate) file_bytes: u64,
}

type Reply = Result<Prepared, Error>;
type Task = (Vec<Result<Record, Error>>, SyncSender<Reply>);

/// Prepares all records of `files` and gives the results to `sink` in order.
pub(crate) fn process(
    files: &[PathBuf],
    job: Job<'_>,
    stop: &AtomicBool,
    mut sink: impl FnMut(Prepared) -> Result<(), Error>,
) -> Result<(), Error> {
    let workers = job.settings.workers().max(1);
    let (tasks, waiting) = sync_channel::<Task>(workers);
    let (replies, ordered) = sync_channel::<Receiver<Reply>>(workers * CHUNKS_PER_WORKER);
    let waiting = Mutex::new(waiting);
    thread::scope(|scope| {
        scope.spawn(move || hand_out(files, job.settings, &tasks, &replies, stop));
        for _ in 0..workers {
            scope.spawn(|| work(&waiting, job));
        }
        // An error drops the receivers of replies; the threads notice and end.
        for reply in ordered {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            // A panic in a worker ends the process, so every chunk gets a reply.
            if let Ok(prepared) = reply.recv() {
                sink(prepared?)?;
            }
        }
        if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    })
}

/// Cuts the records into chunks; stops at a fault, or when the receivers are gone.
fn hand_out(
    files: &[PathBuf],
    settings: &PrepareSettings,
    tasks: &SyncSender<Task>,
    replies: &SyncSender<Receiver<Reply>>,
    stop: &AtomicBool,
) {
    let hand_over = |chunk| {
        let (answer, reply) = sync_channel(1);
        replies.send(reply).is_ok() && tasks.send((chunk, answer)).is_ok()
    };
    let mut chunk = Vec::with_capacity(CHUNK_RECORDS);
    let mut bytes = 0;
    for record in source::read(files, settings.limit, settings.shuffle_seed) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        bytes += record.as_ref().map_or(0, |record| record.bytes);
        let is_fault = record.is_err();
        chunk.push(record);
        if is_fault {
            break;
        }
        if chunk.len() == CHUNK_RECORDS || bytes >= CHUNK_BYTES {
            bytes = 0;
            if !hand_over(std::mem::take(&mut chunk)) {
                return;
            }
        }
    }
    hand_over(chunk);
}

fn work(waiting: &Mutex<Receiver<Task>>, job: Job<'_>) {
    let mut cache = SegmentCache::default();
    loop {
        // The lock is held while waiting; its holder takes the next chunk.
        let task = match waiting.lock() {
            Ok(waiting) => waiting.recv(),
            Err(_) => return,
        };
        let Ok((records, answer)) = task else { return };
        // The receiver may be gone; then there is no next chunk either.
        let _ = answer.send(job.chunk(records, &mut cache));
    }
}

/// Blank text is nothing to learn: templates that trim it would print an empty answer.
fn says_something(message: &Message) -> bool {
    message.has_content() && message.content.as_str().is_none_or(|text| !text.trim().is_empty())
}

impl Job<'_> {
    /// The results of a chunk, or its first error, of the reader or of a row.
    fn chunk(&self, records: Vec<Result<Record, Error>>, cache: &mut SegmentCache) -> Reply {
        let mut prepared = Prepared::default();
        for record in records {
            let mut record = record?;
            prepared.tally.rows_in += 1;
            prepared.file_bytes += record.file_bytes;
            let before = prepared.samples.len();
            self.record(&mut record, cache, &mut prepared)?;
            let made = (prepared.samples.len() - before) as u64;
            match prepared.by_file.last_mut() {
                Some((path, samples)) if *path == record.path => *samples += made,
                _ => prepared.by_file.push((record.path, made)),
            }
        }
        Ok(prepared)
    }

    fn record(
        &self,
        record: &mut Record,
        cache: &mut SegmentCache,
        out: &mut Prepared,
    ) -> Result<(), Error> {
        let row = match record.take_parsed() {
            Ok(value) => {
                out.tally.unread_columns.add_each(unread_columns(&value));
                out.tally.unfinished += u64::from(value.get("finished") == Some(&false.into()));
                parse_row(&value)
            }
            Err(reason) => return self.bad_row(record, reason, out),
        };
        let samples = match row {
            Ok(Row::Conversation(conversation)) => {
                self.conversation(record, conversation, cache, out)
            }
            Ok(Row::Tokenized { input_ids, loss_mask }) => match self.foreign_id(&input_ids) {
                Some(reason) => return self.bad_row(record, reason, out),
                None => Ok(vec![Sample { input_ids, loss_mask }]),
            },
            Err(error @ dflash_chat::Error::UnknownRole { .. }) => {
                out.tally.drop(DropReason::UnknownRole, || format!("{}: {error}", record.place()));
                return Ok(());
            }
            Err(error) => return self.bad_row(record, error.to_string(), out),
        };
        match samples {
            Ok(samples) => self.keep(record, samples, out),
            Err(Refusal::Dropped(reason)) => out.tally.drop(reason, || record.place()),
            Err(Refusal::Failed(error @ dflash_chat::Error::Render { .. })) => {
                let first = || format!("{}: {error}", record.place());
                out.tally.drop(DropReason::TemplateRefused, first);
            }
            Err(Refusal::Failed(error)) => return Err(error.into()),
        }
        Ok(())
    }

    /// The samples of a conversation; its faults are counted first.
    fn conversation(
        &self,
        record: &Record,
        mut conversation: Conversation,
        cache: &mut SegmentCache,
        out: &mut Prepared,
    ) -> Result<Vec<Sample>, Refusal> {
        let messages = &mut conversation.messages;
        let unknown = messages.iter().flat_map(|message| &message.unknown_keys);
        out.tally.unknown_keys.add_each(unknown.map(String::as_str));
        let had_messages = !messages.is_empty();
        messages.retain(|message| {
            let is_kept = message.role != Role::Assistant
                || says_something(message)
                || message.tool_calls.is_some();
            if !is_kept {
                out.tally.drop_turn(DropReason::EmptyTurn, || record.place());
            }
            is_kept
        });
        if messages.iter().any(|turn| turn.role != Role::Assistant && turn.content.is_null()) {
            return Err(Refusal::Dropped(DropReason::NoContent));
        }
        if had_messages && messages.is_empty() {
            return Err(Refusal::Dropped(DropReason::NoAnswer));
        }
        let seq_length = self.settings.seq_length;
        let rows = conversation_rows(&self.model.tokenizer, &conversation, cache, seq_length)?;
        for _ in 0..rows.unprinted_calls {
            out.tally.drop_turn(DropReason::UnprintedCalls, || record.place());
        }
        out.tally.answers.absorb(rows.answers);
        match rows.samples.is_empty() {
            true => Err(Refusal::Dropped(DropReason::NoAnswer)),
            false => Ok(rows.samples),
        }
    }

    fn keep(&self, record: &Record, samples: Vec<Sample>, out: &mut Prepared) {
        let PrepareSettings { seq_length, minimum_valid_tokens, .. } = *self.settings;
        for mut sample in samples {
            match fit(&mut sample, seq_length, minimum_valid_tokens) {
                Ok(is_cut) => {
                    out.tally.truncated += u64::from(is_cut);
                    out.samples.push(sample);
                }
                Err(reason) => out.tally.drop(reason, || record.place()),
            }
        }
    }

    fn bad_row(&self, record: &Record, reason: String, out: &mut Prepared) -> Result<(), Error> {
        if !self.settings.skip_bad_rows {
            let path = record.path.to_path_buf();
            return Err(Error::BadRow { path, line: record.line, reason });
        }
        out.tally.drop(DropReason::BadRow, || format!("{}: {reason}", record.place()));
        Ok(())
    }

    /// What is wrong with a pre-tokenized row that was made with another tokenizer.
    fn foreign_id(&self, input_ids: &[i64]) -> Option<String> {
        let vocabulary = self.model.vocab_size;
        let id = input_ids.iter().find(|&&id| id as usize >= vocabulary)?;
        Some(format!(
            "token id {id} lies outside the model's vocabulary of {vocabulary}; was the row made \
             with another model's tokenizer?"
        ))
    }
}
