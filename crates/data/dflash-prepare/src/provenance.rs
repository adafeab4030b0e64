//! `dflash_prepare.json`: where a dataset comes from and what happened to the input.
//!
//! It names neither time nor host, so equal inputs give equal files.

use dflash_data::DatasetWriter;
use dflash_settings::PrepareSettings;
use serde_json::json;

use crate::model::Model;
use crate::outcome::Tally;
use crate::source::Source;

pub(crate) const FILE: &str = "dflash_prepare.json";

/// The file's content.
pub(crate) fn document(
    settings: &PrepareSettings,
    model: &Model,
    sources: &[Source],
    tally: &Tally,
    writer: &DatasetWriter,
) -> Vec<u8> {
    let written = writer.so_far();
    let mut document = json!({
        "format": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "target": settings.target(),
        "model_dir": model.dir,
        "prepared_for": model.identity,
        "vocab_size": model.vocab_size,
        "tokenizer_size": model.tokenizer.len(),
        "sources": sources,
        "seq_length": settings.seq_length,
        "minimum_valid_tokens": settings.minimum_valid_tokens,
        "limit": settings.limit,
        "shuffle_seed": settings.shuffle_seed,
        "chat_template_kwargs": settings.chat_template_kwargs,
        "rows_in": tally.rows_in,
        "rows": written.rows,
        "tokens": written.tokens,
        "supervised_tokens": written.supervised_tokens,
        "truncated": tally.truncated,
        "answers": tally.answers,
        "dropped": tally.dropped,
    });
    if !tally.turns_dropped.is_empty() {
        document["turns_dropped"] = json!(tally.turns_dropped);
    }
    if !tally.unknown_keys.is_empty() {
        document["unknown_keys"] = json!(tally.unknown_keys);
    }
    if !tally.unread_columns.is_empty() {
        document["unread_columns"] = json!(tally.unread_columns);
    }
    format!("{document:#}\n").into_bytes()
}
