//! Caches of sequences that have ended, for prompts that begin alike.

use dflash_model::draft::{ContextCache, Draft};
use dflash_model::target::{KvCache, Target};

use super::LEAST_REUSE;
use super::sequence::Sequence;

/// Kept caches, together of a bounded size; the one that was used longest ago goes first.
#[derive(Debug)]
pub(super) struct Prefixes {
    /// Longest unused first.
    entries: Vec<Entry>,
    most_bytes: usize,
}

/// The caches of a sequence that has ended, without room for more.
#[derive(Debug)]
pub(super) struct Entry {
    tokens: Vec<i64>,
    cache: KvCache,
    context: Option<ContextCache>,
}

impl Entry {
    pub(super) fn caches(&self) -> (&KvCache, Option<&ContextCache>) {
        (&self.cache, self.context.as_ref())
    }

    fn bytes(&self) -> usize {
        self.cache.bytes() + self.context.as_ref().map_or(0, ContextCache::bytes)
    }

    /// Whether `other` can stand in for it.
    fn is_within(&self, other: &Self) -> bool {
        other.tokens.starts_with(&self.tokens)
            && (other.context.is_some() || self.context.is_none())
    }
}

impl Prefixes {
    pub(super) fn new(most_bytes: usize) -> Self {
        Self { entries: Vec::new(), most_bytes }
    }

    /// Keeps nothing any more.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.iter().map(Entry::bytes).sum()
    }

    /// The entry that has most of the beginning of `prompt`, and how many tokens that is; of the
    /// draft's cache too for a sequence that `drafts`. It counts as used.
    pub(super) fn find(&mut self, prompt: &[i64], drafts: bool) -> Option<(usize, &Entry)> {
        let shared = |entry: &Entry| match entry.context.is_some() || !drafts {
            true => common(prompt, &entry.tokens),
            false => 0,
        };
        let best = (0..self.entries.len()).max_by_key(|&at| shared(&self.entries[at]))?;
        let rows = shared(&self.entries[best]);
        if rows < LEAST_REUSE {
            return None;
        }
        let entry = self.entries.remove(best);
        self.entries.push(entry);
        self.entries.last().map(|entry| (rows, entry))
    }

    /// Keeps what `sequence` has in its caches.
    pub(super) fn insert(
        &mut self,
        sequence: Sequence,
        (target, draft): (&Target, Option<&Draft>),
    ) {
        if self.most_bytes == 0 || sequence.cache.len() < LEAST_REUSE {
            return;
        }
        let (tokens, cache, context) = sequence.into_caches();
        let rows = tokens.len();
        let cache = target.copy_cache(&cache, rows, rows);
        let context = context.zip(draft).map(|(context, draft)| {
            draft.copy_cache(&context, context.len().min(rows as i64), rows as i64)
        });
        let entry = Entry { tokens, cache, context };
        if entry.bytes() > self.most_bytes || self.entries.iter().any(|old| entry.is_within(old)) {
            return;
        }
        self.entries.retain(|old| !old.is_within(&entry));
        self.entries.push(entry);
        while self.bytes() > self.most_bytes {
            self.entries.remove(0);
        }
    }
}

/// How many tokens two sequences have in common before they part.
pub(super) fn common(one: &[i64], other: &[i64]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}
