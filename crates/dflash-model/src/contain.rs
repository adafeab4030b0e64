//! Want of memory as an error instead of a panic.
//!
//! libtorch throws when it gets no memory, and the bindings turn that into a panic. The programs end
//! on any panic, as they should on a bug; here the batch is at fault and not the program, so such a
//! panic ends the call alone. Others pass as they are.

use std::cell::Cell;
use std::panic::{
    AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind, set_hook, take_hook,
};
use std::sync::Once;

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// What allocators and their callers say: libtorch's for the CPU and for CUDA, the C++ library,
/// oneDNN, cuBLAS.
const SIGNS: [&str; 8] = [
    "allocate memory",
    "out of memory",
    "bad_alloc",
    "could not create a primitive",
    "could not create a memory",
    "could not execute a primitive",
    "ALLOC_FAILED",
    "not enough memory",
];

/// Whether a message tells of memory that could not be had.
pub fn is_want_of_memory(message: &str) -> bool {
    SIGNS.iter().any(|sign| message.contains(sign))
}

/// Runs `work`; a panic for want of memory becomes its message.
///
/// What `work` changes must be as good after a panic as before.
///
/// # Errors
/// The allocator's message.
pub fn want_of_memory<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(pass_over_contained);
    CONTAINED.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    CONTAINED.set(false);
    outcome.or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        match text.or_else(|| panic.downcast_ref::<&str>().copied()) {
            Some(text) if is_want_of_memory(text) => Err(first_line(text)),
            _ => resume_unwind(panic),
        }
    })
}

/// From now on the panic hook, which ends the programs, is not called for what is contained.
fn pass_over_contained() {
    let hook = take_hook();
    set_hook(Box::new(move |info| {
        if !(CONTAINED.get() && is_contained(info)) {
            hook(info);
        }
    }));
}

fn is_contained(info: &PanicHookInfo<'_>) -> bool {
    info.payload_as_str().is_some_and(is_want_of_memory)
}

/// libtorch's message without the C++ frames behind it and without what the bindings put around it.
fn first_line(text: &str) -> String {
    let message = text.split_once("Torch(\"").map_or(text, |(_, message)| message);
    let line = message.split("\\n").next().unwrap_or(message);
    line.strip_suffix("\")").unwrap_or(line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_want_of_memory_is_contained() {
        let check = |panic: &'static str, expect: &str| {
            assert_eq!(want_of_memory(|| -> u8 { panic!("{panic}") }).unwrap_err(), expect);
        };
        let unwrap = "called `Result::unwrap()` on an `Err` value: Torch(\"can't allocate memory: \
                      you tried to allocate 9 bytes.\\nException raised from\")";
        check(unwrap, "can't allocate memory: you tried to allocate 9 bytes.");
        check("Torch(\"could not create a primitive\")", "could not create a primitive");
        check("std::bad_alloc", "std::bad_alloc");
        assert_eq!(want_of_memory(|| 5), Ok(5));
        let bug = catch_unwind(|| want_of_memory(|| -> u8 { panic!("a bug (part of a test)") }));
        assert!(bug.is_err());
        let again = catch_unwind(|| panic!("out of memory, outside (part of a test)"));
        assert!(again.is_err());
    }
}
