//! The version of the loaded libtorch.

use crate::{Error, ffi};

/// The version of the loaded library, such as `2.11.0`, from its build report, regardless of the
/// version compiled against.
///
/// # Errors
/// [`Error::NoVersion`] if the report has none.
pub fn libtorch_version() -> Result<String, Error> {
    let mut report = std::ptr::null_mut();
    // SAFETY: the out pointer is a local.
    let failure = unsafe { ffi::dflash_show_config(&mut report) };
    ffi::checked("read libtorch's build report", failure)?;
    find_version(&ffi::take_string(report)).ok_or(Error::NoVersion)
}

fn find_version(report: &str) -> Option<String> {
    let (_, rest) = report.split_once("TORCH_VERSION=")?;
    let version = rest.split([',', ' ', '\n']).next()?;
    (!version.is_empty()).then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_s_version_is_found() {
        let check = |report: &str, expected: Option<&str>| {
            assert_eq!(find_version(report).as_deref(), expected);
        };
        check("Build settings: PERF=1, TORCH_VERSION=2.11.0, USE_CUDA=1, ", Some("2.11.0"));
        check("TORCH_VERSION=2.12.0", Some("2.12.0"));
        check("TORCH_VERSION=, USE_CUDA=1", None);
        check("PyTorch built with:", None);
    }

    #[test]
    fn the_library_in_use_is_the_one_that_tch_needs() {
        assert_eq!(libtorch_version().unwrap(), "2.11.0");
    }
}
