//! Turns out-of-memory panics into errors.
//!
//! libtorch throws when an allocation fails, and the bindings turn that into a panic. The programs
//! exit on any panic, as they should for a bug. Running out of memory is not a bug, so such a panic
//! ends only the innermost call that can do without the result: a server's batch, a pass of the
//! engine, a rank's part of a step (which still joins all collectives, votes the step void, and the
//! run ends saved). Other panics pass through. An unhandled out-of-memory error exits with code 1.

use std::cell::Cell;
use std::panic::{
    AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind, set_hook, take_hook,
};
use std::sync::Once;

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Substrings of out-of-memory messages: libtorch's CPU and CUDA allocators, the CUDA driver, the
/// C++ library, oneDNN, cuBLAS.
const SIGNS: [&str; 9] = [
    "allocate memory",
    "out of memory",
    "OUT_OF_MEMORY",
    "bad_alloc",
    "could not create a primitive",
    "could not create a memory",
    "could not execute a primitive",
    "ALLOC_FAILED",
    "not enough memory",
];

/// Whether a message reports an out-of-memory condition.
pub fn is_oom(message: &str) -> bool {
    SIGNS.iter().any(|sign| message.contains(sign))
}

/// The allocator's message inside a panic message; `None` if the panic has another cause.
pub fn catch_oom_in(panic: &str) -> Option<String> {
    is_oom(panic).then(|| first_line(panic))
}

/// Runs `work` and returns an out-of-memory panic as its message. Calls may be nested.
///
/// State that `work` changes must stay valid if it panics.
///
/// # Errors
/// The allocator's message.
pub fn catch_oom<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(pass_over_contained);
    let outer = CONTAINED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    CONTAINED.set(outer);
    outcome.or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        match text.and_then(catch_oom_in) {
            Some(message) => Err(message),
            None => resume_unwind(panic),
        }
    })
}

/// Replaces the panic hook by one that ignores contained panics; the programs' hook would exit.
fn pass_over_contained() {
    let hook = take_hook();
    set_hook(Box::new(move |info| {
        if !(CONTAINED.get() && is_contained(info)) {
            hook(info);
        }
    }));
}

fn is_contained(info: &PanicHookInfo<'_>) -> bool {
    info.payload_as_str().is_some_and(is_oom)
}

/// libtorch's message without its C++ stack trace and without the bindings' wrapping.
fn first_line(text: &str) -> String {
    let around = ["Torch(\"", "Internal torch error: "];
    let message = around.iter().find_map(|around| Some(text.split_once(around)?.1)).unwrap_or(text);
    // Newlines are escaped if the value was printed with `Debug`.
    let line = message.split("\\n").next().and_then(|line| line.lines().next()).unwrap_or(message);
    line.strip_suffix("\")").unwrap_or(line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_contained_ends_the_innermost_call_alone() {
        let called = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = std::sync::Arc::clone(&called);
        // The programs install a hook that exits here.
        let outcome = std::thread::spawn(move || {
            catch_oom::<()>(|| {
                let inner = catch_oom(|| -> u8 { panic!("std::bad_alloc (part of a test)") });
                assert!(inner.is_err());
                seen.store(CONTAINED.get(), std::sync::atomic::Ordering::Relaxed);
                panic!("out of memory, a second time (part of a test)")
            })
        });
        let message = outcome.join().unwrap().unwrap_err();
        assert_eq!(message, "out of memory, a second time (part of a test)");
        assert!(called.load(std::sync::atomic::Ordering::Relaxed), "still contained outside");
    }

    #[test]
    fn only_oom_is_contained() {
        let check = |panic: &str, expect: &str| {
            assert_eq!(catch_oom(|| -> u8 { panic!("{panic}") }).unwrap_err(), expect);
        };
        let unwrap = "called `Result::unwrap()` on an `Err` value: Torch(\"can't allocate memory: \
                      you tried to allocate 9 bytes.\\nException raised from\")";
        check(unwrap, "can't allocate memory: you tried to allocate 9 bytes.");
        check("Torch(\"could not create a primitive\")", "could not create a primitive");
        check("std::bad_alloc", "std::bad_alloc");
        let cuda = "Torch(\"CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total \
                    capacity of 79.18 GiB\\nException raised from malloc\")";
        let said = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of \
                    79.18 GiB";
        check(cuda, said);
        check(
            &format!("libtorch: Internal torch error: {said}\nException raised from malloc"),
            said,
        );
        let cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`";
        check(cublas, cublas);
        check("DriverError(CUDA_ERROR_OUT_OF_MEMORY)", "DriverError(CUDA_ERROR_OUT_OF_MEMORY)");
        assert_eq!(catch_oom(|| 5), Ok(5));
        let bug = catch_unwind(|| catch_oom(|| -> u8 { panic!("a bug (part of a test)") }));
        assert!(bug.is_err());
        let again = catch_unwind(|| panic!("out of memory, outside (part of a test)"));
        assert!(again.is_err());
    }
}
