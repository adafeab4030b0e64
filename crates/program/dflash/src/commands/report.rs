//! `dflash report`: settings to one library call.

use dflash_report::write_report;
use dflash_settings::ReportSettings;

/// Runs the command; the page's path goes to stdout.
pub(crate) fn run(settings: &ReportSettings) -> anyhow::Result<()> {
    println!("{}", write_report(&settings.run_dir, settings.output.as_deref())?.display());
    Ok(())
}
