//! CPU instruction-set levels: which this machine has, and which one is in force.
//!
//! Our kernels are compiled once per level (baseline, avx2, avx512, avx512bf16, neon), in files
//! that share no inline function: the linker keeps one copy of such a function, possibly one that
//! this CPU cannot run. The level in force is the one named by `DFLASH_CPU_LEVEL`, or the CPU's
//! best. libtorch, oneDNN and MKL choose for themselves, from environment variables that they read
//! when they are loaded. So the front end sets `DFLASH_CPU_LEVEL` and these variables before the
//! engine starts; the engine, its ranks and the demo's commands inherit them. Tests set another
//! level for one thread, or run again with the variables set.

use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The variable that sets the level for every command.
pub const VARIABLE: &str = "DFLASH_CPU_LEVEL";

/// The instructions that products, attention and elementwise work may use, in ascending order on
/// each architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuLevel {
    /// The baseline of the architecture.
    Baseline,
    /// AVX2 and FMA (x86-64-v3).
    Avx2,
    /// AVX-512 with BW, CD, DQ and VL (x86-64-v4).
    Avx512,
    /// The same, and bfloat16 products.
    Avx512bf16,
    /// The vector instructions of aarch64.
    Neon,
}

/// A level that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No level has this name.
    #[error("{VARIABLE} is {0:?}, but the levels are baseline, avx2, avx512, avx512bf16 and neon")]
    Unknown(String),
    /// This processor does not support it.
    #[error("{VARIABLE} is {0}, but {reason}", reason = .0.reason_against())]
    Lacking(CpuLevel),
    /// A variable of a library is set to something else.
    #[error(
        "the CPU instruction level {level} sets {variable} to {value}, but it is already {found:?}; unset it, or do not pass --cpu-level and {VARIABLE}"
    )]
    AtOdds {
        /// The requested level.
        level: CpuLevel,
        /// The library's variable.
        variable: &'static str,
        /// What the level sets it to.
        value: &'static str,
        /// What the user has set it to.
        found: String,
    },
}

impl CpuLevel {
    /// All levels.
    pub const ALL: [Self; 5] =
        [Self::Baseline, Self::Avx2, Self::Avx512, Self::Avx512bf16, Self::Neon];

    /// The levels that this processor supports, ascending.
    pub fn here() -> Vec<Self> {
        Self::ALL.into_iter().filter(|level| level.is_here()).collect()
    }

    /// The highest level that this processor supports.
    pub fn best() -> Self {
        Self::here().into_iter().next_back().unwrap_or(Self::Baseline)
    }

    /// Whether this processor supports it.
    pub fn is_here(self) -> bool {
        match self {
            Self::Baseline => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            Self::Avx2 | Self::Avx512 | Self::Avx512bf16 => has(self),
        }
    }

    /// Its name on the command line, in files and of our compiled kernels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512bf16 => "avx512bf16",
            Self::Neon => "neon",
        }
    }

    /// Whether it has bfloat16 products, which are emulated and slow on other levels.
    pub const fn multiplies_bf16(self) -> bool {
        matches!(self, Self::Avx512bf16)
    }

    /// The environment variables that limit libtorch, oneDNN and MKL to this level, where a
    /// variable exists; they are read when the libraries are loaded. MKL obeys on Intel processors
    /// only.
    ///
    /// Values as documented: oneDNN's CPU dispatcher control, oneMKL's instruction set specific
    /// dispatching; libtorch's are those of its `compute_cpu_capability`.
    pub const fn variables(self) -> &'static [(&'static str, &'static str)] {
        const ATEN: &str = "ATEN_CPU_CAPABILITY";
        const ONEDNN: &str = "ONEDNN_MAX_CPU_ISA";
        const MKL: &str = "MKL_ENABLE_INSTRUCTIONS";
        match self {
            // On x86 the libraries have no lower level with vectors; on other architectures there
            // is neither MKL nor a level below their default.
            Self::Baseline if cfg!(target_arch = "x86_64") => {
                &[(ATEN, "default"), (ONEDNN, "SSE41"), (MKL, "SSE4_2")]
            }
            Self::Baseline | Self::Neon => &[(ATEN, "default")],
            Self::Avx2 => &[(ATEN, "avx2"), (ONEDNN, "AVX2"), (MKL, "AVX2")],
            Self::Avx512 => &[(ATEN, "avx512"), (ONEDNN, "AVX512_CORE"), (MKL, "AVX512")],
            // E3 adds bfloat16, E4 bfloat16 matrices (AMX).
            Self::Avx512bf16 => {
                &[(ATEN, "avx512"), (ONEDNN, "AVX512_CORE_BF16"), (MKL, "AVX512_E3")]
            }
        }
    }

    /// Its [`Self::variables`] and [`VARIABLE`], for starting a program at this level. `now` looks
    /// up a variable of this process.
    ///
    /// # Errors
    /// [`Error::Lacking`], and [`Error::AtOdds`] if the user has set one of them to a different
    /// value.
    pub fn environment(
        self,
        now: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Vec<(&'static str, &'static str)>, Error> {
        if !self.is_here() {
            return Err(Error::Lacking(self));
        }
        for &(variable, value) in self.variables() {
            if let Some(found) = now(variable).filter(|found| found != value) {
                let found = found.to_string_lossy().into_owned();
                return Err(Error::AtOdds { level: self, variable, value, found });
            }
        }
        Ok([&[(VARIABLE, self.name())], self.variables()].concat())
    }

    /// The level that [`VARIABLE`] names, if it is set.
    ///
    /// # Errors
    /// [`Error::Unknown`] and [`Error::Lacking`].
    pub fn from_env() -> Result<Option<Self>, Error> {
        let Some(name) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let level: Self = name.to_string_lossy().parse()?;
        if level.is_here() { Ok(Some(level)) } else { Err(Error::Lacking(level)) }
    }

    /// Why it cannot be used here, and which levels can: the end of a sentence.
    pub fn reason_against(self) -> String {
        let here: Vec<&str> = Self::here().into_iter().map(Self::name).collect();
        format!("this machine's processor has {}", here.join(", "))
    }
}

/// Whether the processor has every feature that the compiler may use at this level.
#[cfg(target_arch = "x86_64")]
fn has(level: CpuLevel) -> bool {
    use std::arch::is_x86_feature_detected as has;
    let avx2 = has!("avx2") && has!("fma") && has!("bmi1") && has!("bmi2") && has!("f16c");
    let avx2 = avx2 && has!("lzcnt") && has!("movbe");
    let avx512 = || {
        let wide = has!("avx512f") && has!("avx512bw") && has!("avx512cd");
        wide && has!("avx512dq") && has!("avx512vl")
    };
    match level {
        CpuLevel::Avx2 => avx2,
        CpuLevel::Avx512 => avx2 && avx512(),
        CpuLevel::Avx512bf16 => avx2 && avx512() && has!("avx512bf16"),
        CpuLevel::Baseline | CpuLevel::Neon => false,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn has(_level: CpuLevel) -> bool {
    false
}

impl FromStr for CpuLevel {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|level| level.name() == text);
        found.ok_or_else(|| Error::Unknown(text.to_owned()))
    }
}

impl fmt::Display for CpuLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_as_they_are_written() {
        for level in CpuLevel::ALL {
            assert_eq!(level.name().parse(), Ok(level));
            assert_eq!(serde_json::to_value(level).unwrap(), level.name());
        }
        let error = "avx9".parse::<CpuLevel>().unwrap_err().to_string();
        assert!(error.contains("DFLASH_CPU_LEVEL is \"avx9\"") && error.contains("avx512bf16"));
    }

    #[test]
    fn a_processor_has_all_levels_up_to_its_best() {
        let here = CpuLevel::here();
        assert_eq!(here.first(), Some(&CpuLevel::Baseline));
        assert_eq!(here.last(), Some(&CpuLevel::best()));
        let of_this_architecture = |level: &CpuLevel| {
            *level == CpuLevel::Baseline
                || (*level == CpuLevel::Neon) == cfg!(target_arch = "aarch64")
        };
        let all = CpuLevel::ALL.into_iter().filter(of_this_architecture);
        assert_eq!(all.take(here.len()).collect::<Vec<_>>(), here);
    }

    #[test]
    fn a_level_that_is_not_here_is_refused_with_what_is() {
        let missing = CpuLevel::ALL.into_iter().find(|level| !level.is_here());
        let missing = missing.expect("no processor has both neon and avx2");
        let error = missing.environment(|_| None).unwrap_err().to_string();
        assert!(error.starts_with(&format!("DFLASH_CPU_LEVEL is {missing}, but")), "{error}");
        assert!(error.contains("has baseline"), "{error}");
    }

    #[test]
    fn a_variable_of_the_user_s_own_is_kept_or_refused() {
        let set = |found: &'static str| {
            move |name: &str| (name == "ATEN_CPU_CAPABILITY").then(|| found.into())
        };
        let level = CpuLevel::Baseline;
        let all = level.environment(set("default")).unwrap();
        assert_eq!(all[0], ("DFLASH_CPU_LEVEL", "baseline"));
        assert_eq!(all[1..], *level.variables());
        let error = level.environment(set("avx2")).unwrap_err().to_string();
        for part in ["baseline", "ATEN_CPU_CAPABILITY to default", "\"avx2\"", "unset it"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
