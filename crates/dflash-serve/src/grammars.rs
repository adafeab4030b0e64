//! Grammars of requests, made beside the model's thread.
//!
//! Most are made in milliseconds. One that was written to take long has a thread of its own with much
//! stack, of which there are [`MAKERS`], and so long as [`LONGEST`]: its request is refused then, and others
//! that want none do not notice.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use dflash_decode::{Error, Grammar, GrammarVocabulary};
use dflash_text::ChatTokenizer;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::format::Format;
use crate::refusal::Refusal;

/// Grammars made at a time.
const MAKERS: usize = 2;
/// For one grammar, and before it for its turn.
const LONGEST: Duration = Duration::from_secs(10);
/// Schemas may be nested, and so are the calls that read them. It is only taken as it is used.
const STACK: usize = 64 << 20;

/// The vocabulary that grammars speak of, made for the first, and those that make them.
#[derive(Debug)]
pub(crate) struct Grammars {
    vocabulary: Arc<OnceLock<Result<GrammarVocabulary, Error>>>,
    tokenizer: Arc<ChatTokenizer>,
    rows: i64,
    end_ids: Vec<i64>,
    makers: Arc<Semaphore>,
}

impl Grammars {
    /// For answers of a target with so many rows, which end with one of `end_ids`.
    pub(crate) fn new(tokenizer: &Arc<ChatTokenizer>, rows: i64, end_ids: Vec<i64>) -> Self {
        Self {
            vocabulary: Arc::default(),
            tokenizer: Arc::clone(tokenizer),
            rows,
            end_ids,
            makers: Arc::new(Semaphore::new(MAKERS)),
        }
    }

    /// # Errors
    /// A format that is not understood, too large, or takes too long; all makers busy with such.
    pub(crate) async fn make(&self, format: Format) -> Result<Grammar, Refusal> {
        let Format { param, source } = format;
        let turn = timeout(LONGEST, Arc::clone(&self.makers).acquire_owned()).await;
        let turn = turn.map_err(|_| Refusal::NoRoom { after: LONGEST })?;
        let turn = turn.map_err(|_| Refusal::ShuttingDown)?;
        let (made, when_made) = oneshot::channel();
        let (vocabulary, tokenizer) = (Arc::clone(&self.vocabulary), Arc::clone(&self.tokenizer));
        let (rows, end_ids) = (self.rows, self.end_ids.clone());
        let work = move || {
            let vocabulary =
                vocabulary.get_or_init(|| GrammarVocabulary::new(&tokenizer, rows, &end_ids));
            let grammar = match vocabulary {
                Ok(vocabulary) => vocabulary.compile(&source).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            // Who waited may have left.
            let _ = made.send(grammar);
            drop(turn);
        };
        let spawned = thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn(work);
        if spawned.is_err() {
            return Err(Refusal::OutOfMemory);
        }
        let reason = match timeout(LONGEST, when_made).await {
            Ok(Ok(Ok(grammar))) => return Ok(grammar),
            Ok(Ok(Err(reason))) => format!("cannot be used: {reason}"),
            // The thread ended without a word: it does so only in a panic, which ends the process.
            Ok(Err(_)) => return Err(Refusal::ShuttingDown),
            Err(_) => format!("took more than {} s to read; simplify it", LONGEST.as_secs()),
        };
        Err(Refusal::BadField { param: param.into(), reason })
    }
}
