//! The CPU instruction-set level in use.

use std::cell::Cell;
use std::sync::OnceLock;

use dflash_cpu::CpuLevel;

thread_local! {
    /// Override by [`at_cpu_level`].
    static SET: Cell<Option<CpuLevel>> = const { Cell::new(None) };
}

/// The level of our kernels: DFLASH_CPU_LEVEL, or else the highest that the processor supports.
///
/// # Panics
/// If the variable names an unusable level; programs check it at startup.
pub fn cpu_level() -> CpuLevel {
    static IN_FORCE: OnceLock<CpuLevel> = OnceLock::new();
    let in_force = || {
        let asked = CpuLevel::from_env().unwrap_or_else(|error| panic!("{error}"));
        asked.unwrap_or_else(CpuLevel::best)
    };
    SET.get().unwrap_or_else(|| *IN_FORCE.get_or_init(in_force))
}

/// Runs `work` with our kernels at another level, on this thread, for tests that compare levels.
/// libtorch's kernels are not affected.
///
/// # Panics
/// If the processor lacks the level.
pub fn at_cpu_level<T>(level: CpuLevel, work: impl FnOnce() -> T) -> T {
    struct Before(Option<CpuLevel>);
    impl Drop for Before {
        fn drop(&mut self) {
            SET.set(self.0);
        }
    }
    assert!(level.is_here(), "{level}: {}", level.reason_against());
    let _before = Before(SET.replace(Some(level)));
    work()
}

/// Whether the processor multiplies bfloat16 natively at the current level; otherwise it is
/// emulated and slow.
pub fn cpu_multiplies_bf16() -> bool {
    cpu_level().multiplies_bf16()
}

/// [`cpu_level`] as numbered in `cpp/level.h`.
pub(crate) fn raw() -> i32 {
    cpu_level() as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_is_another_for_as_long_as_the_work_lasts() {
        let before = cpu_level();
        for level in CpuLevel::here() {
            at_cpu_level(level, || {
                assert_eq!(cpu_level(), level);
                at_cpu_level(CpuLevel::Baseline, || assert_eq!(raw(), 0));
                assert_eq!(cpu_level(), level);
                std::thread::spawn(move || assert_eq!(cpu_level(), before)).join().unwrap();
            });
        }
        assert_eq!(cpu_level(), before);
    }
}
