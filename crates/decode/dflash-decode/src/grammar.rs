//! Grammar-constrained answers: which tokens may come next.
//!
//! A grammar is defined over bytes, and a token is allowed if its bytes can continue the text. All
//! tokens with the same spelling are allowed alike: nothing is forced, so the remaining target
//! distribution is just renormalised. End tokens are allowed where the grammar is complete.
//! llguidance does the parsing; its limits per grammar, state and position are bounded, since
//! grammars come from clients.

use std::fmt;
use std::sync::Arc;

use dflash_chat::{ChatTokenizer, TokenUse};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use tch::Tensor;

use crate::Error;

/// Maximum lexer states of a grammar, one or two kilobytes each. Schemas with hundreds of fields
/// have some thousands.
const MOST_STATES: usize = 20_000;
/// Maximum symbols of a grammar.
const MOST_SYMBOLS: usize = 100_000;
/// Maximum bytes of a token under a grammar; longer tokens are runs of whitespace.
const LONGEST_TOKEN: usize = 256;
/// Whitespace between JSON tokens. Without a bound an undecided model emits it forever.
const BLANKS: &str = r"[\x20\x0A\x0D\x09]{1,32}";
/// Maximum length of a reason in characters.
const LONGEST_REASON: usize = 400;

/// Source of a grammar.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// JSON that satisfies a schema.
    JsonSchema(Value),
    /// llguidance's variant of Lark.
    Lark(String),
}

/// A target's vocabulary as grammars need it. Built once for all grammars.
pub struct GrammarVocabulary {
    factory: ParserFactory,
}

/// A grammar with the state of one answer.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
}

/// The tokens that may come next.
pub(crate) struct AllowedTokens(SimpleVob);

impl GrammarSource {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(json!({"type": "object"}))
    }

    /// A JSON schema as a part of a Lark grammar.
    pub fn json_literal(schema: &Value) -> String {
        format!("%json {}", bounded(schema))
    }

    fn top_level(&self) -> TopLevelGrammar {
        match self {
            Self::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            Self::JsonSchema(schema) => TopLevelGrammar::from_json_schema(bounded(schema)),
        }
    }
}

/// The schema with bounded whitespace.
fn bounded(schema: &Value) -> Value {
    let mut schema = match schema {
        // Accepts any JSON and has no place for options.
        Value::Bool(true) => json!({}),
        schema => schema.clone(),
    };
    if let Some(fields) = schema.as_object_mut() {
        fields.insert("x-guidance".into(), json!({"whitespace_pattern": BLANKS}));
    }
    schema
}

impl GrammarVocabulary {
    /// The vocabulary of a target with `rows` embedding rows and the end tokens `end_ids`.
    ///
    /// # Errors
    /// [`Error::UnknownSpelling`], [`Error::NoEndToken`]; [`Error::Grammar`] from llguidance.
    pub fn new(tokenizer: &ChatTokenizer, rows: i64, end_ids: &[i64]) -> Result<Self, Error> {
        if !tokenizer.spells_bytes() {
            return Err(Error::UnknownSpelling);
        }
        let rows = u32::try_from(rows).expect("a vocabulary has fewer than four billion rows");
        let ends = end_ids.iter().filter_map(|&id| u32::try_from(id).ok());
        let mut ends: Vec<u32> = ends.filter(|&id| id < rows).collect();
        ends.sort_unstable();
        ends.dedup();
        let Some(&first_end) = ends.first() else { return Err(Error::NoEndToken) };
        let word = |id: u32| match ends.contains(&id) {
            true => marked(&format!("<end {id}>")),
            false => word(tokenizer, id),
        };
        let words: Vec<Vec<u8>> = (0..rows).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(rows, first_end), &words).with_eos_tokens(&ends);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&tokens).map_err(|error| refused(&error))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: MOST_STATES,
            max_grammar_size: MOST_SYMBOLS,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Self { factory })
    }

    /// Compiles a grammar. A hostile source can take seconds and much stack, and far more if a
    /// string must match a dozen patterns at once or a number must be a multiple of a large one.
    ///
    /// # Errors
    /// [`Error::Grammar`]: a source that does not parse, is too large, or cannot be satisfied.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, Error> {
        let parser = self.factory.create_parser(source.top_level());
        let mut matcher = Matcher::new(Ok(parser.map_err(|error| refused(&error))?));
        // Report grammars that are too large right away.
        matcher.compute_mask().map_err(|error| refused(&error))?;
        Ok(Grammar { matcher })
    }
}

/// The bytes of a token; empty if no answer may contain it. A byte that never occurs in text marks
/// special tokens.
fn word(tokenizer: &ChatTokenizer, id: u32) -> Vec<u8> {
    match tokenizer.token(id) {
        Some((name, TokenUse::Special)) => marked(&name),
        Some(_) => {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            if bytes.len() > LONGEST_TOKEN { Vec::new() } else { bytes }
        }
        None => Vec::new(),
    }
}

fn marked(name: &str) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
}

/// llguidance's message without its internal state.
fn refused(error: &dyn fmt::Display) -> Error {
    let words = format!("{error:#}");
    let words = words.split("\n<").next().unwrap_or_default().replace('\n', " ");
    Error::Grammar { reason: words.chars().take(LONGEST_REASON).collect() }
}

impl Grammar {
    /// The tokens allowed next, and after each of `proposed` as long as those are allowed and not
    /// in `ends`; nothing follows others. Fewer rows after a failure.
    pub(crate) fn allowed(&mut self, proposed: &[i64], ends: &[i64]) -> Vec<AllowedTokens> {
        let (mut rows, mut taken) = (Vec::new(), 0);
        while let Ok(allowed) = self.matcher.compute_mask_or_eos() {
            let allowed = AllowedTokens(allowed);
            let goes_on = |id: &&i64| allowed.has(**id) && !ends.contains(*id);
            let next = proposed.get(rows.len()).filter(goes_on).copied();
            rows.push(allowed);
            let Some(next) = next else { break };
            if self.matcher.consume_token(next as u32).is_err() {
                break;
            }
            taken += 1;
        }
        // This fails only after an earlier failure.
        let _ = self.matcher.rollback(taken);
        rows
    }

    /// Appends `tokens` to the answer.
    pub(crate) fn take(&mut self, tokens: &[u32]) {
        // A failure persists and is reported at the next position.
        let _ = self.matcher.consume_tokens(tokens);
    }

    /// Whether a limit was reached, so that the allowed tokens are unknown.
    pub(crate) fn has_failed(&self) -> bool {
        self.matcher.is_error()
    }
}

impl AllowedTokens {
    fn has(&self, id: i64) -> bool {
        u32::try_from(id).is_ok_and(|id| (id as usize) < self.0.len() && self.0.is_allowed(id))
    }

    /// Whether only tokens in `ends` are allowed.
    pub(crate) fn is_end(&self, ends: &[i64]) -> bool {
        self.0.iter().all(|id| ends.contains(&i64::from(id)))
    }

    /// Sets the logits `[V]` of all other tokens to minus infinity.
    pub(crate) fn forbid_others(&self, logits_v: &Tensor) {
        let forbidden: Vec<bool> = (0..logits_v.size()[0]).map(|id| !self.has(id)).collect();
        let forbidden_v = Tensor::from_slice(&forbidden).to_device(logits_v.device());
        let _ = logits_v.shallow_clone().masked_fill_(&forbidden_v, f64::NEG_INFINITY);
    }
}

impl fmt::Debug for GrammarVocabulary {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("GrammarVocabulary").finish_non_exhaustive()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Grammar").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use dflash_test_support::byte_tokenizer;

    use super::*;

    /// The 256 bytes, the special token `<|end|>`, a word and the special token `<|tool|>`.
    fn tokenizer() -> ChatTokenizer {
        let dir = tempfile::tempdir().unwrap();
        let mut json = byte_tokenizer(&["<|end|>"]);
        let added = json["added_tokens"].as_array_mut().unwrap();
        added.push(dflash_test_support::added_token(257, "red", false));
        added.push(dflash_test_support::added_token(258, "<|tool|>", true));
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        ChatTokenizer::load(dir.path()).unwrap()
    }

    fn vocabulary() -> GrammarVocabulary {
        GrammarVocabulary::new(&tokenizer(), 262, &[256, 256]).unwrap()
    }

    /// The ids allowed after `text`, and whether it can end there.
    fn next(grammar: &mut Grammar, text: &str) -> Vec<i64> {
        let ids: Vec<i64> = text.bytes().map(i64::from).collect();
        let rows = grammar.allowed(&ids, &[256]);
        assert_eq!(rows.len(), ids.len() + 1, "{text} is not allowed");
        (0..262).filter(|&id| rows[ids.len()].has(id)).collect()
    }

    #[test]
    fn tokens_are_allowed_by_their_bytes() {
        let source = GrammarSource::JsonSchema(json!({"enum": ["red", "rose"]}));
        let mut grammar = vocabulary().compile(&source).unwrap();
        assert_eq!(next(&mut grammar, ""), [i64::from(b'"')]);
        // The letter, and the token for the whole word; neither `rose` nor unused rows.
        assert_eq!(next(&mut grammar, "\""), [i64::from(b'r'), 257]);
        assert_eq!(next(&mut grammar, "\"r"), [i64::from(b'e'), i64::from(b'o')]);
        // Looking ahead has no effect.
        assert_eq!(next(&mut grammar, ""), [i64::from(b'"')]);
        grammar.take(&[b'"'.into(), 257, b'"'.into()]);
        let last = &grammar.allowed(&[], &[256])[0];
        assert!(last.has(256) && !grammar.has_failed());
    }

    #[test]
    fn nothing_is_asked_behind_what_cannot_stand() {
        let source = GrammarSource::JsonSchema(json!({"const": 12}));
        let mut grammar = vocabulary().compile(&source).unwrap();
        let ids = |text: &str| text.bytes().map(i64::from).collect::<Vec<i64>>();
        assert_eq!(grammar.allowed(&ids("13 "), &[256]).len(), 2);
        assert_eq!(grammar.allowed(&[i64::from(b'1'), 261], &[256]).len(), 2);
        let rows = grammar.allowed(&[ids("12"), vec![256, 49]].concat(), &[256]);
        assert_eq!(rows.len(), 3);
        assert!(rows[2].has(256) && !rows[1].is_end(&[256]));
        // Looking ahead to an end has no effect either.
        assert_eq!(next(&mut grammar, ""), [i64::from(b'1')]);
        assert!(!grammar.has_failed());
    }

    #[test]
    fn marks_come_only_where_the_grammar_names_them() {
        let mut any = vocabulary().compile(&GrammarSource::Lark("start: /.{3}/".into())).unwrap();
        assert!(!next(&mut any, "").contains(&258));
        let named = GrammarSource::Lark("start: <|tool|> \"x\"".into());
        let mut named = vocabulary().compile(&named).unwrap();
        assert_eq!(next(&mut named, ""), [258]);
    }

    #[test]
    fn what_cannot_be_followed_is_refused_with_the_reason() {
        let vocabulary = vocabulary();
        let check = |source: GrammarSource, words: &str| {
            let error = vocabulary.compile(&source).unwrap_err().to_string();
            assert!(error.contains(words) && error.len() < 500, "{source:?}: {error}");
        };
        let schema = |schema: Value| GrammarSource::JsonSchema(schema);
        check(schema(json!({"type": "strin"})), "strin");
        check(schema(json!("text")), "object");
        check(schema(json!(false)), "false");
        check(schema(json!({"type": "string", "pattern": "("})), "");
        check(schema(json!({"$ref": "#/$defs/none"})), "none");
        check(GrammarSource::Lark("start: nothing".into()), "nothing");
    }

    #[test]
    fn hostile_sources_are_bounded() {
        let vocabulary = vocabulary();
        let nested = (0..100).fold(json!({}), |schema, _| json!({"items": schema}));
        let wide = json!({"enum": (0..5000).map(|n| format!("v{n}")).collect::<Vec<_>>()});
        let doubling: serde_json::Map<String, Value> = (0..40)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
                (format!("d{n}"), json!({"allOf": [next.clone(), next]}))
            })
            .chain([("d40".to_owned(), json!({"type": "object"}))])
            .collect();
        let doubling = json!({"$ref": "#/$defs/d0", "$defs": doubling});
        let repeated = json!({"type": "string", "pattern": "((a{1,999}){1,999}){1,999}"});
        for schema in [nested, wide, doubling, repeated] {
            let began = std::time::Instant::now();
            let made = vocabulary.compile(&GrammarSource::JsonSchema(schema.clone()));
            println!("{:?} {:?}", began.elapsed(), made.as_ref().err().map(Error::to_string));
            assert!(began.elapsed().as_secs() < 10, "{schema}");
        }
    }

    #[test]
    fn runs_of_blanks_end() {
        let mut grammar = vocabulary().compile(&GrammarSource::json_object()).unwrap();
        let blank = |text: String, grammar: &mut Grammar| next(grammar, &text).contains(&32);
        assert!(blank("{".into(), &mut grammar));
        assert!(!blank(format!("{{{}", " ".repeat(32)), &mut grammar));
    }
}
