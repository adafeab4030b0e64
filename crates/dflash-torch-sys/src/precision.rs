//! How exactly float32 matrices are multiplied on the CPU.

use crate::{Error, ffi};

/// Whether this processor multiplies bfloat16 in hardware; elsewhere it is emulated and slow.
pub fn cpu_multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// From now on products of float32 matrices round their factors to bfloat16; sums stay float32, and
/// so does all else. With matrix instructions (AMX) that is four to five times faster.
///
/// # Errors
/// libtorch's refusal.
pub fn multiply_in_bf16() -> Result<(), Error> {
    // SAFETY: changes a setting of libtorch's and takes no pointer.
    ffi::checked("round the factors of products to bfloat16", unsafe {
        ffi::dflash_multiply_in_bf16()
    })
}
