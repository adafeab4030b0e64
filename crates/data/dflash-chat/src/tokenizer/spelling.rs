//! The bytes that a token stands for, by how its vocabulary spells it.

use serde_json::Value;
use tokenizers::Tokenizer;

/// The blank in SentencePiece vocabularies.
const BLANK: char = '\u{2581}';

/// The two families of spellings, told apart by the tokenizer's decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2's: each byte is a letter, its own if it is printable and otherwise one above the
    /// 255th.
    ByteLevel,
    /// SentencePiece's: text with U+2581 for a blank, and `<0xE2>` for a byte if there is a byte
    /// fallback.
    Pieces { falls_back: bool },
}

impl Spelling {
    /// `None` for other kinds: WordPiece, and decoders that join words with blanks.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let decoder = serde_json::to_value(tokenizer.get_decoder()?).ok()?;
        let steps = match &decoder["decoders"] {
            Value::Array(steps) => steps.as_slice(),
            _ => std::slice::from_ref(&decoder),
        };
        let has = |kind: &str| steps.iter().any(|step| step["type"] == kind);
        let gives_blanks = |step: &Value| {
            step["type"] == "Replace" && step["pattern"]["String"] == BLANK.to_string()
        };
        if has("ByteLevel") {
            return Some(Self::ByteLevel);
        }
        let falls_back = has("ByteFallback");
        let is_pieces = falls_back || has("Metaspace") || steps.iter().any(gives_blanks);
        is_pieces.then_some(Self::Pieces { falls_back })
    }

    /// `None` for a spelling without bytes.
    pub(super) fn bytes(self, spelling: &str) -> Option<Vec<u8>> {
        match self {
            Self::ByteLevel => spelling.chars().map(byte_of_letter).collect(),
            Self::Pieces { falls_back } => {
                let byte = fallback_byte(spelling).filter(|_| falls_back);
                let text = || spelling.replace(BLANK, " ").into_bytes();
                Some(byte.map_or_else(text, |byte| vec![byte]))
            }
        }
    }
}

/// The byte of `<0xE2>`.
fn fallback_byte(spelling: &str) -> Option<u8> {
    let hex = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 2)
}

/// The byte of a letter of GPT-2's byte-level vocabularies.
fn byte_of_letter(letter: char) -> Option<u8> {
    let is_own = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(letter) {
        code @ 0..256 => Some(code as u8).filter(is_own),
        code => (0..=u8::MAX).filter(|byte| !is_own(byte)).nth((code - 256) as usize),
    }
}

#[cfg(test)]
mod tests {
    use dflash_test_support::byte_tokenizer;
    use serde_json::json;

    use super::*;

    #[test]
    fn spellings_stand_for_bytes() {
        let check = |spelling: Spelling, token: &str, expect: Option<&[u8]>| {
            assert_eq!(spelling.bytes(token).as_deref(), expect, "{spelling:?} {token}");
        };
        let pieces = Spelling::Pieces { falls_back: true };
        check(pieces, "<0xE2>", Some(&[0xe2]));
        check(pieces, "<0xE21>", Some(b"<0xE21>"));
        check(Spelling::Pieces { falls_back: false }, "<0xE2>", Some(b"<0xE2>"));
        check(pieces, "\u{2581}a\u{2581}\u{e9}", Some(" a \u{e9}".as_bytes()));
        let letters = Spelling::ByteLevel;
        check(letters, "abc", Some(b"abc"));
        check(letters, "<0xE2>", Some(b"<0xE2>"));
        // A blank, a newline, and the three bytes of the euro sign.
        check(letters, "\u{120}a", Some(b" a"));
        check(letters, "\u{10a}", Some(b"\n"));
        check(letters, "\u{e2}\u{124}\u{ac}", Some(&[0xe2, 0x82, 0xac]));
        check(letters, "\u{143}", Some(&[0xad]));
        check(letters, "\u{2581}a", None);
    }

    #[test]
    fn the_decoder_tells_the_spelling() {
        let check = |decoder: Value, expect: Option<Spelling>| {
            let mut json = byte_tokenizer(&[]);
            json["decoder"] = decoder.clone();
            let tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
            assert_eq!(Spelling::of(&tokenizer), expect, "{decoder}");
        };
        check(byte_tokenizer(&[])["decoder"].clone(), Some(Spelling::ByteLevel));
        let blanks = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
        let llama = [blanks.clone(), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
        let pieces = |falls_back| Some(Spelling::Pieces { falls_back });
        check(json!({"type": "Sequence", "decoders": llama}), pieces(true));
        check(blanks, pieces(false));
        let metaspace = json!({"type": "Metaspace", "replacement": "\u{2581}",
            "prepend_scheme": "always", "split": true});
        check(metaspace, pieces(false));
        check(json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), None);
        check(Value::Null, None);
    }
}
