//! Records to rows on several threads, in the order of the input.
//!
//! One thread reads and hands out chunks; workers render and tokenize; the caller's thread takes
//! the results in order. Each chunk brings its own reply channel, and the replies queue up in the
//! order of reading: so the order is fixed and the number of chunks in flight is bounded, whatever
//! the workers' speed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use dflash_data::Sample;
use dflash_text::{Row, SegmentCache, parse_row};

use crate::boundary::{Refusal, conversation_rows};
use crate::error::Error;
use crate::model::Model;
use crate::outcome::{DropReason, Tally, Window};
use crate::source::Record;

/// Records of a chunk: enough to make the hand-over cheap, few enough to keep workers level.
const CHUNK_RECORDS: usize = 64;
/// A chunk of long conversations ends here.
const CHUNK_BYTES: u64 = 1 << 18;
/// Chunks in flight for each worker.
const CHUNKS_PER_WORKER: usize = 4;

/// What workers need to know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) model: &'a Model,
    pub(crate) window: Window,
    pub(crate) skip_bad_rows: bool,
    pub(crate) workers: usize,
}

/// A chunk's results.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    pub(crate) samples: Vec<Sample>,
    pub(crate) tally: Tally,
    /// Input bytes that went into it.
    pub(crate) bytes: u64,
}

type Reply = Result<Prepared, Error>;
type Task = (Vec<Record>, SyncSender<Reply>);

/// Prepares all records that `open` yields and gives the results to `sink` in order. `open` runs
/// on the reading thread.
pub(crate) fn process<I>(
    open: impl FnOnce() -> I + Send,
    job: Job<'_>,
    stop: &AtomicBool,
    mut sink: impl FnMut(Prepared) -> Result<(), Error>,
) -> Result<(), Error>
where
    I: Iterator<Item = Result<Record, Error>>,
{
    let workers = job.workers.max(1);
    let (tasks, waiting) = sync_channel::<Task>(workers);
    let (replies, ordered) = sync_channel::<Receiver<Reply>>(workers * CHUNKS_PER_WORKER);
    let waiting = Mutex::new(waiting);
    thread::scope(|scope| {
        scope.spawn(move || hand_out(open(), &tasks, &replies, stop));
        for _ in 0..workers {
            scope.spawn(|| work(&waiting, job));
        }
        // An error drops the replies' receivers; the threads notice and end.
        for reply in ordered {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            // A worker that panics takes the process with it, so every chunk is answered.
            if let Ok(prepared) = reply.recv() {
                sink(prepared?)?;
            }
        }
        match stop.load(Ordering::Relaxed) {
            true => Err(Error::Interrupted),
            false => Ok(()),
        }
    })
}

/// Cuts the records into chunks; ends when nobody listens any more.
fn hand_out(
    records: impl Iterator<Item = Result<Record, Error>>,
    tasks: &SyncSender<Task>,
    replies: &SyncSender<Receiver<Reply>>,
    stop: &AtomicBool,
) {
    let hand_over = |chunk: Vec<Record>| {
        let (answer, reply) = sync_channel(1);
        replies.send(reply).is_ok() && tasks.send((chunk, answer)).is_ok()
    };
    let mut chunk = Vec::with_capacity(CHUNK_RECORDS);
    let mut bytes = 0;
    for record in records {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        match record {
            Ok(record) => {
                bytes += record.bytes;
                chunk.push(record);
            }
            Err(error) => {
                // What came before it is still worth an error of its own, so it goes first.
                let _ = hand_over(chunk) && fail(replies, error);
                return;
            }
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

/// Queues an error of the reader behind the chunks before it.
fn fail(replies: &SyncSender<Receiver<Reply>>, error: Error) -> bool {
    let (answer, reply) = sync_channel(1);
    answer.send(Err(error)).is_ok() && replies.send(reply).is_ok()
}

fn work(waiting: &Mutex<Receiver<Task>>, job: Job<'_>) {
    let mut cache = SegmentCache::default();
    loop {
        // The lock is held while waiting: whoever has it takes the next chunk.
        let task = match waiting.lock() {
            Ok(waiting) => waiting.recv(),
            Err(_) => return,
        };
        let Ok((records, answer)) = task else { return };
        // Nobody may be left to hear the answer; then the next chunk does not come either.
        let _ = answer.send(job.chunk(records, &mut cache));
    }
}

impl Job<'_> {
    fn chunk(&self, records: Vec<Record>, cache: &mut SegmentCache) -> Reply {
        let mut prepared = Prepared::default();
        for mut record in records {
            prepared.tally.rows_in += 1;
            prepared.bytes += record.bytes;
            self.record(&mut record, cache, &mut prepared)?;
        }
        Ok(prepared)
    }

    fn record(
        &self,
        record: &mut Record,
        cache: &mut SegmentCache,
        out: &mut Prepared,
    ) -> Result<(), Error> {
        let row = match record.parse() {
            Ok(value) => parse_row(&value),
            Err(error) if self.skip_bad_rows => {
                out.tally.drop(DropReason::BadRow, || error.to_string());
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let samples = match row {
            Ok(Row::Conversation(conversation)) => {
                conversation_rows(&self.model.tokenizer, &conversation, cache)
            }
            Ok(Row::Tokenized { input_ids, loss_mask }) => {
                let sample = Sample { input_ids, loss_mask };
                match self.foreign_id(&sample) {
                    Some(reason) => return self.bad_row(record, reason, out),
                    None => Ok(vec![sample]),
                }
            }
            Err(error @ dflash_text::Error::UnknownRole { .. }) => {
                let example = || format!("{}: {error}", record.place());
                out.tally.drop(DropReason::UnknownRole, example);
                return Ok(());
            }
            Err(error) => return self.bad_row(record, error.to_string(), out),
        };
        match samples {
            Ok(samples) => self.keep(record, samples, out),
            Err(refusal) => note_refusal(record, refusal, out)?,
        }
        Ok(())
    }

    fn keep(&self, record: &Record, samples: Vec<Sample>, out: &mut Prepared) {
        for mut sample in samples {
            match self.window.fit(&mut sample) {
                Ok(is_cut) => {
                    out.tally.truncated += u64::from(is_cut);
                    out.samples.push(sample);
                }
                Err(reason) => out.tally.drop(reason, || record.place()),
            }
        }
    }

    fn bad_row(&self, record: &Record, reason: String, out: &mut Prepared) -> Result<(), Error> {
        if !self.skip_bad_rows {
            return Err(Error::BadRow {
                path: record.path.to_path_buf(),
                line: record.line,
                reason,
            });
        }
        out.tally.drop(DropReason::BadRow, || format!("{}: {reason}", record.place()));
        Ok(())
    }

    /// What is wrong with a pre-tokenized row that another tokenizer made.
    fn foreign_id(&self, sample: &Sample) -> Option<String> {
        let vocabulary = self.model.vocab_size;
        let id = sample.input_ids.iter().find(|&&id| id as usize >= vocabulary)?;
        Some(format!(
            "token id {id} lies outside the model's vocabulary of {vocabulary}; was the row made \
             with another model's tokenizer?"
        ))
    }
}

fn note_refusal(record: &Record, refusal: Refusal, out: &mut Prepared) -> Result<(), Error> {
    let (reason, words) = match refusal {
        Refusal::Empty => (DropReason::Empty, None),
        Refusal::NoAnswer => (DropReason::NoAnswer, None),
        Refusal::Unstable => (DropReason::Unstable, None),
        Refusal::Failed(error @ dflash_text::Error::Render { .. }) => {
            (DropReason::TemplateRefused, Some(error))
        }
        Refusal::Failed(error) => return Err(error.into()),
    };
    out.tally.drop(reason, || match words {
        Some(error) => format!("{}: {error}", record.place()),
        None => record.place(),
    });
    Ok(())
}
