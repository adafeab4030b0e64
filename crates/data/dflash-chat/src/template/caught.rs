//! Panics of the template engine, turned into errors.
//!
//! Templates come with models from anywhere, and the engine is third-party code: if a template
//! makes it panic, that is the template's fault and no reason to end a run over a million rows.

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

/// The result of `work`, or the message of its panic.
pub(super) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    CATCHING.set(true);
    // Values that `work` owns are dropped with it; the environment is only read.
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
