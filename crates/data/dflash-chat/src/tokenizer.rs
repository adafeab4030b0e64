//! A model's tokenizer with its chat template.

mod segments;
mod special;
mod spelling;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use crate::error::Error;
use crate::message::Message;
use crate::template::{ChatTemplate, read_optional};

pub use segments::SegmentCache;
use segments::Segmenter;
pub use special::SpecialIds;
use spelling::Spelling;

/// A text of fewer bytes is always encoded whole.
const LONG_TEXT: usize = 1 << 18;
/// Bytes per token beyond which a text is long: eight times the average of English.
const LONG_TOKEN: usize = 32;
/// Tokens before a cut that the text after it might have changed: words of any language end well
/// within them.
const UNSURE_TOKENS: usize = 1024;

/// The ids of a text, or of its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// The ids.
    pub ids: Vec<i64>,
    /// Whether the text continues after them.
    pub is_cut: bool,
}

/// The kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenUse {
    /// A piece of text.
    Text,
    /// Text that was added to the vocabulary as a whole.
    Added,
    /// A marker that is not text.
    Special,
}

/// The tokenizer and chat template of a model directory. Cheap to share between threads.
#[derive(Debug)]
pub struct ChatTokenizer {
    tokenizer: Tokenizer,
    /// Without a template a model can still encode; only rendering needs one.
    template: Option<ChatTemplate>,
    segmenter: Option<Segmenter>,
    special: SpecialIds,
    /// All tokens that are marked special.
    specials: HashSet<i64>,
    /// Where the model's configurations stop generation.
    ends: Vec<i64>,
    /// How tokens spell their bytes, if that is known.
    spelling: Option<Spelling>,
    dir: PathBuf,
}

impl ChatTokenizer {
    /// Loads `tokenizer.json`, `tokenizer_config.json` (or `special_tokens_map.json`) and the
    /// chat template from a Hugging Face model directory. A missing template is reported by
    /// [`Self::render`], not here: pre-tokenized data needs none.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], [`Error::BadTokenizer`], [`Error::ModelJson`],
    /// [`Error::BadTemplate`], [`Error::Read`].
    pub fn load(model_dir: &Path) -> Result<Self, Error> {
        let path = model_dir.join("tokenizer.json");
        let text =
            read_optional(&path)?.ok_or_else(|| Error::NoTokenizer { dir: model_dir.into() })?;
        let bad = |reason: String| Error::BadTokenizer { path: path.clone(), reason };
        let mut tokenizer = Tokenizer::from_bytes(&text).map_err(|error| bad(error.to_string()))?;
        // Transformers switches both off when it encodes a rendered template.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| bad(error.to_string()))?;
        let config = read_config(model_dir)?;
        special::add_missing_tokens(&mut tokenizer, &config);
        let variables = special::template_variables(&config);
        let template = match ChatTemplate::load(model_dir, variables) {
            Ok(template) => Some(template),
            Err(Error::NoTemplate { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(Self {
            segmenter: Segmenter::new(&tokenizer),
            special: SpecialIds::find(&tokenizer, &config),
            specials: special::special_tokens(&tokenizer),
            ends: end_ids(model_dir)?,
            spelling: Spelling::of(&tokenizer),
            template,
            tokenizer,
            dir: model_dir.into(),
        })
    }

    /// Adds or replaces variables of the chat template, such as `enable_thinking`. `tools` is a list
    /// for the conversations that have none of their own.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], [`Error::ReservedVariable`], [`Error::FieldType`].
    pub fn extend_template_variables(
        &mut self,
        variables: impl IntoIterator<Item = (String, Value)>,
    ) -> Result<(), Error> {
        let missing = Error::NoTemplate { dir: self.dir.clone() };
        self.template.as_mut().ok_or(missing)?.extend_variables(variables)
    }

    /// Renders a conversation to text through the chat template. `tools` is a list of JSON
    /// schemas; `add_generation_prompt` ends the text where the model's answer starts.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], or [`Error::Render`] with the template's own message.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        self.render_with(messages, tools, add_generation_prompt, &Map::new())
    }

    /// [`Self::render`] with more variables for the template, such as `enable_thinking`, which
    /// override its constant ones.
    ///
    /// # Errors
    /// As [`Self::render`] and [`Self::extend_template_variables`].
    pub fn render_with(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, Error> {
        let missing = || Error::NoTemplate { dir: self.dir.clone() };
        let template = self.template.as_ref().ok_or_else(missing)?;
        template.render(messages, tools, add_generation_prompt, variables)
    }

    /// The chat templates by name; none for a model without one.
    pub fn template_sources(&self) -> &[(String, String)] {
        self.template.as_ref().map_or(&[], ChatTemplate::sources)
    }

    /// Token ids of `text`; special tokens written in it are recognised, none are added.
    ///
    /// # Errors
    /// [`Error::Tokenize`].
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, Error> {
        segments::encode_whole(&self.tokenizer, text)
    }

    /// The same ids as [`Self::encode`], but each stretch of text between two special tokens is
    /// encoded only once while `cache` remembers it. The renders of one conversation share nearly
    /// all their stretches.
    ///
    /// # Errors
    /// [`Error::Tokenize`].
    pub fn encode_cached(&self, text: &str, cache: &mut SegmentCache) -> Result<Vec<i64>, Error> {
        match &self.segmenter {
            Some(segmenter) => segmenter.encode(&self.tokenizer, text, cache),
            None => self.encode(text),
        }
    }

    /// The ids of `text` as [`Self::encode_cached`] returns them, but only the first `most` of a
    /// text far longer than `most` tokens: encoding takes some 140 times the memory of its text,
    /// and the rest is not needed.
    ///
    /// # Errors
    /// [`Error::Tokenize`].
    pub fn encode_start(
        &self,
        text: &str,
        most: usize,
        cache: &mut SegmentCache,
    ) -> Result<Start, Error> {
        let mut bytes = most.saturating_mul(LONG_TOKEN).max(LONG_TEXT);
        while bytes < text.len() {
            let head = &text[..text.floor_char_boundary(bytes)];
            let mut ids = self.encode_cached(head, cache)?;
            if ids.len() >= most.saturating_add(UNSURE_TOKENS) {
                ids.truncate(most);
                return Ok(Start { ids, is_cut: true });
            }
            bytes = bytes.saturating_mul(4);
        }
        Ok(Start { ids: self.encode_cached(text, cache)?, is_cut: false })
    }

    /// [`Self::render`] followed by [`Self::encode`].
    ///
    /// # Errors
    /// As those two.
    pub fn render_ids(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Vec<i64>, Error> {
        self.encode(&self.render(messages, tools, add_generation_prompt)?)
    }

    /// The text of `ids`; ids outside the vocabulary have none. `skip_special` drops special
    /// tokens.
    ///
    /// # Errors
    /// [`Error::Tokenize`].
    pub fn decode(&self, ids: &[i64], skip_special: bool) -> Result<String, Error> {
        let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        self.tokenizer
            .decode(&ids, skip_special)
            .map_err(|error| Error::Tokenize { reason: error.to_string() })
    }

    /// Entries of the vocabulary, added tokens included: `len(tokenizer)` of Transformers. A
    /// model's embedding may have more rows.
    pub fn len(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// The token `id` as the vocabulary spells it, and its kind; `None` for an id without a token.
    pub fn token(&self, id: u32) -> Option<(String, TokenUse)> {
        let spelling = self.tokenizer.id_to_token(id)?;
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        Some((
            spelling,
            match added {
                Some(token) if token.special => TokenUse::Special,
                Some(_) => TokenUse::Added,
                None => TokenUse::Text,
            },
        ))
    }

    /// The bytes that a token adds to a text, which may be part of a character; `None` for markers
    /// that are not text, for ids without a token, and if it is not known how tokens spell their
    /// bytes.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        match self.token(id)? {
            (_, TokenUse::Special) => None,
            (content, TokenUse::Added) => Some(content.into_bytes()),
            (spelling, TokenUse::Text) => self.spelling?.bytes(&spelling),
        }
    }

    /// Whether it is known how tokens spell their bytes.
    pub fn spells_bytes(&self) -> bool {
        self.spelling.is_some()
    }

    /// The tokens that were added to the vocabulary, special ones and others.
    pub fn added(&self) -> Vec<(i64, String)> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let mut added: Vec<(i64, String)> =
            added.into_iter().map(|(id, token)| (id.into(), token.content)).collect();
        added.sort_unstable();
        added
    }

    /// Whether the vocabulary is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids of the special tokens that the tokenizer's configuration names.
    pub fn special_ids(&self) -> SpecialIds {
        self.special
    }

    /// Whether a token is marked special: a template's markers are, text never is.
    pub fn is_special(&self, id: i64) -> bool {
        self.specials.contains(&id)
    }

    /// Whether generation stops at a token: `eos_token` of the tokenizer, or `eos_token_id` of
    /// `generation_config.json` or `config.json`.
    pub fn ends_answers(&self, id: i64) -> bool {
        self.special.eos == Some(id) || self.ends.contains(&id)
    }
}

/// The information in tokenizer_config.json of `dir` about a tokenizer without tokenizer.json, for
/// a model of `rows` rows: ids of special tokens with a role, and the added tokens. Kimi's
/// tokenizer names every row after the first added token `<|reserved_token_ID|>` unless the file
/// names it.
///
/// # Errors
/// [`Error::NoTokenizer`] if there is no such file, [`Error::ModelJson`], [`Error::Read`].
pub fn added_tokens(dir: &Path, rows: i64) -> Result<(SpecialIds, Vec<(i64, String)>), Error> {
    let config = read_config(dir)?;
    let named = special::decoder_tokens(&config);
    let Some(&first) = named.keys().next() else {
        return Err(Error::NoTokenizer { dir: dir.into() });
    };
    let is_tiktoken =
        config.get("tokenizer_class").and_then(Value::as_str) == Some("TikTokenTokenizer");
    let added = (first..rows).filter_map(|id| match named.get(&id) {
        Some(name) => Some((id, name.clone())),
        None => is_tiktoken.then(|| (id, format!("<|reserved_token_{id}|>"))),
    });
    Ok((SpecialIds::of_config(&config, &named), added.collect()))
}

/// `eos_token_id`, a number or a list of them, of the model's configurations.
fn end_ids(dir: &Path) -> Result<Vec<i64>, Error> {
    let mut ids = Vec::new();
    for file in ["generation_config.json", "config.json"] {
        let path = dir.join(file);
        let Some(text) = read_optional(&path)? else { continue };
        let config: Value =
            serde_json::from_str(&text).map_err(|source| Error::ModelJson { path, source })?;
        for value in [&config["eos_token_id"], &config["text_config"]["eos_token_id"]] {
            ids.extend(value.as_i64());
            ids.extend(value.as_array().into_iter().flatten().filter_map(Value::as_i64));
        }
    }
    Ok(ids)
}

fn read_config(dir: &Path) -> Result<Map<String, Value>, Error> {
    let mut merged = Map::new();
    // The older file fills in what the newer one lacks.
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let path = dir.join(file);
        let Some(text) = read_optional(&path)? else { continue };
        let object: Map<String, Value> =
            serde_json::from_str(&text).map_err(|source| Error::ModelJson { path, source })?;
        for (key, value) in object {
            merged.entry(key).or_insert(value);
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use dflash_test_support::{Rng, added_token, byte_tokenizer, random};
    use serde_json::json;

    use super::*;

    fn segmenter(json: &Value) -> (Tokenizer, Option<Segmenter>) {
        let tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
        let segmenter = Segmenter::new(&tokenizer);
        (tokenizer, segmenter)
    }

    #[test]
    fn cached_encoding_equals_encoding() {
        let (tokenizer, segmenter) = segmenter(&byte_tokenizer(&["<|a|>", "<|a|>b"]));
        let segmenter = segmenter.unwrap();
        let mut cache = SegmentCache::default();
        for text in ["", "<|a|>", "x<|a|>bc<|a|>é\n", "x<|a|>bc<|a|>é\n", "<|a", "  <|a|>  "] {
            let cached = segmenter.encode(&tokenizer, text, &mut cache).unwrap();
            assert_eq!(cached, segments::encode_whole(&tokenizer, text).unwrap(), "{text:?}");
        }
    }

    /// Random texts over letters, blanks and (halves of) special tokens, through tokenizers that
    /// normalize, or prepend to every stretch.
    #[test]
    fn cached_encoding_equals_encoding_on_random_texts() {
        let pieces = ["<|a|>", "<|b|>", "<|a", "|>", " ", "\n", "é", "word", "Ａ", "e\u{301}"];
        let mut plain = byte_tokenizer(&["<|a|>", "<|b|>"]);
        plain["added_tokens"].as_array_mut().unwrap().push(added_token(258, "word", false));
        let mut normalizing = plain.clone();
        normalizing["normalizer"] = json!({"type": "NFKC"});
        let mut prepending = plain.clone();
        prepending["pre_tokenizer"]["add_prefix_space"] = json!(true);
        for json in [plain, normalizing, prepending] {
            let (tokenizer, segmenter) = segmenter(&json);
            let segmenter = segmenter.unwrap();
            let mut cache = SegmentCache::default();
            let mut random = random();
            for _ in 0..300 {
                let draw = |_| pieces[random.random_range(0..pieces.len())];
                let text: String = (0..12).map(draw).collect();
                let cached = segmenter.encode(&tokenizer, &text, &mut cache).unwrap();
                assert_eq!(cached, segments::encode_whole(&tokenizer, &text).unwrap(), "{text}");
            }
        }
    }

    #[test]
    fn only_the_start_of_a_long_text_is_encoded() {
        let dir = tempfile::tempdir().unwrap();
        let json = byte_tokenizer(&["<|a|>"]).to_string();
        std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
        let mut cache = SegmentCache::default();
        let mut start = |text: &str, most| tokenizer.encode_start(text, most, &mut cache).unwrap();
        let long = "é <|a|>x".repeat(LONG_TEXT / 8);
        let whole = tokenizer.encode(&long).unwrap();
        assert_eq!(start(&long, 100), Start { ids: whole[..100].to_vec(), is_cut: true });
        // As many tokens are requested as the text has, so it does not count as long.
        assert_eq!(start(&long, whole.len()), Start { ids: whole.clone(), is_cut: false });
        assert_eq!(
            start("x<|a|>", 1),
            Start { ids: tokenizer.encode("x<|a|>").unwrap(), is_cut: false }
        );
        assert_eq!(start(&long, usize::MAX), Start { ids: whole, is_cut: false });
    }

    #[test]
    fn position_dependent_tokenizers_are_not_cut() {
        let plain = byte_tokenizer(&["<|a|>"]);
        assert!(segmenter(&plain).1.is_some());
        let mut first = plain.clone();
        first["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "▁",
            "prepend_scheme": "first", "split": true});
        let mut stripping = plain;
        stripping["added_tokens"][0]["rstrip"] = json!(true);
        assert!(segmenter(&first).1.is_none() && segmenter(&stripping).1.is_none());
    }
}
