//! `dflash_prepare.json`: where a dataset comes from and what became of the input.
//!
//! It holds no time of day and no host, so equal inputs give equal files.

use dflash_data::DatasetWriter;
use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::model::Model;
use crate::outcome::Tally;
use crate::source::Source;

/// The file's name.
pub(crate) const FILE: &str = "dflash_prepare.json";

/// The file's content.
pub(crate) fn document(
    config: &Config,
    model: &Model,
    sources: &[Source],
    tally: &Tally,
    writer: &DatasetWriter,
) -> Vec<u8> {
    let dropped: Map<String, Value> = tally
        .dropped
        .iter()
        .map(|(reason, (count, example))| {
            (reason.key().to_owned(), json!({"count": count, "first": example}))
        })
        .collect();
    let sources: Vec<Value> =
        sources.iter().map(|source| json!({"data": source.spec, "files": source.files})).collect();
    let document = json!({
        "format": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "model": config.model,
        "model_dir": model.dir,
        "vocab_size": model.vocab_size,
        "tokenizer_size": model.tokenizer.len(),
        "sources": sources,
        "seq_length": config.seq_length,
        "minimum_valid_tokens": config.minimum_valid_tokens,
        "limit": config.limit,
        "shuffle_seed": config.shuffle_seed,
        "template_variables": config.template_variables,
        "rows_in": tally.rows_in,
        "rows": writer.rows(),
        "tokens": writer.tokens(),
        "supervised_tokens": writer.supervised_tokens(),
        "truncated": tally.truncated,
        "dropped": dropped,
    });
    format!("{document:#}\n").into_bytes()
}
