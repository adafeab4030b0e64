//! The file itself: TOML to keys with their lines.

use std::path::Path;

use toml::de::DeTable;

use super::value::Given;
use super::{Entry, Place, TABLE};
use crate::error::Error;

/// Every key of the run file's table, in the file's order.
pub(super) fn read(path: &Path) -> Result<Vec<Entry>, Error> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Error::ReadRunFile { path: path.into(), source })?;
    let place = |at: usize| Place::File { path: path.into(), line: line_of(&text, at) };
    let document = DeTable::parse(&text).map_err(|error| Error::RunFileSyntax {
        place: place(error.span().map_or(0, |span| span.start)).to_string(),
        reason: error.message().to_owned(),
    })?;
    let mut entries = Vec::new();
    for (name, content) in document.get_ref() {
        let key = name.get_ref().to_string();
        let place = place(name.span().start);
        let Some(table) = content.get_ref().as_table().filter(|_| key == TABLE) else {
            let reason = format!("is no table of a run file; settings stand under [{TABLE}]");
            return Err(Error::Setting { place: place.to_string(), key, reason });
        };
        entries.extend(table.iter().map(|(name, value)| {
            let at = name.span().start;
            (at, name.get_ref().to_string(), Given::of(value.get_ref()))
        }));
    }
    // Keys come sorted by name; mistakes are better reported from the top.
    entries.sort_by_key(|(at, _, _)| *at);
    let entry = |(at, key, value)| Entry { place: place(at), key, value };
    Ok(entries.into_iter().map(entry).collect())
}

/// 1-based line of a byte of the text.
fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|&&byte| byte == b'\n').count()
}
