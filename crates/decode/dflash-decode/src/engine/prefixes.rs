//! Caches of sequences that have ended, for prompts that begin alike.

use dflash_draft::{ContextCache, Draft};
use dflash_target::{KvCache, Target};

use super::LEAST_REUSE;

/// Kept caches, together of a bounded size; the one that was used longest ago goes first.
#[derive(Debug)]
pub(super) struct Prefixes {
    /// Longest unused first.
    entries: Vec<Entry>,
    /// Of all entries.
    bytes: usize,
    most_bytes: usize,
}

/// The caches of a sequence that has ended, without room for more.
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

    /// Whether `other` can stand in for it.
    fn is_within(&self, other: &Self) -> bool {
        other.tokens.starts_with(&self.tokens)
            && (other.context.is_some() || self.context.is_none())
            && other.cache.earliest() <= self.tokens.len()
    }

    /// Tokens that it has of the beginning of `prompt`; of the draft's cache too for a sequence that
    /// `drafts`.
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

    /// Keeps nothing any more.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How much of the beginning of `prompt` an entry has, whether or not its caches can be copied there.
    pub(super) fn longest(&self, prompt: &[i64], drafts: bool) -> usize {
        self.entries.iter().map(|entry| entry.shared(prompt, drafts)).max().unwrap_or(0)
    }

    /// The entry with most of the beginning of `prompt` that can be copied, and how many tokens that is;
    /// of the draft's cache too for a sequence that `drafts`. It counts as used.
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

    /// Keeps what a sequence has in its caches, which hold `tokens`.
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

/// Of so many tokens that `cache` has in common with a prompt, those that can be copied: all, or none
/// where layers carry a state that is not known there any more.
pub(super) fn usable(tokens: usize, cache: &KvCache) -> usize {
    if tokens >= cache.earliest() { tokens } else { 0 }
}

/// How many tokens two sequences have in common before they part.
pub(super) fn common(one: &[i64], other: &[i64]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}
