//! The metadata files that make a directory a Hugging Face dataset.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema};
use serde_json::{Value, json};

/// The features as `datasets` 2 to 5 read them. `Sequence` is the older name of `List`, which
/// versions before 4 do not support and later ones still accept.
fn features() -> Value {
    let list =
        |dtype: &str| json!({"feature": {"dtype": dtype, "_type": "Value"}, "_type": "Sequence"});
    json!({
        "input_ids": list("int32"),
        "loss_mask": list("int64"),
        "seq_len": {"dtype": "int64", "_type": "Value"},
    })
}

/// The Arrow schema, with the features in its metadata.
pub(super) fn schema() -> Schema {
    let list = |name: &str, item: DataType| {
        Field::new(name, DataType::List(Arc::new(Field::new("item", item, true))), true)
    };
    let features = json!({"info": {"features": features()}}).to_string();
    Schema::new_with_metadata(
        vec![
            list("input_ids", DataType::Int32),
            list("loss_mask", DataType::Int64),
            Field::new("seq_len", DataType::Int64, true),
        ],
        HashMap::from([("huggingface".to_owned(), features)]),
    )
}

pub(super) fn dataset_info() -> String {
    let info = json!({
        "citation": "", "description": "", "features": features(), "homepage": "", "license": "",
    });
    format!("{info:#}\n")
}

/// `state.json`: the shards in order, read as tensors by default.
pub(super) fn state(shards: &[String], fingerprint: &str) -> String {
    let files: Vec<Value> = shards.iter().map(|name| json!({"filename": name})).collect();
    let state = json!({
        "_data_files": files,
        "_fingerprint": fingerprint,
        "_format_columns": null,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": false,
        "_split": null,
    });
    format!("{state:#}\n")
}
