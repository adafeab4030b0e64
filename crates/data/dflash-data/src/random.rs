//! Random draws that are the same on every machine and in every release.
//!
//! A stream is identified by its purpose (a domain) and a key of three numbers, so that no draw
//! depends on how many others came before it. The bounded draw and the shuffle are implemented here
//! because library versions may change theirs, and a resumed run must repeat them.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The purpose of a stream; streams of different domains are independent even with equal keys.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Domain {
    Order = 1,
    Anchors = 2,
}

/// A reproducible stream of numbers.
pub(crate) struct Stream(ChaCha8Rng);

impl Stream {
    pub(crate) fn new(domain: Domain, key: [u64; 3]) -> Self {
        let mut seed = [0; 32];
        let words = [domain as u64, key[0], key[1], key[2]];
        for (bytes, word) in seed.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Self(ChaCha8Rng::from_seed(seed))
    }

    /// Uniform in `0..bound`, without bias (Lemire, arXiv 1805.10941).
    fn below(&mut self, bound: u64) -> u64 {
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.0.next_u64()) * u128::from(bound);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }

    /// Moves a uniform draw of `count` items without replacement to the front of `items`. The
    /// draw of a smaller count is a prefix of the draw of a larger one.
    pub(crate) fn draw<T>(&mut self, items: &mut [T], count: usize) {
        for index in 0..count.min(items.len()) {
            let rest = (items.len() - index) as u64;
            items.swap(index, index + self.below(rest) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_draw_is_a_prefix_of_a_larger_one() {
        let draw = |count| {
            let mut items: Vec<u32> = (0..50).collect();
            Stream::new(Domain::Order, [1, 2, 3]).draw(&mut items, count);
            items
        };
        assert_eq!(draw(10)[..10], draw(50)[..10]);
        assert_eq!(draw(50), draw(99));
    }

    #[test]
    fn draws_are_uniform_and_keyed() {
        let mut hits = [0; 5];
        for key in 0..5000 {
            let mut items = [0, 1, 2, 3, 4];
            Stream::new(Domain::Anchors, [key, 0, 0]).draw(&mut items, 1);
            hits[items[0]] += 1;
        }
        // Five standard deviations of a binomial with p = 1/5 around 1000.
        assert!(hits.iter().all(|&n: &i32| (n - 1000).abs() < 141), "{hits:?}");
        let first = |domain, key| Stream::new(domain, key).below(1 << 40);
        assert_ne!(first(Domain::Order, [0, 0, 1]), first(Domain::Order, [0, 1, 0]));
        assert_ne!(first(Domain::Order, [0; 3]), first(Domain::Anchors, [0; 3]));
    }
}
