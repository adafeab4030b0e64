//! `dflash demo-target`: settings to one library call.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use dflash_demo::Event;
use dflash_settings::DemoTargetSettings;

/// Runs the command.
pub(crate) fn run(settings: &DemoTargetSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let mut progress = Progress::new();
    let made = dflash_demo::run(settings, stop, &mut |event| progress.show(event))?;
    if made.kept {
        eprintln!("{} is complete; kept", made.target.display());
    }
    println!("{}", made.target.display());
    Ok(())
}

/// Lines on stderr: one that is rewritten on a terminal, a new one now and then elsewhere.
struct Progress {
    terminal: bool,
    began: Instant,
    shown: Option<Instant>,
}

impl Progress {
    fn new() -> Self {
        Self { terminal: io::stderr().is_terminal(), began: Instant::now(), shown: None }
    }

    fn show(&mut self, event: Event) {
        match event {
            Event::Corpus { rows, vocabulary } => {
                eprintln!("corpus: {rows} conversations, {vocabulary} tokens in the vocabulary");
            }
            Event::Target { parameters } => {
                eprintln!("target: {:.1} million weights", parameters as f64 / 1e6);
                self.began = Instant::now();
            }
            Event::Step { step, steps, loss } => self.show_step(step, steps, loss),
        }
    }

    fn show_step(&mut self, step: usize, steps: usize, loss: f64) {
        let pause = Duration::from_millis(if self.terminal { 200 } else { 5000 });
        let last = step == steps;
        if !last && self.shown.is_some_and(|shown| shown.elapsed() < pause) {
            return;
        }
        self.shown = Some(Instant::now());
        let left = self.began.elapsed().as_secs_f64() / step as f64 * (steps - step) as f64;
        let line =
            format!("training the target: step {step}/{steps}, loss {loss:.3}, {left:.0} s left");
        let (start, end) = match (self.terminal, last) {
            (true, false) => ("\r\x1b[K", ""),
            (true, true) => ("\r\x1b[K", "\n"),
            (false, _) => ("", "\n"),
        };
        // Progress is a courtesy: a closed stderr must not end the training.
        let _ = write!(io::stderr(), "{start}{line}{end}");
    }
}
