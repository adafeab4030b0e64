//! Caches of ended sequences, reused for prompts with the same beginning.

use dflash_draft::{ContextCache, Draft};
use dflash_target::{KvCache, Target};

use super::LEAST_REUSE;

/// Retained caches of bounded total size; the least recently used is evicted first.
#[derive(Debug)]
pub(super) struct Prefixes {
    /// Least recently used first.
    entries: Vec<Entry>,
    /// Total over all entries.
    bytes: usize,
    most_bytes: usize,
}

/// The caches of an ended sequence, without spare capacity.
#[derive(Debug)]
pub(super) struct Entry {
    tokens: Vec<i64>,
    cache: KvCache,
    context: Option<ContextCache>,
    bytes: usize,
}

impl Entry {
    pub(super) fn caches(&self) -> (&KvCache, Option<&ContextCache>) {
        (&self.cache, self.context.as_ref())
    }

    /// Whether `other` covers this entry.
    fn is_within(&self, other: &Self) -> bool {
        other.tokens.starts_with(&self.tokens)
            && (other.context.is_some() || self.context.is_none())
            && other.cache.earliest() <= self.tokens.len()
    }

    /// Length of the common prefix with `prompt`; if `drafts`, the draft's cache must cover it too.
    fn shared(&self, prompt: &[i64], drafts: bool) -> usize {
        match self.context.is_some() || !drafts {
            true => common(prompt, &self.tokens),
            false => 0,
        }
    }
}

impl Prefixes {
    pub(super) fn new(most_bytes: usize) -> Self {
        Self { entries: Vec::new(), bytes: 0, most_bytes }
    }

    /// Drops all entries.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Longest common prefix of `prompt` with any entry, even if its caches cannot be copied there.
    pub(super) fn longest(&self, prompt: &[i64], drafts: bool) -> usize {
        self.entries.iter().map(|entry| entry.shared(prompt, drafts)).max().unwrap_or(0)
    }

    /// The entry with the longest copyable prefix of `prompt`, and its length; if `drafts`, the
    /// draft's cache must cover it too. Counts as a use.
    pub(super) fn find(&mut self, prompt: &[i64], drafts: bool) -> Option<(usize, &Entry)> {
        let rows = |entry: &Entry| usable(entry.shared(prompt, drafts), &entry.cache);
        let best = (0..self.entries.len()).max_by_key(|&at| rows(&self.entries[at]))?;
        let rows = rows(&self.entries[best]);
        if rows < LEAST_REUSE {
            return None;
        }
        let entry = self.entries.remove(best);
        self.entries.push(entry);
        self.entries.last().map(|entry| (rows, entry))
    }

    /// Keeps a copy of a sequence's caches, which hold `tokens`.
    pub(super) fn insert(
        &mut self,
        tokens: &[i64],
        cache: &KvCache,
        context: Option<&ContextCache>,
        target: &Target,
        draft: Option<&Draft>,
    ) {
        let rows = tokens.len();
        if self.most_bytes == 0 || rows < LEAST_REUSE {
            return;
        }
        let cache = target.copy_cache(cache, rows, rows);
        let context = context.zip(draft).map(|(context, draft)| {
            draft.copy_cache(context, context.len().min(rows as i64), rows as i64)
        });
        let bytes = cache.bytes()
            + context.as_ref().map_or(0, ContextCache::bytes)
            + std::mem::size_of_val(tokens);
        let entry = Entry { tokens: tokens.to_vec(), cache, context, bytes };
        if bytes > self.most_bytes || self.entries.iter().any(|old| entry.is_within(old)) {
            return;
        }
        self.entries.retain(|old| !old.is_within(&entry));
        self.entries.push(entry);
        self.bytes = self.entries.iter().map(|entry| entry.bytes).sum();
        while self.bytes > self.most_bytes {
            self.bytes -= self.entries.remove(0).bytes;
        }
    }
}

/// How many of `tokens` common tokens can be copied from `cache`: all, or none if a recurrent state
/// is no longer known at that length.
pub(super) fn usable(tokens: usize, cache: &KvCache) -> usize {
    if tokens >= cache.earliest() { tokens } else { 0 }
}

/// Length of the common prefix.
pub(super) fn common(one: &[i64], other: &[i64]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}
