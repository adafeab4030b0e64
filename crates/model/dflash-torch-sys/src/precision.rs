//! How exactly float32 matrices are multiplied on the CPU.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, ffi};

/// Whether products are rounded at present. libtorch has one setting for the whole process.
static ROUNDED: AtomicBool = AtomicBool::new(false);

/// From now on products of float32 matrices round their factors to bfloat16; sums stay float32, and
/// so does all else. With matrix instructions (AMX) that is four to five times faster.
///
/// # Errors
/// libtorch's refusal.
pub fn multiply_in_bf16() -> Result<(), Error> {
    set(true)
}

/// Does `work` with products of float32 matrices that are `rounded`, as by [`multiply_in_bf16`], or
/// exact; then they are as they were. Other threads of the process multiply alike meanwhile.
///
/// # Errors
/// libtorch's refusal.
pub fn with_products<T>(rounded: bool, work: impl FnOnce() -> T) -> Result<T, Error> {
    let before = Before(ROUNDED.load(Ordering::Relaxed));
    if before.0 != rounded {
        set(rounded)?;
    }
    Ok(work())
}

/// The setting to go back to, also after a panic.
struct Before(bool);

impl Drop for Before {
    fn drop(&mut self) {
        if ROUNDED.load(Ordering::Relaxed) != self.0 {
            set(self.0).expect("libtorch has had this setting before");
        }
    }
}

fn set(rounded: bool) -> Result<(), Error> {
    // SAFETY: changes a setting of libtorch's and takes no pointer.
    ffi::checked("choose how products are rounded", unsafe {
        ffi::dflash_multiply_in_bf16(rounded)
    })?;
    ROUNDED.store(rounded, Ordering::Relaxed);
    Ok(())
}
