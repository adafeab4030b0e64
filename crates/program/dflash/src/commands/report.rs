//! `dflash report`: passes the settings to the library.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_io::say;
use dflash_report::{Follow, follow, write_report};
use dflash_settings::ReportSettings;

/// Runs the command and prints the page's path or address.
pub(crate) fn run(settings: &ReportSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    if settings.follow {
        let asked = Follow {
            run_dir: &settings.run_dir,
            host: &settings.host,
            port: settings.port,
            port_file: settings.port_file.as_deref(),
        };
        return Ok(follow(&asked, stop, |address| tell(&settings.run_dir, address))?);
    }
    println!("{}", write_report(&settings.run_dir, settings.output.as_deref())?.display());
    Ok(())
}

/// Where to look, here and from elsewhere.
fn tell(run_dir: &Path, address: SocketAddr) {
    println!("http://{address}/");
    let port = address.port();
    say(format!("following {}; Ctrl-C ends it", run_dir.display()));
    if address.ip().is_loopback() {
        say(format!(
            "from another machine: ssh -L {port}:{address} THIS_MACHINE, then http://localhost:{port}/"
        ));
    } else {
        say(format!("anyone who reaches {address} can read the page"));
    }
}
