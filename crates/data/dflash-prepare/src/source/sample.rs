//! Drawing records at random.

use super::Record;
use crate::error::Error;
use dflash_data::epoch_order;

/// The records in random order or, with a `limit`, that many drawn at random. The selected ones are
/// kept in memory: `limit` raw rows, or all of them.
pub(crate) fn sampled(
    records: impl Iterator<Item = Result<Record, Error>>,
    limit: Option<usize>,
    seed: u64,
) -> Result<Vec<Record>, Error> {
    let mut kept: Vec<Option<Record>> = Vec::new();
    let mut random = SplitMix(seed);
    for (seen, record) in records.enumerate() {
        let record = record?;
        match limit {
            Some(limit) if seen >= limit => {
                // Vitter's algorithm R: the newcomer takes a place with probability limit/(seen+1).
                let place = random.below(seen as u64 + 1) as usize;
                if place < limit {
                    kept[place] = Some(record);
                }
            }
            _ => kept.push(Some(record)),
        }
    }
    let order = epoch_order(kept.len(), seed, 0);
    Ok(order.into_iter().filter_map(|index| kept[index as usize].take()).collect())
}

/// Steele, Lea and Flood's generator: one number of state is enough for picking rows.
struct SplitMix(u64);

impl SplitMix {
    /// In `0..bound`; the bias is below 2^-40 for any number of rows that a disk holds.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Content;

    fn lines(count: usize, limit: Option<usize>, seed: u64) -> Vec<usize> {
        let records = (0..count).map(|line| {
            let content = Content::Value(serde_json::Value::Null);
            Ok(Record {
                path: std::path::Path::new("f").into(),
                line,
                content,
                bytes: 0,
                file_bytes: 0,
            })
        });
        sampled(records, limit, seed).unwrap().iter().map(|record| record.line).collect()
    }

    #[test]
    fn without_a_limit_all_rows_come_in_another_order() {
        let shuffled = lines(100, None, 1);
        assert_ne!(shuffled, (0..100).collect::<Vec<_>>());
        assert_eq!(shuffled, lines(100, None, 1));
        let mut sorted = shuffled;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_limit_draws_uniformly() {
        let mut hits = [0; 20];
        for seed in 0..2000 {
            let drawn = lines(20, Some(5), seed);
            assert_eq!(drawn.len(), 5);
            drawn.into_iter().for_each(|line| hits[line] += 1);
        }
        // Five standard deviations of a binomial with p = 1/4 around 500.
        assert!(hits.iter().all(|&n: &i32| (n - 500).abs() < 97), "{hits:?}");
        assert_eq!(lines(3, Some(5), 0).len(), 3);
    }
}
