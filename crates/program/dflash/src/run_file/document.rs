//! Parses a run file's TOML into keys with their lines.

use std::path::Path;

use toml::de::DeTable;

use super::value::{Given, json};
use super::{Entry, SettingPlace};
use crate::cli::TABLES;
use crate::error::Error;

/// All keys of `table` in the run file, in file order; other tables belong to other commands.
pub(super) fn read(path: &Path, table: &str) -> Result<Vec<Entry>, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::ReadRunFile {
        hint: hint(table, path),
        path: path.into(),
        source,
    })?;
    let place = |at: usize| SettingPlace::File { path: path.into(), line: line_of(&text, at) };
    let document = DeTable::parse(&text).map_err(|error| Error::RunFileSyntax {
        place: place(error.span().map_or(0, |span| span.start)).to_string(),
        reason: error.message().to_owned(),
        hint: hint(table, path),
    })?;
    let mut entries = Vec::new();
    for (name, content) in document.get_ref() {
        let key = name.get_ref().to_string();
        let place = place(name.span().start);
        let is_known = TABLES.iter().any(|(_, table)| *table == key);
        let Some(content) = content.get_ref().as_table().filter(|_| is_known) else {
            let reason = format!("is not a table of a run file; settings belong under [{table}]");
            return Err(Error::Setting { place: place.to_string(), key, reason });
        };
        if key != table {
            continue;
        }
        entries.extend(content.iter().map(|(name, value)| {
            let at = name.span().start;
            (at, name.get_ref().to_string(), Given::Written(json(value.get_ref())))
        }));
    }
    // Keys are sorted by name; errors are better reported from the top.
    entries.sort_by_key(|(at, _, _)| *at);
    let entry = |(at, key, value)| Entry { place: place(at), key, value };
    Ok(entries.into_iter().map(entry).collect())
}

/// 1-based line of a byte offset in the text.
fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|&&byte| byte == b'\n').count()
}

/// How a word that may not be meant as a run file is given to the command.
fn hint(table: &str, path: &Path) -> String {
    if path.extension().is_some_and(|ending| ending == "toml") {
        return String::new();
    }
    let flag = match table {
        "eval" => "--prompts",
        "regenerate" | "prepare" => "--data",
        "train" => "--data-path",
        _ => "--target",
    };
    format!(
        "; a word without a flag is a run file (TOML); values follow their flags, as in {flag} {}",
        path.display()
    )
}
