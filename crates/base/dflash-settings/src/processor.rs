//! The CPU instruction level to use.

use dflash_cpu::{CpuLevel, VARIABLE};
use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::Invalid;

/// The CPU instruction level.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ProcessorSettings {
    /// Limit CPU instructions to this level, in our kernels and in libtorch, oneDNN and MKL, to see
    /// how another machine would perform. Default: everything that the CPU supports.
    #[cfg_attr(feature = "clap", arg(long, value_name = "LEVEL", env = VARIABLE, value_parser = levels()))]
    // The log and the record state the level that was used.
    #[setting(free)]
    pub cpu_level: Option<CpuLevel>,
}

impl ProcessorSettings {
    /// # Errors
    /// A level that this machine's processor does not support.
    pub fn check(&self) -> Result<(), Invalid> {
        match self.cpu_level.filter(|level| !level.is_here()) {
            Some(level) => {
                let reason = format!("or {VARIABLE} is {level}, but {}", level.reason_against());
                Err(Invalid { key: "cpu_level", reason, missing: None })
            }
            None => Ok(()),
        }
    }
}

/// The levels as clap values; `dflash-cpu` does not depend on clap.
#[cfg(feature = "clap")]
fn levels() -> impl clap::builder::TypedValueParser<Value = CpuLevel> {
    use clap::builder::TypedValueParser;
    let names = clap::builder::PossibleValuesParser::new(CpuLevel::ALL.map(CpuLevel::name));
    names.try_map(|name| name.parse::<CpuLevel>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_that_is_not_here_is_refused_by_name() {
        let check = |cpu_level| ProcessorSettings { cpu_level }.check();
        assert_eq!(check(None), Ok(()));
        for level in CpuLevel::here() {
            assert_eq!(check(Some(level)), Ok(()));
        }
        let missing = CpuLevel::ALL.into_iter().find(|level| !level.is_here());
        let error = check(missing).unwrap_err().to_string();
        let begins = format!("--cpu-level or DFLASH_CPU_LEVEL is {}, but", missing.unwrap());
        assert!(error.starts_with(&begins) && error.contains("has baseline"), "{error}");
    }
}
