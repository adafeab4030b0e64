//! `dflash doctor`: checks the machine and says what is missing and how to get it.

mod finding;
mod hub;
mod machine;
mod places;
mod programs;

use anyhow::bail;
use dflash_settings::DoctorSettings;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use finding::{Finding, Status, show};

/// Runs the command and prints the findings; an error if something is missing.
pub(crate) fn run(settings: &DoctorSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let findings = look(settings, stop);
    if settings.json {
        println!("{}", serde_json::to_string_pretty(&findings)?);
    } else {
        print!("{}", show(&findings));
    }
    let missing = findings.iter().filter(|finding| finding.status == Status::Missing).count();
    match missing {
        0 => Ok(()),
        1 => bail!("something essential is missing; see above"),
        count => bail!("{count} essential things are missing; see above"),
    }
}

fn look(settings: &DoctorSettings, stop: &AtomicBool) -> Vec<Finding> {
    let mut findings = programs::look();
    findings.extend(machine::look(&settings.dir, &settings.ports));
    findings.extend(places::look());
    if !stop.load(Ordering::Relaxed) {
        findings.push(hub::look(settings.offline));
    }
    findings
}
