//! A digest of tokenizer and chat template, the only parts of a target that prepared data depends
//! on.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::digest::Digest;
use crate::{Error, config, read_json};

/// Digest of `tokenizer.json` and the chat template in `dir`; `None` if there is no
/// `tokenizer.json`.
///
/// # Errors
/// A file that cannot be read.
pub fn tokenizer_digest(dir: &Path) -> Result<Option<String>, Error> {
    let path = dir.join("tokenizer.json");
    if !path.is_file() {
        return Ok(None);
    }
    let mut tokenizer = read_json(&path)?;
    if let Some(tokenizer) = tokenizer.as_object_mut() {
        // Settings of the last program that used it, which are stored with it.
        tokenizer.retain(|key, _| !["truncation", "padding"].contains(&key.as_str()));
    }
    let mut text = String::new();
    config::write(&tokenizer, &mut text);
    let mut digest = Digest::default();
    digest.add(text.as_bytes());
    digest.add(template(dir)?.as_bytes());
    Ok(Some(digest.hex()))
}

/// The chat template, from where the tokenizer reads it, with the one for tools if the model has it
/// in a file.
fn template(dir: &Path) -> Result<String, Error> {
    let mut template = main_template(dir)?;
    let tool_use = dir.join("additional_chat_templates/tool_use.jinja");
    // Without another template it is not used.
    if !template.is_empty() && tool_use.is_file() {
        template += &read(tool_use)?;
    }
    Ok(template)
}

fn main_template(dir: &Path) -> Result<String, Error> {
    let path = dir.join("chat_template.jinja");
    if path.is_file() {
        return read(path);
    }
    for name in ["chat_template.json", "tokenizer_config.json"] {
        let path = dir.join(name);
        if !path.is_file() {
            continue;
        }
        match read_json(&path)?.get("chat_template") {
            Some(Value::String(template)) => return Ok(template.clone()),
            Some(several) if !several.is_null() => return Ok(several.to_string()),
            _ => {}
        }
    }
    Ok(String::new())
}

fn read(path: PathBuf) -> Result<String, Error> {
    std::fs::read_to_string(&path).map_err(|source| Error::Read { path, source })
}
