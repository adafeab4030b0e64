//! Compiles the grammars of requests, outside the model's thread.
//!
//! Most take milliseconds. An expensive one gets a thread of its own with a large stack; there are
//! [`MAKERS`] of these. After [`LONGEST`] its request is refused. Requests without a grammar are
//! not affected.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use dflash_chat::ChatTokenizer;
use dflash_decode::{Error, Grammar, GrammarVocabulary};
use dflash_http::Slot;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::format::Format;
use crate::refusal::Refusal;

/// Number of grammars compiled at a time.
const MAKERS: usize = 2;
/// Number of grammars of requests in flight, each of at most 75 MB with the memory for following
/// it. Other requests wait for these, for a while.
const ALIVE: usize = 32;
/// Maximum time to compile one grammar, and to wait for a maker before that.
const LONGEST: Duration = Duration::from_secs(10);
/// Schemas may be nested, and the compiler is recursive. Stack memory is only allocated as it is
/// used.
const STACK: usize = 64 << 20;

/// The vocabulary for grammars, made for the first one, and the makers.
#[derive(Debug)]
pub(crate) struct Grammars {
    vocabulary: Arc<OnceLock<Result<GrammarVocabulary, Error>>>,
    tokenizer: Arc<ChatTokenizer>,
    rows: i64,
    end_ids: Vec<i64>,
    makers: Arc<Semaphore>,
    alive: Arc<Semaphore>,
    /// How long a request waits for the grammars of others to end.
    patience: Duration,
}

impl Grammars {
    /// For answers of a target with `rows` rows, which end with one of `end_ids`; a request waits
    /// for the grammars of others for `patience`.
    pub(crate) fn new(
        tokenizer: &Arc<ChatTokenizer>,
        rows: i64,
        end_ids: Vec<i64>,
        patience: Duration,
    ) -> Self {
        Self {
            vocabulary: Arc::default(),
            tokenizer: Arc::clone(tokenizer),
            rows,
            end_ids,
            makers: Arc::new(Semaphore::new(MAKERS)),
            alive: Arc::new(Semaphore::new(ALIVE)),
            patience,
        }
    }

    /// The grammar of a request, whose `slot` holds the memory for it.
    ///
    /// # Errors
    /// A format that is not supported, too large, or takes too long; all makers busy with such
    /// grammars; too many grammars in flight.
    pub(crate) async fn make(&self, format: Format, slot: &Slot) -> Result<Grammar, Refusal> {
        let Format { param, source } = format;
        let room = timeout(self.patience, Arc::clone(&self.alive).acquire_owned()).await;
        let room = room.map_err(|_| Refusal::NoRoom { after: LONGEST })?;
        slot.keep(room.map_err(|_| Refusal::ShuttingDown)?);
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
            // The waiting client may have left.
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
            // The thread ended without a result: only a panic does that, and it ends the process.
            Ok(Err(_)) => return Err(Refusal::ShuttingDown),
            Err(_) => format!("took more than {} s to read; simplify it", LONGEST.as_secs()),
        };
        Err(Refusal::BadField { param: param.into(), reason })
    }
}
