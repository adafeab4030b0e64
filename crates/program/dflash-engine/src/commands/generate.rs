//! `dflash generate`: input and output around the library's conversation.

use std::io::{IsTerminal, Read, stdin, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::Context;
use dflash::signals::forgive_interrupt;
use dflash_decode::{Conversation, Models, ModelsConfig};
use dflash_hub::{Hub, ModelPart};
use dflash_io::say;
use dflash_settings::{ColorChoice, GenerateSettings};
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use rustyline::error::ReadlineError;
use rustyline::{Behavior, Config, DefaultEditor};

use super::draft;

/// Interval at which Ctrl-C is polled while the user types.
const STOP_POLL: Duration = Duration::from_millis(50);

pub(crate) fn run(settings: &GenerateSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let prompt = prompt(settings)?;
    if prompt.as_ref().is_some_and(|prompt| prompt.trim().is_empty()) {
        return Err(dflash_decode::Error::EmptyPrompt.into());
    }
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Target, stop)?;
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
        Some(prompt) => {
            conversation.answer(&prompt, &mut stdout(), stop)?;
            say_if_cut(&conversation, settings);
        }
        None => chat(&mut conversation, settings, stop)?,
    }
    if settings.show_blocks {
        say(conversation.summary());
    }
    Ok(())
}

/// The prompt; `None` for an interactive chat.
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
    let is_dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    match settings.color {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => stdout().is_terminal() && !no_color && !is_dumb,
    }
}

/// Says that an answer is not whole, which its text may not show.
fn say_if_cut(conversation: &Conversation<'_>, settings: &GenerateSettings) {
    if conversation.was_cut() {
        let most = settings.max_new_tokens;
        say(format!("the answer was cut at --max-new-tokens {most}; raise it for the rest"));
    }
}

/// Chats turn by turn until the end of standard input. Ctrl-C stops an answer; at an empty prompt
/// it ends the chat.
fn chat(
    conversation: &mut Conversation<'_>,
    settings: &GenerateSettings,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<()> {
    say("Type a turn and Enter; Ctrl-C stops an answer, Ctrl-D ends.");
    let terminal = Terminal::new();
    loop {
        let line = match terminal.line(stop)? {
            Line::Turn(line) => line,
            Line::End => return Ok(()),
        };
        if line.trim().is_empty() {
            continue;
        }
        match conversation.answer(&line, &mut stdout(), stop) {
            Err(dflash_decode::Error::Interrupted) if forgive_interrupt(stop) => {}
            // A turn that is too long or that the template refuses does not end the chat.
            Err(
                error @ (dflash_decode::Error::LongPrompt { .. } | dflash_decode::Error::Text(_)),
            ) => {
                say(format!("error: {error}"));
            }
            answered => {
                answered?;
                say_if_cut(conversation, settings);
            }
        }
    }
}

/// One input from the terminal.
enum Line {
    Turn(String),
    End,
}

/// Lines from the terminal, with editing and history. Reading cannot be interrupted, so a separate
/// thread reads one line per request.
struct Terminal {
    ask: mpsc::Sender<()>,
    lines: mpsc::Receiver<rustyline::Result<String>>,
    /// The terminal's original mode, to restore if the thread is abandoned while it reads.
    before: Option<Termios>,
}

impl Terminal {
    fn new() -> Self {
        let (ask, asked) = mpsc::channel::<()>();
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            // The history stays in memory: prompts are private.
            let mut history = Vec::new();
            while asked.recv().is_ok() {
                let line = read_line(&history);
                history.extend(line.as_ref().ok().cloned());
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { ask, lines, before: tcgetattr(stdin()).ok() }
    }

    fn line(&self, stop: &AtomicBool) -> anyhow::Result<Line> {
        let mut was_interrupted = false;
        loop {
            let _ = self.ask.send(());
            let line = loop {
                match self.lines.recv_timeout(STOP_POLL) {
                    Ok(line) => break line,
                    Err(RecvTimeoutError::Disconnected) => return Ok(Line::End),
                    Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => {
                        self.restore();
                        return Ok(Line::End);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
            };
            match line {
                Ok(line) => return Ok(Line::Turn(line)),
                Err(ReadlineError::Eof) => return Ok(Line::End),
                // The first Ctrl-C discards the line, as in a shell.
                Err(ReadlineError::Interrupted) if was_interrupted => return Ok(Line::End),
                Err(ReadlineError::Interrupted) => {
                    was_interrupted = true;
                    say("Ctrl-D, or Ctrl-C once more, ends.");
                }
                Err(error) => return Err(error).context("cannot read from the terminal"),
            }
        }
    }

    fn restore(&self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(stdin(), SetArg::TCSANOW, before);
        }
    }
}

/// Reads a line with a short-lived editor: an editor captures SIGINT until it is dropped, and would
/// keep Ctrl-C from stopping the answer. The prompt goes to stderr, since stdout is for answers.
fn read_line(history: &[String]) -> rustyline::Result<String> {
    let config = Config::builder().behavior(Behavior::PreferTerm).build();
    let mut editor = DefaultEditor::with_config(config)?;
    for line in history {
        editor.add_history_entry(line)?;
    }
    editor.readline("> ")
}
