//! Interactive generation: one prompt, or a conversation turn by turn, streamed to the terminal.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use dflash_chat::{Message, Role};
use dflash_settings::GenerateSettings;

use crate::Error;
use crate::answer::answer;
use crate::blocks::Marks;
use crate::engine::{Engine, EngineOptions, NewToken, Output, Proposals, Request};
use crate::limits::Limits;
use crate::models::Models;
use crate::sampling::Sampling;
use crate::text::TextStream;

/// Prompt tokens processed between two checks of the stop flag.
const PREFILL_TOKENS: usize = 512;
/// Below the minimum length of a retained prefix.
const WARM_UP_TOKENS: usize = 14;
/// Memory for prefixes, so that each turn is read once.
const PREFIX_BYTES: usize = 1 << 30;

/// Statistics of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GenerateSummary {
    /// Generated tokens, including end tokens.
    pub tokens: usize,
    /// Seconds from a prompt to its last token.
    pub seconds: f64,
    /// Number of verified blocks.
    pub steps: usize,
    /// Number of accepted proposals.
    pub accepted: usize,
    /// Plain decoding of the same prompts, if measured.
    pub plain: Option<PlainSpeed>,
}

/// Time of plain decoding for as many tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlainSpeed {
    /// Tokens made.
    pub tokens: usize,
    /// Seconds from a prompt to its last token.
    pub seconds: f64,
}

impl std::fmt::Display for GenerateSummary {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(f64::MIN_POSITIVE);
        let speed = rate(self.tokens, self.seconds);
        if self.steps > 0 {
            let length = 1.0 + self.accepted as f64 / self.steps as f64;
            write!(out, "acceptance length {length:.2} over {} blocks; ", self.steps)?;
        }
        write!(out, "{} tokens at {speed:.1} tokens/s", self.tokens)?;
        if let Some(plain) = self.plain {
            let plain = rate(plain.tokens, plain.seconds);
            write!(
                out,
                ", plain decoding {plain:.1} tokens/s: {:.2} times as fast",
                speed / plain
            )?;
        }
        Ok(())
    }
}

/// A conversation with the models.
#[derive(Debug)]
pub struct Conversation<'a> {
    models: &'a Models,
    settings: &'a GenerateSettings,
    engine: Engine<'a>,
    /// Measures plain decoding; keeps no prefixes, so it reads every prompt.
    plain: Engine<'a>,
    messages: Vec<Message>,
    colored: bool,
    summary: GenerateSummary,
    /// Whether the last answer ended at --max-new-tokens, not by itself.
    was_cut: bool,
    /// The displayed part of the last answer, until it is added to `messages`.
    shown: Option<String>,
}

impl<'a> Conversation<'a> {
    /// An empty conversation; blocks are shown in colors if `colored`.
    ///
    /// # Errors
    /// Models that do not match.
    pub fn new(
        models: &'a Models,
        settings: &'a GenerateSettings,
        colored: bool,
    ) -> Result<Self, Error> {
        let options = EngineOptions {
            max_sequences: 1,
            max_model_len: models.target.config().max_position_embeddings as usize,
            prefill_tokens: PREFILL_TOKENS,
            prefix_bytes: PREFIX_BYTES,
            speculate: settings.speculate,
        };
        let plain = EngineOptions { prefix_bytes: 0, ..options };
        let plain = Engine::new(&models.target, Proposals::None, plain)?;
        let system = settings.system.iter().map(|text| Message::text(Role::System, text));
        Ok(Self {
            models,
            settings,
            engine: models.engine(options)?,
            plain,
            messages: system.collect(),
            colored,
            summary: GenerateSummary::default(),
            was_cut: false,
            shown: None,
        })
    }

    /// Statistics of the answers so far.
    pub fn summary(&self) -> GenerateSummary {
        self.summary
    }

    /// Whether the last answer ended at --max-new-tokens, not by itself.
    pub fn was_cut(&self) -> bool {
        self.was_cut
    }

    /// Appends `text` as the next turn and streams the answer to `out`.
    ///
    /// # Errors
    /// A prompt that leaves no room for an answer or is rejected by the template; an output that
    /// cannot be written; [`Error::Interrupted`], after which the displayed text stays in the
    /// conversation.
    pub fn answer(
        &mut self,
        text: &str,
        out: &mut dyn Write,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        self.messages.push(Message::text(Role::User, text));
        self.was_cut = false;
        let answered = self.try_answer(text, out, stop);
        match self.shown.take() {
            Some(answer) => self.messages.push(Message::text(Role::Assistant, answer)),
            // Removes the turn, so that another can be tried.
            None => drop(self.messages.pop()),
        }
        answered
    }

    fn try_answer(
        &mut self,
        text: &str,
        out: &mut dyn Write,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let tokenizer = &self.models.tokenizer;
        let prompt = match self.settings.raw {
            true => tokenizer.encode(text)?,
            false => tokenizer.render_ids(&self.messages, None, true)?,
        };
        let request = self.request(prompt)?;
        let measures = self.settings.show_blocks && self.models.proposer.is_some();
        if measures && self.summary.tokens == 0 {
            self.warm_up(&request, stop)?;
        }
        let marks = self.settings.show_blocks.then_some(Marks { colored: self.colored });
        let mut shown = Shown::new(self.models, self.settings, marks, out);
        let made = answer(&mut self.engine, request.clone(), stop, |output| shown.add(output));
        if matches!(made, Err(Error::Interrupted)) {
            let (begun, ..) = shown.finish()?;
            self.shown = Some(begun).filter(|begun| !begun.is_empty());
            return Err(Error::Interrupted);
        }
        let made = made?;
        let tokens = made.tokens.len();
        self.was_cut = !made.finished && tokens >= self.settings.max_new_tokens;
        let (text, steps, accepted) = shown.finish()?;
        // Kept even if the timing below fails.
        self.shown = Some(text);
        self.summary.tokens += tokens;
        self.summary.seconds += made.seconds();
        self.summary.steps += steps;
        self.summary.accepted += accepted;
        if measures {
            self.measure_plain(Request { max_new_tokens: tokens, ..request }, stop)?;
        }
        Ok(())
    }

    fn request(&self, prompt: Vec<i64>) -> Result<Request, Error> {
        let context = self.models.target.config().max_position_embeddings as usize;
        let tokens = prompt.len();
        if tokens == 0 {
            return Err(Error::EmptyPrompt);
        }
        if tokens >= context {
            return Err(Error::LongPrompt { tokens, context });
        }
        let settings = self.settings;
        let limits = Limits {
            max_new_tokens: settings.max_new_tokens.min(context - tokens),
            stop_ids: self.models.stop_ids(),
        };
        let sampling = Sampling {
            temperature: settings.temperature,
            top_p: settings.top_p,
            top_k: settings.top_k,
            min_p: 0.0,
        };
        Ok(Request::new(&prompt, &limits, sampling, settings.seed))
    }

    /// A few untimed tokens per mode: the first passes allocate memory and fill caches.
    fn warm_up(&mut self, request: &Request, stop: &AtomicBool) -> Result<(), Error> {
        let prompt = request.prompt[..1].to_vec();
        let few = request.max_new_tokens.min(WARM_UP_TOKENS);
        let request = Request { prompt, max_new_tokens: few, ..request.clone() };
        answer(&mut self.engine, request.clone(), stop, |_| Ok(true))?;
        answer(&mut self.plain, request, stop, |_| Ok(true)).map(drop)
    }

    /// Times plain decoding of the same prompt for as many tokens.
    fn measure_plain(&mut self, request: Request, stop: &AtomicBool) -> Result<(), Error> {
        let request = Request { stop_ids: Vec::new(), ..request };
        let made = answer(&mut self.plain, request, stop, |_| Ok(true))?;
        let plain = self.summary.plain.get_or_insert(PlainSpeed { tokens: 0, seconds: 0.0 });
        plain.tokens += made.tokens.len();
        plain.seconds += made.seconds();
        Ok(())
    }
}

/// An answer being displayed.
struct Shown<'a> {
    models: &'a Models,
    stream: TextStream<'a>,
    stop_ids: Vec<i64>,
    marks: Option<Marks>,
    out: &'a mut dyn Write,
    answer: String,
    steps: usize,
    accepted: usize,
}

impl<'a> Shown<'a> {
    fn new(
        models: &'a Models,
        settings: &GenerateSettings,
        marks: Option<Marks>,
        out: &'a mut dyn Write,
    ) -> Self {
        let stream = TextStream::new(&models.tokenizer, settings.stop.clone());
        let (stop_ids, answer) = (models.stop_ids(), String::new());
        Self { models, stream, stop_ids, marks, out, answer, steps: 0, accepted: 0 }
    }

    /// Shows a step's output. Returns false after a stop string.
    fn add(&mut self, output: Output) -> Result<bool, Error> {
        let block = output.block.unwrap_or_default();
        self.steps += usize::from(!block.proposed.is_empty());
        self.accepted += block.accepted;
        let (accepted, own) = output.tokens.split_at(block.accepted.min(output.tokens.len()));
        let accepted = self.text(accepted)?;
        let own = self.text(own)?;
        let shown = match self.marks {
            None => format!("{accepted}{own}"),
            Some(marks) => {
                let rejected =
                    self.models.tokenizer.decode(&block.proposed[block.accepted..], true)?;
                format!("{}{}{own}", marks.accepted(&accepted), marks.rejected(&rejected))
            }
        };
        self.answer += &accepted;
        self.answer += &own;
        self.write(&shown)?;
        Ok(!self.stream.has_stopped())
    }

    /// The text that `tokens` complete.
    fn text(&mut self, tokens: &[NewToken]) -> Result<String, Error> {
        let mut text = String::new();
        for token in tokens.iter().filter(|token| !self.stop_ids.contains(&token.id)) {
            text += &self.stream.push(token.id)?;
        }
        Ok(text)
    }

    /// Shows the rest. Returns the answer, the verified blocks and the accepted proposals.
    fn finish(mut self) -> Result<(String, usize, usize), Error> {
        let rest = self.stream.finish()?;
        self.write(&format!("{rest}\n"))?;
        Ok((self.answer + &rest, self.steps, self.accepted))
    }

    fn write(&mut self, text: &str) -> Result<(), Error> {
        let written = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
        written.map_err(|source| Error::Output { source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_says_what_was_measured() {
        let mut summary =
            GenerateSummary { tokens: 30, seconds: 2.0, steps: 10, accepted: 19, plain: None };
        assert_eq!(
            summary.to_string(),
            "acceptance length 2.90 over 10 blocks; 30 tokens at 15.0 tokens/s"
        );
        summary.plain = Some(PlainSpeed { tokens: 30, seconds: 5.0 });
        let text = summary.to_string();
        assert!(text.ends_with(", plain decoding 6.0 tokens/s: 2.50 times as fast"), "{text}");
        let alone = GenerateSummary { tokens: 8, seconds: 4.0, ..GenerateSummary::default() };
        assert_eq!(alone.to_string(), "8 tokens at 2.0 tokens/s");
    }
}
