//! Precision of float32 matrix products on the CPU.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, ffi};

/// Whether products currently round. libtorch has one setting per process.
static ROUNDED: AtomicBool = AtomicBool::new(false);

/// Rounds the factors of float32 matrix products to bfloat16 from now on; sums and all other
/// operations stay float32. With AMX this is four to five times faster.
///
/// # Errors
/// libtorch's error.
pub fn multiply_in_bf16() -> Result<(), Error> {
    set(true)
}

/// Runs `work` with float32 matrix products that are `rounded` as by [`multiply_in_bf16`], or
/// exact, then restores the setting. It affects all threads of the process.
///
/// # Errors
/// libtorch's error.
pub fn with_products<T>(rounded: bool, work: impl FnOnce() -> T) -> Result<T, Error> {
    let before = Before(ROUNDED.load(Ordering::Relaxed));
    if before.0 != rounded {
        set(rounded)?;
    }
    Ok(work())
}

/// Restores the setting, also after a panic.
struct Before(bool);

impl Drop for Before {
    fn drop(&mut self) {
        if ROUNDED.load(Ordering::Relaxed) != self.0 {
            set(self.0).expect("libtorch has had this setting before");
        }
    }
}

fn set(rounded: bool) -> Result<(), Error> {
    // SAFETY: changes a libtorch setting; no pointers.
    ffi::checked("choose how products are rounded", unsafe {
        ffi::dflash_multiply_in_bf16(rounded)
    })?;
    ROUNDED.store(rounded, Ordering::Relaxed);
    Ok(())
}
