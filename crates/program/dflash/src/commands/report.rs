//! `dflash report`: passes the settings to the library.

use dflash_report::write_report;
use dflash_settings::ReportSettings;

/// Runs the command and prints the page's path.
pub(crate) fn run(settings: &ReportSettings) -> anyhow::Result<()> {
    println!("{}", write_report(&settings.run_dir, settings.output.as_deref())?.display());
    Ok(())
}
