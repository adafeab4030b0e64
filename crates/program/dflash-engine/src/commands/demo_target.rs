//! `dflash demo-target`: passes the settings to the library.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_demo_target::Event;
use dflash_io::{Progress, Unit, say};
use dflash_settings::DemoTargetSettings;

pub(crate) fn run(settings: &DemoTargetSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let mut progress = None;
    let made = dflash_demo_target::run(settings, stop, &mut |event| show(&event, &mut progress))?;
    if made.kept {
        say(format!("{} is complete; kept", made.target.display()));
    }
    println!("{}", made.target.display());
    if let Some((wide, bytes)) = made.wide {
        let megabytes = bytes / 1_000_000;
        say(format!("widened by zeros to {megabytes} MB of weights: {}", wide.display()));
    }
    Ok(())
}

fn show(event: &Event, progress: &mut Option<Progress>) {
    match *event {
        Event::Corpus { rows, vocabulary } => {
            say(format!("corpus: {rows} conversations, {vocabulary} tokens in the vocabulary"));
        }
        Event::Target { parameters } => {
            say(format!("target: {:.1} million weights", parameters as f64 / 1e6));
        }
        Event::Step { step, steps, loss } => {
            let start = || Progress::new("training the target", Unit::Items, steps as u64);
            let message = format!("loss {loss:.3}");
            progress.get_or_insert_with(start).update(step as u64, &message);
            if step == steps {
                *progress = None;
                say(format!("trained the target: {steps} steps, {message}"));
            }
        }
    }
}
