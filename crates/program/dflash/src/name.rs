//! The name that the program was started under.
//!
//! It is `dflash`, and from a Python wheel also `dflash-train`: another package may install a program
//! `dflash` in the same environment, and the last one installed has the name.

use std::ffi::OsStr;
use std::path::Path;

/// The name that every installation has.
pub const SHORT: &str = "dflash";
const UNSHARED: &str = "dflash-train";

/// The name of this process's program, which help and usage show: `dflash-train` if that is how it was
/// started, else `dflash`.
pub fn invoked() -> &'static str {
    of(std::env::args_os().next().as_deref())
}

fn of(program: Option<&OsStr>) -> &'static str {
    let name = program.and_then(|program| Path::new(program).file_name());
    if name == Some(OsStr::new(UNSHARED)) { UNSHARED } else { SHORT }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_second_name_is_shown_instead_of_the_first() {
        let check = |program: &str, expect| assert_eq!(of(Some(OsStr::new(program))), expect);
        check("dflash", "dflash");
        check("/env/bin/dflash-train", "dflash-train");
        check("/build/deps/dflash-0123", "dflash");
        assert_eq!(of(None), "dflash");
    }
}
