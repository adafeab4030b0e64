//! `dflash generate`: where prompts come from and answers go to, around the library's conversation.

use std::io::{BufRead, IsTerminal, Read, Write, stdin, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::Context;
use dflash_console::say;
use dflash_decode::{Conversation, Models, ModelsConfig};
use dflash_hub::{Hub, Part};
use dflash_settings::{ColorChoice, GenerateSettings};

use super::draft;

/// How soon Ctrl-C is noticed while a turn is being typed.
const STOP_POLL: Duration = Duration::from_millis(50);

/// Runs the command.
pub(crate) fn run(settings: &GenerateSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let prompt = prompt(settings)?;
    let target_dir = Hub::from_env().model(&settings.target, Part::Target, stop)?;
    let draft = draft::optional(settings.draft.as_deref(), stop)?;
    let models = Models::load(ModelsConfig {
        target_dir,
        target_name: settings.target.clone(),
        draft,
        allow_other_target: settings.allow_other_target,
        device: settings.device,
        dtype: settings.dtype,
        threads: None,
        template_variables: settings.chat_template_kwargs.clone(),
    })?;
    let mut conversation = Conversation::new(&models, settings, is_colored(settings))?;
    match prompt {
        Some(prompt) => conversation.answer(&prompt, &mut stdout(), stop)?,
        None => chat(&mut conversation, stop)?,
    }
    if settings.show_blocks {
        say(conversation.summary());
    }
    Ok(())
}

/// The prompt; `None` where turns are to be typed.
fn prompt(settings: &GenerateSettings) -> anyhow::Result<Option<String>> {
    if let Some(prompt) = &settings.prompt {
        return Ok(Some(prompt.clone()));
    }
    if let Some(path) = &settings.prompt_file {
        let text = std::fs::read_to_string(path);
        return Ok(Some(text.with_context(|| format!("cannot read {}", path.display()))?));
    }
    if stdin().is_terminal() {
        return Ok(None);
    }
    let mut text = String::new();
    stdin().read_to_string(&mut text).context("cannot read the prompt from standard input")?;
    Ok(Some(text.strip_suffix('\n').unwrap_or(&text).to_owned()))
}

fn is_colored(settings: &GenerateSettings) -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    match settings.color {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => stdout().is_terminal() && !no_color,
    }
}

/// Turn by turn, until the end of standard input.
fn chat(conversation: &mut Conversation<'_>, stop: &AtomicBool) -> anyhow::Result<()> {
    say("Type a turn and Enter; Ctrl-D ends.");
    let (sender, turns) = mpsc::channel();
    // Reading cannot be interrupted: a thread of its own does it.
    std::thread::spawn(move || {
        for line in stdin().lock().lines() {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    loop {
        let _ = write!(dflash_console::Stderr, "> ");
        let line = loop {
            match turns.recv_timeout(STOP_POLL) {
                Ok(line) => break line.context("cannot read from the terminal")?,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        if line.trim().is_empty() {
            continue;
        }
        match conversation.answer(&line, &mut stdout(), stop) {
            // A turn that is too long, or that the template refuses, is not the end.
            Err(
                error @ (dflash_decode::Error::LongPrompt { .. } | dflash_decode::Error::Text(_)),
            ) => {
                say(format!("error: {error}"));
            }
            answered => answered?,
        }
    }
}
