//! `dflash cpu-levels`: lists the CPU instruction levels, for scripts that run a program at each.

use std::io::Write;

use dflash_cpu::{CpuLevel, VARIABLE};

/// Prints a line per level, in ascending order: its name and the variables that select it.
pub(crate) fn run() -> anyhow::Result<()> {
    for level in CpuLevel::here() {
        let own = [(VARIABLE, level.name())];
        let all =
            own.iter().chain(level.variables()).map(|(name, value)| format!(" {name}={value}"));
        writeln!(std::io::stdout(), "{level}{}", all.collect::<String>())?;
    }
    Ok(())
}
