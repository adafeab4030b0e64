//! `dflash cpu-levels`: the levels of the processor's instructions, for scripts that run a program at each.

use std::io::Write;

use dflash_cpu::{CpuLevel, VARIABLE};

/// A line for each, ascending: its name, and the variables that stand for it.
pub(crate) fn run() -> anyhow::Result<()> {
    for level in CpuLevel::here() {
        let own = [(VARIABLE, level.name())];
        let all =
            own.iter().chain(level.variables()).map(|(name, value)| format!(" {name}={value}"));
        writeln!(std::io::stdout(), "{level}{}", all.collect::<String>())?;
    }
    Ok(())
}
