//! Where blocks start: the anchors of a packed row.
//!
//! An anchor is the known first token of a block; the draft predicts the slots after it. Candidates
//! are positions whose own token and next token are supervised, in the same document. A block may
//! extend past its document's end, so short answers are trained too.

use std::ops::Range;

use crate::PackedRow;
use crate::random::{Domain, Stream};

/// How many anchors to draw, and the seed and epoch of the draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnchorOptions {
    /// Maximum number of anchors per document (512 in the method's description).
    pub per_document: usize,
    /// Maximum number of anchors per packed row, shared out over its documents.
    pub per_row: usize,
    /// Seed of the run.
    pub seed: u64,
    /// The epoch: each draws its own anchors.
    pub epoch: u64,
}

/// Draws anchors uniformly without replacement, per document, and returns their positions in the
/// row in ascending order. What a document draws depends only on the seed, the epoch and its index
/// in the dataset, not on its neighbours: the row's cap shortens a draw but does not change it.
pub fn sample_anchors(row: &PackedRow, options: &AnchorOptions) -> Vec<usize> {
    let mut candidates: Vec<Vec<usize>> =
        row.documents().map(|document| document_candidates(&row.loss_mask, document)).collect();
    let counts: Vec<usize> = candidates.iter().map(Vec::len).collect();
    let quotas = share_out(&counts, options.per_document, options.per_row);
    let mut anchors = Vec::with_capacity(quotas.iter().sum());
    for ((positions, &quota), &sample) in candidates.iter_mut().zip(&quotas).zip(&row.samples) {
        let key = [options.seed, options.epoch, u64::from(sample)];
        Stream::new(Domain::Anchors, key).draw(positions, quota);
        anchors.extend_from_slice(&positions[..quota]);
    }
    anchors.sort_unstable();
    anchors
}

/// All positions of a row that may be anchors, in ascending order.
pub fn anchor_candidates(row: &PackedRow) -> Vec<usize> {
    row.documents().flat_map(|document| document_candidates(&row.loss_mask, document)).collect()
}

fn document_candidates(loss_mask: &[bool], document: Range<usize>) -> Vec<usize> {
    let last = document.end.saturating_sub(1);
    (document.start..last).filter(|&p| loss_mask[p] && loss_mask[p + 1]).collect()
}

/// Each document's number of anchors: as many as it may have, or, if that exceeds the row's cap,
/// shares of the cap in proportion to the candidates. If a document has fewer candidates than its
/// share, or a lower cap, the others get the rest.
fn share_out(counts: &[usize], per_document: usize, per_row: usize) -> Vec<usize> {
    let mut quotas: Vec<usize> = counts.iter().map(|&count| count.min(per_document)).collect();
    if quotas.iter().sum::<usize>() <= per_row {
        return quotas;
    }
    let mut open: Vec<usize> = (0..counts.len()).filter(|&d| counts[d] > 0).collect();
    let mut left = per_row;
    loop {
        let weight: usize = open.iter().map(|&d| counts[d]).sum();
        let (full, rest): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|&&d| left * counts[d] >= quotas[d] * weight);
        if full.is_empty() {
            apportion(&mut quotas, counts, &open, left);
            return quotas;
        }
        left -= full.iter().map(|&d| quotas[d]).sum::<usize>();
        open = rest;
    }
}

/// Splits `left` over the documents `open` in proportion to their counts, by largest remainder
/// (the earlier document wins a tie).
fn apportion(quotas: &mut [usize], counts: &[usize], open: &[usize], left: usize) {
    let weight: usize = open.iter().map(|&d| counts[d]).sum();
    let mut remainders: Vec<(usize, usize)> = Vec::with_capacity(open.len());
    let mut given = 0;
    for &document in open {
        let share = left * counts[document];
        quotas[document] = share / weight;
        given += quotas[document];
        remainders.push((share % weight, document));
    }
    remainders.sort_by_key(|&(remainder, document)| (std::cmp::Reverse(remainder), document));
    for &(_, document) in remainders.iter().take(left - given) {
        quotas[document] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sample;

    const OPTIONS: AnchorOptions =
        AnchorOptions { per_document: 512, per_row: 3072, seed: 1, epoch: 0 };

    /// A row of documents given as masks, `1` for supervised.
    fn row(documents: &[(u32, &str)]) -> PackedRow {
        let samples: Vec<(u32, Sample)> = documents
            .iter()
            .map(|&(index, mask)| {
                let loss_mask: Vec<bool> = mask.chars().map(|c| c == '1').collect();
                (index, Sample { input_ids: vec![0; loss_mask.len()], loss_mask })
            })
            .collect();
        PackedRow::from_samples(&samples, usize::MAX)
    }

    fn check_shares(counts: &[usize], per_document: usize, per_row: usize, expect: &[usize]) {
        assert_eq!(share_out(counts, per_document, per_row), expect, "{counts:?}");
    }

    #[test]
    fn candidates_need_a_supervised_successor_in_the_same_document() {
        assert_eq!(anchor_candidates(&row(&[(0, "0111"), (1, "1101"), (2, "1")])), [1, 2, 4]);
        assert_eq!(anchor_candidates(&row(&[(0, "0000")])), [0; 0]);
        assert_eq!(sample_anchors(&row(&[(0, "0111"), (1, "1101")]), &OPTIONS), [1, 2, 4]);
        assert_eq!(sample_anchors(&row(&[]), &OPTIONS), [0; 0]);
    }

    #[test]
    fn the_cap_of_a_row_is_shared_in_proportion() {
        check_shares(&[10, 20], 512, 3072, &[10, 20]);
        check_shares(&[100, 200], 512, 30, &[10, 20]);
        check_shares(&[1, 1, 1], 512, 2, &[1, 1, 0]);
        check_shares(&[0, 5], 512, 3, &[0, 3]);
        // 900 candidates would get 20 of 25 but may have 10; the others share what is left.
        check_shares(&[900, 100, 100], 10, 25, &[10, 8, 7]);
        check_shares(&[5, 5], 512, 0, &[0, 0]);
    }

    #[test]
    fn a_draw_depends_on_its_document_only() {
        let long = "1".repeat(100);
        let alone = row(&[(7, long.as_str())]);
        let packed = row(&[(3, "0011"), (7, long.as_str())]);
        let few = AnchorOptions { per_document: 10, ..OPTIONS };
        let expect: Vec<usize> = sample_anchors(&alone, &few).iter().map(|p| p + 4).collect();
        assert_eq!(sample_anchors(&packed, &few)[1..], expect);
        // A smaller cap keeps a part of the same draw.
        let fewer = sample_anchors(&alone, &AnchorOptions { per_row: 5, ..few });
        assert_eq!(fewer.len(), 5);
        assert!(fewer.iter().all(|p| expect.contains(&(p + 4))));
        // Every epoch and every document has its own draw.
        assert_ne!(sample_anchors(&alone, &AnchorOptions { epoch: 1, ..few }), expect);
        let other = sample_anchors(&row(&[(8, long.as_str())]), &few);
        assert_ne!(other, sample_anchors(&alone, &few));
    }

    #[test]
    fn anchors_are_sorted_unique_and_within_the_caps() {
        let masks: Vec<String> = (0..40).map(|i| "01".repeat(3) + &"1".repeat(20 * i)).collect();
        let documents: Vec<(u32, &str)> = (0..).zip(masks.iter().map(String::as_str)).collect();
        let row = row(&documents);
        let options = AnchorOptions { per_document: 64, per_row: 1000, seed: 3, epoch: 2 };
        let anchors = sample_anchors(&row, &options);
        assert_eq!(anchors.len(), 1000);
        assert!(anchors.windows(2).all(|pair| pair[0] < pair[1]));
        let candidates = anchor_candidates(&row);
        assert!(anchors.iter().all(|p| candidates.binary_search(p).is_ok()));
        for document in row.documents() {
            assert!(anchors.iter().filter(|p| document.contains(p)).count() <= 64);
        }
    }
}
