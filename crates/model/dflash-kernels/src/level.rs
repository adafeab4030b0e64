//! The level of the processor's instructions that computes here.

use std::cell::Cell;
use std::sync::OnceLock;

use dflash_cpu::CpuLevel;

thread_local! {
    /// What [`at_cpu_level`] has set for its work.
    static SET: Cell<Option<CpuLevel>> = const { Cell::new(None) };
}

/// The level of our kernels: what DFLASH_CPU_LEVEL names, else the highest that the processor has.
///
/// # Panics
/// Where the variable names a level that cannot be used; programs look at it when they start.
pub fn cpu_level() -> CpuLevel {
    static IN_FORCE: OnceLock<CpuLevel> = OnceLock::new();
    let in_force = || {
        let asked = CpuLevel::from_env().unwrap_or_else(|error| panic!("{error}"));
        asked.unwrap_or_else(CpuLevel::best)
    };
    SET.get().unwrap_or_else(|| *IN_FORCE.get_or_init(in_force))
}

/// Does `work` with the kernels of another level, on this thread: for tests, which compare levels.
/// libtorch's own stay as they are.
///
/// # Panics
/// Where the processor lacks the level.
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

/// Whether the processor multiplies bfloat16 at the level in force; elsewhere it is emulated and slow.
pub fn cpu_multiplies_bf16() -> bool {
    cpu_level().multiplies_bf16()
}

/// [`cpu_level`] as `cpp/level.h` counts them.
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
