//! The CPU instruction sets that libtorch and MKL use.

use crate::{Error, ffi};

/// The instruction sets chosen by the libraries, in this project's terms where they exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryLevels {
    /// Level of libtorch's own loops: `default`, `avx2`, `avx512` and others.
    pub libtorch: String,
    /// Level of MKL's products: `sse4_2`, `avx2`, `avx512` and others; `None` without MKL and on
    /// non-Intel processors, where MKL does not report it.
    pub mkl: Option<&'static str>,
}

/// Asks libtorch and MKL for their level. They choose on first use, by the processor and by
/// environment variables that have no effect later.
///
/// # Errors
/// libtorch's error.
pub fn library_levels() -> Result<LibraryLevels, Error> {
    let mut level = std::ptr::null_mut();
    // SAFETY: the out pointer is a local; the other call takes no argument.
    let (failure, branch) =
        unsafe { (ffi::dflash_libtorch_level(&mut level), ffi::dflash_mkl_branch()) };
    ffi::checked("ask libtorch for its instructions", failure)?;
    Ok(LibraryLevels { libtorch: ffi::take_string(level).to_lowercase(), mkl: mkl_name(branch) })
}

/// The name of an MKL code branch: the constants `MKL_CBWR_*` of its header.
fn mkl_name(branch: i32) -> Option<&'static str> {
    Some(match branch {
        3 => "compatible",
        4 => "sse2",
        6 => "ssse3",
        7 => "sse4_1",
        8 => "sse4_2",
        9 => "avx",
        10 => "avx2",
        12 => "avx512",
        // with DL Boost
        14 => "avx512_e1",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_say_what_they_chose() {
        let LibraryLevels { libtorch, mkl } = library_levels().unwrap();
        // The levels that the project sets, unless the user's environment overrides them.
        let is_known = ["default", "avx2", "avx512"].contains(&libtorch.as_str());
        assert!(is_known || cfg!(not(target_arch = "x86_64")), "{libtorch}");
        let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        if processor.contains("GenuineIntel") {
            assert!(mkl.is_some(), "this libtorch comes with MKL");
        }
    }
}
