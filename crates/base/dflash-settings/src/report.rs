//! The settings of `dflash report`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, at_odds, needs, port_file};

/// Show a training run as one page: curves, settings, checkpoints.
///
/// Writes one HTML file that needs no other file and no network, and prints its path. The run may
/// still be in progress. With --follow the page is served instead, and keeps itself current.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ReportSettings {
    /// Directory of the run: the --save-path of `dflash train`. With --follow it may be empty or
    /// absent until the run begins.
    #[cfg_attr(feature = "clap", arg(value_name = "RUN_DIR"))]
    pub run_dir: PathBuf,
    /// The page to write [default: RUN_DIR/report.html].
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub output: Option<PathBuf>,
    /// Serve the page and keep it current until Ctrl-C. Nothing is written to the run's directory.
    #[cfg_attr(feature = "clap", arg(long))]
    #[serde(default)]
    pub follow: bool,
    /// With --follow: the interface to listen on; 0.0.0.0 for all. There is no key: whoever reaches
    /// it can read the page.
    #[cfg_attr(feature = "clap", arg(long, default_value_t = default_host()))]
    #[serde(default = "default_host")]
    pub host: String,
    /// With --follow: the port to listen on; 0 for any free one.
    #[cfg_attr(feature = "clap", arg(long, default_value_t = default_port()))]
    #[serde(default = "default_port")]
    pub port: u16,
    /// With --follow: a file to write the port to.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub port_file: Option<PathBuf>,
}

impl ReportSettings {
    /// # Errors
    /// A page to write beside --follow, which writes none; a port file without --follow, or one
    /// that would replace something that is not a file.
    pub fn check(&self) -> Result<(), Invalid> {
        if self.follow && self.output.is_some() {
            return Err(at_odds(
                "output",
                "needs no --follow, which serves the page and writes no file",
            ));
        }
        if !self.follow && self.port_file.is_some() {
            return Err(needs("port_file", "follow"));
        }
        port_file(self.port_file.as_deref())
    }
}

fn default_host() -> String {
    "127.0.0.1".to_owned()
}

fn default_port() -> u16 {
    8008
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_written_or_served() {
        let check = |json: &str, expect: Option<&str>| {
            let settings: ReportSettings = serde_json::from_str(json).unwrap();
            assert_eq!(settings.check().err().map(|invalid| invalid.key), expect, "{json}");
        };
        check(r#"{"run_dir": "r"}"#, None);
        check(r#"{"run_dir": "r", "output": "x.html"}"#, None);
        check(r#"{"run_dir": "r", "follow": true, "port": 0}"#, None);
        check(r#"{"run_dir": "r", "follow": true, "output": "x.html"}"#, Some("output"));
        check(r#"{"run_dir": "r", "port_file": "port"}"#, Some("port_file"));
    }
}
