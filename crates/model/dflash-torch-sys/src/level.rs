//! The instructions that libtorch and MKL compute with.

use crate::{Error, ffi};

/// The instructions that the libraries have chosen, in this project's words where it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryLevels {
    /// libtorch's own loops: `default`, `avx2`, `avx512` and others.
    pub libtorch: String,
    /// MKL's products: `sse4_2`, `avx2`, `avx512` and others; `None` where there is no MKL, or one that
    /// does not tell.
    pub mkl: Option<&'static str>,
}

/// What libtorch and MKL compute with. They choose at the first use, by the processor and by variables
/// that only count before.
///
/// # Errors
/// libtorch's refusal.
pub fn library_levels() -> Result<LibraryLevels, Error> {
    let mut level = std::ptr::null_mut();
    // SAFETY: the out pointer is a local, and the other call takes none.
    let (failure, branch) =
        unsafe { (ffi::dflash_libtorch_level(&mut level), ffi::dflash_mkl_branch()) };
    ffi::checked("ask libtorch for its instructions", failure)?;
    Ok(LibraryLevels { libtorch: ffi::take_string(level).to_lowercase(), mkl: mkl_name(branch) })
}

/// The name of a branch of MKL's code: the constants `MKL_CBWR_*` of its header.
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
        // What the level in force says of them, where no variable of the user's says something else.
        let is_known = ["default", "avx2", "avx512"].contains(&libtorch.as_str());
        assert!(is_known || cfg!(not(target_arch = "x86_64")), "{libtorch}");
        if cfg!(target_arch = "x86_64") {
            assert!(mkl.is_some(), "this libtorch comes with MKL");
        }
    }
}
