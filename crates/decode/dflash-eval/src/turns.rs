//! The parts of a set and the order of modes in each: every mode answers a part before the next
//! part begins, so that warm-up or other load slows all alike.

use std::ops::Range;

/// Maximum number of parts of a set, and desired rounds of answers per part: at the end of a part
/// concurrency drops.
const MOST_PARTS: usize = 8;
const ROUNDS: usize = 2;
/// Parts of a small set: fewer have no spread, and do not alternate.
const FEWEST_PARTS: usize = 2;
/// Minimum number of rows per part.
const LEAST_ROWS: usize = 2;

/// The rows of each part of a set of `rows`, answered with `concurrency`.
pub fn parts(rows: usize, concurrency: usize) -> Vec<Range<usize>> {
    let parts = match rows < FEWEST_PARTS * LEAST_ROWS {
        true => 1,
        false => (rows / (ROUNDS * concurrency)).clamp(FEWEST_PARTS, MOST_PARTS),
    };
    (0..parts).map(|part| part * rows / parts..(part + 1) * rows / parts).collect()
}

/// The order of `modes` in a part: the first `fixed` of them always begin, the others rotate.
pub fn order(part: usize, modes: usize, fixed: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..modes).collect();
    let turning = &mut order[fixed.min(modes)..];
    turning.rotate_left(part % turning.len().max(1));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_part_and_no_part_is_short() {
        for (rows, concurrency, expect) in
            [(1, 1, 1), (3, 8, 1), (4, 1, 2), (4, 8, 2), (12, 4, 2), (24, 4, 3), (100, 4, 8)]
        {
            let parts = parts(rows, concurrency);
            assert_eq!(parts.len(), expect, "{rows} {concurrency}");
            let all: Vec<usize> = parts.iter().cloned().flatten().collect();
            assert_eq!(all, (0..rows).collect::<Vec<_>>());
            assert!(expect == 1 || parts.iter().all(|part| part.len() >= 2));
        }
    }

    #[test]
    fn each_way_begins_in_its_turn_behind_the_fixed_ones() {
        let orders = |fixed| [0, 1, 2].map(|part| order(part, 3, fixed));
        assert_eq!(orders(0), [[0, 1, 2], [1, 2, 0], [2, 0, 1]]);
        assert_eq!(orders(1), [[0, 1, 2], [0, 2, 1], [0, 1, 2]]);
        assert_eq!(order(5, 1, 1), [0]);
    }
}
