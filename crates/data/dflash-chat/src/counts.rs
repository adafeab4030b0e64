//! Names that nothing reads, counted: keys of messages and columns of rows.

use std::collections::BTreeMap;

use serde::Serialize;

/// Maximum number of names that are listed separately; more occur in data whose keys are values.
const NAMES_SHOWN: usize = 32;
/// Longest name shown, in characters.
const NAME_LENGTH: usize = 40;
/// Stands for the names beyond [`NAMES_SHOWN`].
const OTHERS: &str = "(others)";

/// How often each name occurs. Names are cut to a length, and those beyond a number share one entry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct NameCounts(BTreeMap<String, u64>);

impl NameCounts {
    /// Counts a name.
    pub fn add(&mut self, name: &str, times: u64) {
        let name: String = name.chars().take(NAME_LENGTH).collect();
        let shown = self.0.len() - usize::from(self.0.contains_key(OTHERS));
        let has_room = shown < NAMES_SHOWN || self.0.contains_key(&name);
        let name = if has_room { name } else { OTHERS.to_owned() };
        *self.0.entry(name).or_default() += times;
    }

    /// Counts each of `names` once.
    pub fn add_each<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        names.into_iter().for_each(|name| self.add(name, 1));
    }

    /// Adds the counts of a later part.
    pub fn absorb(&mut self, later: &Self) {
        later.0.iter().for_each(|(name, &times)| self.add(name, times));
    }

    /// Whether no name was counted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `category (12 rows), id (1 row)`, if what has the names is a `row`.
    pub fn listed(&self, noun: &str) -> String {
        let part = |(name, count): (&String, &u64)| {
            let plural = if *count == 1 { "" } else { "s" };
            format!("{} ({count} {noun}{plural})", name.escape_debug())
        };
        self.0.iter().map(part).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_counted_within_bounds() {
        let mut chunk = NameCounts::default();
        chunk.add_each(["a\u{1b}[2J"]);
        (0..1000).for_each(|n| chunk.add(&format!("k{n:04}"), 1));
        let mut whole = NameCounts::default();
        whole.absorb(&chunk);
        whole.absorb(&chunk);
        assert_eq!(whole.0.len(), NAMES_SHOWN + 1);
        assert_eq!(whole.0.values().sum::<u64>(), 2002);
        let listed = whole.listed("message");
        assert!(
            listed.starts_with("(others) (1938 messages), a\\u{1b}[2J (2 messages), k0000"),
            "{listed}"
        );
        let mut long = NameCounts::default();
        long.add(&"x".repeat(1 << 20), 1);
        assert_eq!(long.listed("row"), format!("{} (1 row)", "x".repeat(NAME_LENGTH)));
    }
}
