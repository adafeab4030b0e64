//! Panics of the template engine, turned into errors.
//!
//! Templates come with models from anywhere, and the engine is not ours: what a template makes
//! panic is the template's fault and not a reason to end a run over a million rows.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread will be caught and reported as an error. A panic hook that ends
/// the process asks this first.
pub fn panics_are_caught() -> bool {
    CATCHING.get()
}

/// What `work` returns, or the words of its panic.
pub(super) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    CATCHING.set(true);
    // What `work` holds is dropped with it or, the environment, only read.
    let result = catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(false);
    result.map_err(|payload| words(&*payload))
}

fn words(payload: &(dyn Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(words), _) => (*words).to_owned(),
        (_, Some(words)) => words.clone(),
        _ => "a panic without a message".to_owned(),
    }
}
