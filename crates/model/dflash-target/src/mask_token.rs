//! Choice of the mask token, which fills the unknown slots of a block.
//!
//! It must be a meaningless row of the target's embedding, because serving engines look it up
//! there. Pad, end-of-text and unknown tokens have a meaning that the target learned, and a draft
//! trained with one of them proposes badly.

use dflash_tensor::{Error, Result};

/// Special tokens and size of a tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenizerFacts {
    /// Number of tokens including added ones, as Hugging Face's `len(tokenizer)`.
    pub len: i64,
    /// Token ids at or above `len`, if ids have gaps; ascending.
    pub beyond: Vec<i64>,
    /// The mask token, if there is one.
    pub mask: Option<i64>,
    /// The padding token.
    pub pad: Option<i64>,
    /// The end-of-text token.
    pub eos: Option<i64>,
    /// The unknown token.
    pub unk: Option<i64>,
    /// Tokens added to the vocabulary, with their ids.
    pub added: Vec<(i64, String)>,
}

/// Origin of a mask token id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskSource {
    /// Set by the user.
    Named,
    /// Stored in the draft that training starts from.
    Stored,
    /// The tokenizer's own mask token.
    Tokenizer,
    /// A row that the tokenizer does not use.
    FreeRow,
    /// All rows are used; this is a reserved token with that name.
    Reserved(String),
}

/// A mask token that engines accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskToken {
    /// Its id.
    pub id: i64,
    /// Its origin.
    pub source: MaskSource,
}

/// Name parts of reserved tokens: Llama 3 and 4 (`<|reserved_special_token_0|>`), gpt-oss
/// (`<|reserved_200000|>`), Gemma (`<unused0>`), Granite 4 (`<|unused_0|>`), Seed-OSS
/// (`<[PLHD0_never_used]>`), DeepSeek (`<｜place▁holder▁no▁0｜>`), Mistral and Nemotron
/// (`<SPECIAL_20>`), older Mistral (`[control_8]`), Phi-4 (`<|dummy_0|>`), Hunyuan, OLMo and T5
/// descendants (`<|extra_0|>`, `<|extra_id_0|>`, `<extra_id_0>`).
const SET_ASIDE: [&str; 9] = [
    "reserved",
    "unused",
    "never_used",
    "place\u{2581}holder",
    "special_",
    "control_",
    "dummy",
    "extra_id_",
    "extra_",
];

/// Chooses the mask token, in this order: the `named` one, the `stored` one of the initial draft,
/// the tokenizer's own, the first embedding row that the tokenizer does not use, the first reserved
/// token.
///
/// `embedding_rows` is the (padded) height of the target's embedding.
///
/// # Errors
/// The id is pad, eos or unk, is outside the embedding, or nothing is free. A stored id may be pad
/// or unk: published drafts have such ids and are served with them.
pub fn resolve_mask_token(
    named: Option<i64>,
    stored: Option<i64>,
    tokenizer: &TokenizerFacts,
    embedding_rows: i64,
) -> Result<MaskToken> {
    let free = || tokenizer.free_row().filter(|&id| id < embedding_rows);
    let found = named
        .map(|id| (id, MaskSource::Named))
        .or(stored.map(|id| (id, MaskSource::Stored)))
        .or(tokenizer.mask.map(|id| (id, MaskSource::Tokenizer)))
        .or_else(|| free().map(|id| (id, MaskSource::FreeRow)))
        .or_else(|| tokenizer.set_aside(embedding_rows));
    let (id, source) = found.ok_or(Error::NoMaskToken { rows: embedding_rows })?;
    let meaning = tokenizer.meaning(id);
    let objection = match source {
        _ if !(0..embedding_rows).contains(&id) => Some("is not a row of the target's embedding"),
        MaskSource::Stored if tokenizer.eos != Some(id) => None,
        _ => meaning,
    };
    match objection {
        Some(reason) => Err(Error::MaskToken { id, reason, rows: embedding_rows }),
        None => Ok(MaskToken { id, source }),
    }
}

impl TokenizerFacts {
    /// The first id from `len` on without a token.
    fn free_row(&self) -> Option<i64> {
        (self.len..).find(|id| self.beyond.binary_search(id).is_err())
    }

    /// The meaning of token `id`, if it has one.
    fn meaning(&self, id: i64) -> Option<&'static str> {
        let is = |special: Option<i64>| special == Some(id);
        match () {
            () if is(self.eos) => Some("is the end-of-text token"),
            () if is(self.pad) => Some("is the padding token"),
            () if is(self.unk) => Some("is the unknown token"),
            () => None,
        }
    }

    fn set_aside(&self, embedding_rows: i64) -> Option<(i64, MaskSource)> {
        let fits = |(id, name): &&(i64, String)| {
            let name = name.to_lowercase();
            // requires a number in the name: "extra_" alone may be anything
            let is_one = name.contains(|c: char| c.is_ascii_digit());
            let called = SET_ASIDE.iter().any(|part| name.contains(part));
            is_one && called && *id < embedding_rows && self.meaning(*id).is_none()
        };
        let first = self.added.iter().filter(fits).min_by_key(|(id, _)| *id)?;
        Some((first.0, MaskSource::Reserved(first.1.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> TokenizerFacts {
        let (mask, pad, eos, unk) = (Some(80), Some(1), Some(2), Some(3));
        TokenizerFacts { len: 90, mask, pad, eos, unk, ..TokenizerFacts::default() }
    }

    fn resolve(named: Option<i64>, facts: &TokenizerFacts, rows: i64) -> Result<i64> {
        Ok(resolve_mask_token(named, None, facts, rows)?.id)
    }

    #[test]
    fn the_first_source_that_names_one_wins() {
        let without_mask = TokenizerFacts { mask: None, ..facts() };
        assert_eq!(resolve(Some(7), &facts(), 100).unwrap(), 7);
        assert_eq!(resolve(None, &facts(), 100).unwrap(), 80);
        assert_eq!(resolve(None, &without_mask, 100).unwrap(), 90);
        let full = resolve(None, &without_mask, 90).unwrap_err().to_string();
        assert!(full.contains("--mask-token-id"), "{full}");
        let gaps = TokenizerFacts { beyond: vec![90, 91, 93], ..without_mask };
        assert_eq!(resolve(None, &gaps, 100).unwrap(), 92, "an id that no token has");
    }

    #[test]
    fn a_token_with_a_meaning_is_refused() {
        let message = |id| resolve(Some(id), &facts(), 100).unwrap_err().to_string();
        assert!(message(1).starts_with("mask token 1 is the padding token"));
        assert!(message(2).contains("end-of-text"));
        assert!(message(3).contains("unknown"));
        assert!(message(100).contains("not a row"));
        assert!(message(-1).contains("not a row"));
        let eos_as_mask = TokenizerFacts { mask: Some(2), ..facts() };
        assert!(resolve(None, &eos_as_mask, 100).is_err());
    }

    #[test]
    fn a_published_drafts_token_is_kept_though_it_has_another_name() {
        let stored = |id| resolve_mask_token(None, Some(id), &facts(), 100);
        assert_eq!(stored(3).unwrap(), MaskToken { id: 3, source: MaskSource::Stored });
        assert!(stored(2).unwrap_err().to_string().contains("end-of-text"));
        assert!(stored(100).unwrap_err().to_string().contains("not a row"));
    }

    /// A real tokenizer: name, embedding rows, number of tokens, pad, eos and unk, mask token,
    /// relevant added tokens, and the expected mask token.
    type Real<'a> =
        (&'a str, i64, i64, [Option<i64>; 3], Option<i64>, &'a [(i64, &'a str)], (i64, MaskSource));

    /// Ids of Qwen3, Qwen3.5, Gemma and gpt-oss come from z-lab's drafts; of Llama 3 from its
    /// tokenizer_config.json; of Llama 4 and Phi-4 from the special token lists of llama-models and
    /// torchtune; of Kimi from its config.json; of MiniMax from speculators' tests. The others come
    /// from their releases.
    #[test]
    #[expect(clippy::too_many_lines, reason = "it is a table")]
    fn real_tokenizers_have_a_mask_token_that_nothing_uses() {
        let reserved = |name: &str| MaskSource::Reserved(name.to_owned());
        let real: [Real<'_>; 15] = [
            // z-lab/Qwen3-8B-DFlash-b16 has 151669, z-lab/Qwen3.5-27B-DFlash 248077
            (
                "Qwen3",
                151_936,
                151_669,
                [Some(151_643), Some(151_645), None],
                None,
                &[],
                (151_669, MaskSource::FreeRow),
            ),
            (
                "Qwen3.5",
                248_320,
                248_077,
                [Some(248_044), Some(248_046), None],
                None,
                &[],
                (248_077, MaskSource::FreeRow),
            ),
            (
                "Llama 3",
                128_256,
                128_256,
                [None, Some(128_009), None],
                None,
                &[
                    (128_000, "<|begin_of_text|>"),
                    (128_001, "<|end_of_text|>"),
                    (128_002, "<|reserved_special_token_0|>"),
                    (128_009, "<|eot_id|>"),
                ],
                (128_002, reserved("<|reserved_special_token_0|>")),
            ),
            // fine-tunes that pad with it get the next one
            (
                "Llama 3, padded",
                128_256,
                128_256,
                [Some(128_002), Some(128_009), None],
                None,
                &[
                    (128_002, "<|reserved_special_token_0|>"),
                    (128_003, "<|reserved_special_token_1|>"),
                ],
                (128_003, reserved("<|reserved_special_token_1|>")),
            ),
            (
                "Llama 4",
                202_048,
                202_048,
                [Some(200_018), Some(200_008), None],
                None,
                &[(200_007, "<|eom|>"), (200_010, "<|text_post_train_reserved_special_token_0|>")],
                (200_010, reserved("<|text_post_train_reserved_special_token_0|>")),
            ),
            // z-lab/gemma-4-31B-it-DFlash has 4
            (
                "Gemma",
                262_144,
                262_144,
                [Some(0), Some(1), Some(3)],
                Some(4),
                &[(6, "<unused0>")],
                (4, MaskSource::Tokenizer),
            ),
            (
                "Gemma without <mask>",
                256_000,
                256_000,
                [Some(0), Some(1), Some(3)],
                None,
                &[(7, "<unused0>"), (106, "<start_of_turn>")],
                (7, reserved("<unused0>")),
            ),
            (
                "gpt-oss",
                201_088,
                200_019,
                [Some(199_999), Some(200_002), None],
                None,
                &[(200_000, "<|reserved_200000|>")],
                (200_019, MaskSource::FreeRow),
            ),
            (
                "DeepSeek V3",
                129_280,
                128_815,
                [Some(1), Some(1), None],
                None,
                &[(128_000, "<｜place▁holder▁no▁0｜>")],
                (128_815, MaskSource::FreeRow),
            ),
            // moonshotai/Kimi-K2.5: 163838 is [UNK], 163839 [PAD]
            (
                "Kimi",
                163_840,
                163_840,
                [Some(163_839), Some(163_586), Some(163_838)],
                None,
                &[
                    (163_584, "[BOS]"),
                    (163_586, "<|im_end|>"),
                    (163_589, "<|reserved_token_163589|>"),
                    (163_838, "[UNK]"),
                ],
                (163_589, reserved("<|reserved_token_163589|>")),
            ),
            (
                "GLM 4.5",
                151_552,
                151_365,
                [Some(151_329), Some(151_329), None],
                None,
                &[],
                (151_365, MaskSource::FreeRow),
            ),
            (
                "MiniMax M2",
                200_064,
                200_054,
                [None, Some(200_020), Some(200_021)],
                None,
                &[],
                (200_054, MaskSource::FreeRow),
            ),
            // torchtune's PHI4_SPECIAL_TOKENS
            (
                "Phi-4",
                100_352,
                100_352,
                [Some(100_257), Some(100_265), None],
                None,
                &[(100_256, "<|dummy_0|>"), (100_257, "<|endoftext|>"), (100_264, "<|im_start|>")],
                (100_256, reserved("<|dummy_0|>")),
            ),
            (
                "Phi-3",
                32_064,
                32_011,
                [Some(32_000), Some(32_000), Some(0)],
                None,
                &[],
                (32_011, MaskSource::FreeRow),
            ),
            (
                "Mistral tekken",
                131_072,
                131_072,
                [Some(11), Some(2), Some(0)],
                None,
                &[(0, "<unk>"), (2, "</s>"), (3, "[INST]"), (20, "<SPECIAL_20>")],
                (20, reserved("<SPECIAL_20>")),
            ),
        ];
        for (name, rows, len, [pad, eos, unk], mask, added, (id, source)) in real {
            let added = added.iter().map(|(id, name)| (*id, (*name).to_owned())).collect();
            let facts = TokenizerFacts { len, beyond: Vec::new(), mask, pad, eos, unk, added };
            let found = resolve_mask_token(None, None, &facts, rows).unwrap();
            assert_eq!(found, MaskToken { id, source }, "{name}");
        }
        // a number alone does not mark a reserved name, e.g. ERNIE's location tokens
        let added = vec![(90, "<|LOC_7|>".to_owned()), (95, "<unused3>".to_owned())];
        let places = TokenizerFacts { len: 100, added, ..TokenizerFacts::default() };
        assert_eq!(resolve(None, &places, 100).unwrap(), 95);
        // Llama 2 and the first Mistral: every row is a piece of text
        let full = TokenizerFacts { len: 32_000, eos: Some(2), ..TokenizerFacts::default() };
        let message = resolve(None, &full, 32_000).unwrap_err().to_string();
        assert!(message.contains("fills all 32000 rows"), "{message}");
    }
}
