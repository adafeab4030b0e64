//! A byte-level BPE tokenizer for the demo's target, written as Hugging Face files.

use std::path::Path;

use serde_json::json;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use crate::corpus::Exchange;
use crate::error::Error;

/// Padding; not the end token, so that neither can be mistaken for the other.
const PAD: &str = "<|endoftext|>";
const TURN_START: &str = "<|im_start|>";
/// Ends an assistant's turn.
const TURN_END: &str = "<|im_end|>";
/// The draft's mask: a row of the embedding that no text ever uses.
const MASK: &str = "<|mask|>";
/// Special tokens in the order of their ids, from 0.
const SPECIAL: [&str; 4] = [PAD, TURN_START, TURN_END, MASK];

/// Id of the token that ends a turn.
pub(crate) const END_ID: i64 = 2;
/// Id of the padding token.
pub(crate) const PAD_ID: i64 = 0;

/// ChatML without a default system turn.
const CHAT_TEMPLATE: &str = "{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
";

/// Trains a tokenizer of at most `vocab_size` entries on the corpus.
pub(crate) fn train(corpus: &[Vec<Exchange>], vocab_size: usize) -> Result<Tokenizer, Error> {
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(byte_level()));
    tokenizer.with_decoder(Some(byte_level()));
    let trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(SPECIAL.map(|text| AddedToken::from(text, true)).to_vec())
        .build();
    let texts = corpus.iter().flatten().flat_map(|turn| [&turn.question, &turn.answer]);
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts).map_err(failed)?;
    Ok(tokenizer)
}

fn failed(error: tokenizers::Error) -> Error {
    Error::Tokenizer { reason: error.to_string() }
}

/// No space is added before the first word: the template's text is used unchanged.
fn byte_level() -> ByteLevel {
    ByteLevel::default().add_prefix_space(false)
}

/// Writes `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and
/// `chat_template.jinja` into `dir`.
pub(crate) fn write(tokenizer: &Tokenizer, dir: &Path) -> Result<(), Error> {
    let text = tokenizer.to_string(true).map_err(failed)?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": false,
        "model_max_length": 2048,
    });
    let generation = json!({ "eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": false });
    let files = [
        ("tokenizer.json", text),
        ("tokenizer_config.json", format!("{config:#}\n")),
        ("generation_config.json", format!("{generation:#}\n")),
        ("chat_template.jinja", CHAT_TEMPLATE.to_owned()),
    ];
    for (name, text) in files {
        dflash_io::write_bytes(&dir.join(name), text.as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::{conversations, messages};
    use dflash_chat::ChatTokenizer;

    fn trained() -> ChatTokenizer {
        let dir = tempfile::tempdir().unwrap();
        write(&train(&conversations(200, 0), 600).unwrap(), dir.path()).unwrap();
        ChatTokenizer::load(dir.path()).unwrap()
    }

    #[test]
    fn two_trainings_give_the_same_file() {
        let text = || train(&conversations(100, 0), 400).unwrap().to_string(false).unwrap();
        assert_eq!(text(), text());
    }

    #[test]
    fn the_reserved_tokens_are_where_the_config_says() {
        let tokenizer = trained();
        let special = tokenizer.special_ids();
        assert_eq!((special.eos, special.pad, special.mask), (Some(END_ID), Some(PAD_ID), Some(3)));
        assert!(tokenizer.len() <= 600);
    }

    #[test]
    fn the_template_writes_chatml_and_text_survives_the_round_trip() {
        let tokenizer = trained();
        let messages = messages(&conversations(1, 7)[0]);
        let text = tokenizer.render(&messages, None, false).unwrap();
        assert!(text.starts_with("<|im_start|>user\n") && text.ends_with("<|im_end|>\n"), "{text}");
        let ids = tokenizer.encode(&text).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }

    #[test]
    fn the_prompt_is_a_prefix_of_the_whole() {
        let tokenizer = trained();
        let all = messages(&conversations(1, 7)[0]);
        let prompt = tokenizer.render_ids(&all[..1], None, true).unwrap();
        let whole = tokenizer.render_ids(&all[..2], None, false).unwrap();
        assert!(whole.starts_with(&prompt) && whole.contains(&END_ID));
    }
}
