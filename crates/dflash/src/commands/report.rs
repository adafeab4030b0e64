//! `dflash report`: arguments to one library call.

use dflash::args::ReportArgs;
use dflash_report::write_report;

/// Runs the command; the page's path goes to stdout.
pub(crate) fn run(args: ReportArgs) -> anyhow::Result<()> {
    let ReportArgs { run_dir, output } = args;
    println!("{}", write_report(&run_dir, output.as_deref())?.display());
    Ok(())
}
