//! Streams an answer's text: whole characters, up to a stop string.
//!
//! A token may end within a character, and a stop string within a token. So text is released once
//! it can no longer change, and held back while it may start a stop string.

use dflash_chat::{ChatTokenizer, Error};

/// The decoder's output for bytes that are not (yet) a character.
const REPLACEMENT: char = '\u{fffd}';

/// The text of one answer.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a ChatTokenizer,
    stops: Vec<String>,
    /// Tokens since the last character boundary, and how many of them have been decoded.
    ids: Vec<i64>,
    read: usize,
    /// Special tokens that belong to the text.
    shown: Vec<i64>,
    /// Text that may start a stop string.
    held: String,
    stopped: bool,
}

impl<'a> TextStream<'a> {
    /// Streams the text up to the first of `stops`, which must not be empty.
    pub fn new(tokenizer: &'a ChatTokenizer, stops: Vec<String>) -> Self {
        debug_assert!(stops.iter().all(|stop| !stop.is_empty()), "it would stop before it began");
        let (ids, shown, held) = (Vec::new(), Vec::new(), String::new());
        Self { tokenizer, stops, ids, read: 0, shown, held, stopped: false }
    }

    /// Shows these special tokens, which otherwise have no text.
    pub fn showing(self, shown: Vec<i64>) -> Self {
        Self { shown, ..self }
    }

    /// Adds the next token; returns the text that is now final. Nothing after a stop string.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn push(&mut self, id: i64) -> Result<String, Error> {
        if self.stopped {
            return Ok(String::new());
        }
        if self.shown.contains(&id) {
            let rest = self.rest()?;
            self.held.push_str(&rest);
            self.held.push_str(&self.tokenizer.decode(&[id], false)?);
            self.ids.clear();
            self.read = 0;
            return Ok(self.release());
        }
        self.ids.push(id);
        let before = self.tokenizer.decode(&self.ids[..self.read], true)?;
        let after = self.tokenizer.decode(&self.ids, true)?;
        if after.ends_with(REPLACEMENT) || after.len() <= before.len() {
            return Ok(String::new());
        }
        let new = after.strip_prefix(&before).unwrap_or_default().to_owned();
        self.ids.drain(..self.read);
        self.read = self.ids.len();
        self.held.push_str(&new);
        Ok(self.release())
    }

    /// The rest of the text, after the last token.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn finish(&mut self) -> Result<String, Error> {
        if self.stopped {
            return Ok(String::new());
        }
        let rest = self.rest()?;
        self.held.push_str(&rest);
        let certain = self.release();
        Ok(certain + &std::mem::take(&mut self.held))
    }

    /// The pending text if nothing follows.
    fn rest(&self) -> Result<String, Error> {
        let before = self.tokenizer.decode(&self.ids[..self.read], true)?;
        let after = self.tokenizer.decode(&self.ids, true)?;
        Ok(after.strip_prefix(&before).unwrap_or_default().to_owned())
    }

    /// Whether a stop string has been reached.
    pub fn has_stopped(&self) -> bool {
        self.stopped
    }

    /// Removes from `held` and returns what cannot belong to a stop string.
    fn release(&mut self) -> String {
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let may_begin = |&at: &usize| {
            let tail = &self.held[at..];
            self.stops.iter().any(|stop| stop.starts_with(tail))
        };
        let from = self.held.char_indices().map(|(at, _)| at).find(may_begin);
        let tail = self.held.split_off(from.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, tail)
    }
}

#[cfg(test)]
mod tests {
    use dflash_test_support::byte_tokenizer;

    use super::*;

    fn tokenizer() -> ChatTokenizer {
        let dir = tempfile::tempdir().unwrap();
        let json = byte_tokenizer(&["<|end|>"]).to_string();
        std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        ChatTokenizer::load(dir.path()).unwrap()
    }

    /// The pieces of `bytes`, one token each, with `|` between pieces; the rest follows `$`.
    fn check(bytes: &[u8], stops: &[&str], expect: &str) {
        let tokenizer = tokenizer();
        let mut stream = TextStream::new(&tokenizer, stops.iter().map(|s| s.to_string()).collect());
        let mut found = Vec::new();
        for &byte in bytes {
            found.push(stream.push(byte.into()).unwrap());
        }
        let text = format!("{}${}", found.join("|"), stream.finish().unwrap());
        assert_eq!(text, expect, "{bytes:?} {stops:?}");
    }

    #[test]
    fn characters_come_whole() {
        check(b"abc", &[], "a|b|c$");
        check("aé€b".as_bytes(), &[], "a||é|||€|b$");
        check("😀".as_bytes(), &[], "|||😀$");
        // Incomplete characters come at the end, as other decoders show them.
        check(&[b'a', 0xe2, 0x82], &[], "a||$\u{fffd}");
        check(&[0xff, b'a'], &[], "|\u{fffd}a$");
    }

    #[test]
    fn text_ends_before_a_stop_string_wherever_tokens_end() {
        check(b"one END two", &[" END"], "o|n|e||||||||$");
        check(b"xaab", &["aab"], "x|||$");
        check(b"xaaab", &["aab"], "x|||a|$");
    }

    #[test]
    fn what_only_looks_like_a_stop_string_comes_late_but_comes() {
        check(b"a EN!", &[" END"], "a|||| EN!$");
        check(b"a EN", &[" END"], "a|||$ EN");
        check(b"abcabd", &["abd", "zz"], "||abc|||$");
    }

    #[test]
    fn the_first_of_several_stop_strings_counts() {
        check(b"x1y2", &["y2", "1y"], "x|||$");
    }

    #[test]
    fn special_tokens_have_no_text() {
        let tokenizer = tokenizer();
        let mut stream = TextStream::new(&tokenizer, Vec::new());
        let ids = [97, 256, 98];
        let found: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert_eq!(found, ["a", "", "b"]);
        let mut showing = TextStream::new(&tokenizer, vec!["|>b".into()]).showing(vec![256]);
        let ids = [97, 0xe2, 256, 256, 98];
        let found: Vec<String> = ids.iter().map(|&id| showing.push(id).unwrap()).collect();
        assert_eq!(found, ["a", "", "\u{fffd}<|end", "|><|end", ""]);
        assert!(showing.has_stopped());
    }
}
