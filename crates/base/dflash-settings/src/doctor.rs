//! The settings of `dflash doctor`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, within};

/// Check this machine: programs, libtorch, GPUs, disk, Hub and ports, and what is missing.
///
/// Prints one line per finding, with its remedy. The exit code is 1 if something essential is
/// missing; everything else is a warning.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct DoctorSettings {
    /// Print the findings as a JSON array.
    #[cfg_attr(feature = "clap", arg(long))]
    pub json: bool,
    /// Ports to check. 8000 is the default of `dflash hidden-server`.
    #[cfg_attr(feature = "clap", arg(long, value_name = "PORT", num_args = 1.., value_delimiter = ',', default_values_t = [8000]))]
    pub ports: Vec<u16>,
    /// Directory for data and checkpoints, whose disk is checked.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR", default_value = "."))]
    pub dir: PathBuf,
    /// Do not check the Hub: no network is used.
    #[cfg_attr(feature = "clap", arg(long))]
    pub offline: bool,
}

impl DoctorSettings {
    /// # Errors
    /// A port that nothing can listen on.
    pub fn check(&self) -> Result<(), Invalid> {
        self.ports.iter().try_for_each(|port| within([("ports", u64::from(*port), 1..=65535)]))
    }
}
