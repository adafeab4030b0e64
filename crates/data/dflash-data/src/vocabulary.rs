//! The pruned vocabulary of a draft: the target's most frequent tokens.

use std::collections::HashSet;

/// Chooses the tokens of a pruned vocabulary: the `draft_vocab_size` most frequent (the lower id
/// wins a tie), filled up with the lowest unused ids, in ascending order. `frequencies` holds
/// supervised tokens with their counts; ids outside `0..target_vocab_size` are ignored. The result
/// has fewer entries only when the target's vocabulary is smaller.
pub fn select_vocabulary(
    frequencies: &[(i64, u64)],
    draft_vocab_size: usize,
    target_vocab_size: usize,
) -> Vec<i64> {
    let target = 0..target_vocab_size as i64;
    let mut ranked: Vec<(i64, u64)> =
        frequencies.iter().copied().filter(|(id, _)| target.contains(id)).collect();
    ranked.sort_unstable_by_key(|&(id, count)| (std::cmp::Reverse(count), id));
    let mut selected: Vec<i64> =
        ranked.into_iter().take(draft_vocab_size).map(|(id, _)| id).collect();
    let used: HashSet<i64> = selected.iter().copied().collect();
    let missing = draft_vocab_size - selected.len();
    selected.extend(target.filter(|id| !used.contains(id)).take(missing));
    selected.sort_unstable();
    selected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_id_and_gaps_are_filled_from_below() {
        let counts = [(7, 3), (2, 5), (9, 5), (11, 1)];
        assert_eq!(select_vocabulary(&counts, 3, 16), [2, 7, 9]);
        assert_eq!(select_vocabulary(&counts, 6, 16), [0, 1, 2, 7, 9, 11]);
        assert_eq!(select_vocabulary(&counts, 2, 9), [2, 7]);
        assert_eq!(select_vocabulary(&[], 5, 3), [0, 1, 2]);
    }
}
