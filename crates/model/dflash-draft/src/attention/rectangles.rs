//! Splits what blocks see of their context into unmasked rectangles: index ranges without tensors.
//!
//! A rectangle is a run of anchors, all of whose slots see the same run of context rows. The
//! anchors of a document are sorted, so the ends of their views ascend, and with a window so do the
//! starts. All anchors of a document share a *core* (with a window: as many anchors as have a
//! common visible position). Beyond it, the later half of the anchors sees what is between the
//! first anchors' ends of the two halves; with a window, the earlier half sees what is between the
//! last anchors' starts. The halves are halved in the same way. Rectangles of one depth are
//! disjoint in anchors and in context rows, over all documents: one call of a variable-length
//! kernel, whose gradients never overlap. No hidden pair is computed.
//!
//! ```text
//!            context ->
//! anchor 0   #####                   # core
//! anchor 1   #####2                  1 first halving
//! anchor 2   #####11                 2 second halving
//! anchor 3   #####1122
//! ```
//!
//! All slots of a block see the same context, except with a served window, which starts one
//! position later from slot to slot. Then rectangles start at the last slot's window; the context
//! before it, the block's *edge*, is attended to together with the block's own slots.
//!
//! Without a window, halving stops when few anchors are left, or when they are so close that what
//! they see beyond their first fits in a key tile together with a block's own slots: that is an
//! edge too. Rectangles of the last depths would fill only a fraction of a tile each.

use std::ops::Range;

use super::plan::{BlockPlan, DocumentSpan, Visibility};

/// Keys per tile of the kernels.
const TILE_KEYS: usize = 64;
/// Maximum anchors that are not halved if edges can take what they see.
const FEW: usize = 4;

/// Anchors whose slots all see the same context rows. Both ranges are nonempty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rectangle {
    /// Range in the row's sorted anchors.
    pub anchors: Range<usize>,
    /// Range of context rows.
    pub context: Range<usize>,
}

/// All rectangles of a packed row for layers with one visibility.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RectanglePlan {
    /// Rectangles of one level are disjoint in anchors and in context rows, and ascend in both.
    pub levels: Vec<Vec<Rectangle>>,
    /// Per anchor the context rows outside all rectangles. With a served window, these are visible
    /// to some of its slots but not to its last; slot k sees them from index k on, counting rows
    /// cut off by the document's start. Without a window all slots see all of them.
    pub edges: Vec<Range<usize>>,
}

impl BlockPlan {
    /// Splits what layers with `visibility` see into rectangles and edges.
    pub fn rectangles(&self, visibility: &Visibility) -> RectanglePlan {
        let room = match visibility.window {
            None => TILE_KEYS.saturating_sub(self.block_size()),
            Some(_) => 0,
        };
        let mut staircases = Staircases { room, ..Staircases::default() };
        for span in self.spans() {
            let block = |anchor: &usize| {
                let position = anchor - span.row_start;
                [0, self.block_size() - 1].map(|slot| visibility.context(position, slot))
            };
            let blocks: Vec<[Range<usize>; 2]> =
                self.anchors()[span.anchors.clone()].iter().map(block).collect();
            let edges = blocks.iter().map(|[first, last]| first.start..last.start);
            staircases.edges.extend(edges.map(|edge| context_rows(span, edge)));
            let all: Vec<Range<usize>> =
                blocks.into_iter().map(|[_, last]| context_rows(span, last)).collect();
            staircases.add_document(span.anchors.start, &all);
        }
        staircases.plan()
    }
}

fn context_rows(span: &DocumentSpan, positions: Range<usize>) -> Range<usize> {
    assert!(
        positions.is_empty()
            || span.context.start <= positions.start && positions.end <= span.context.end,
        "a layer looks beyond the context that the plan was made for"
    );
    let row = |position: usize| {
        span.context_row + position.clamp(span.context.start, span.context.end) - span.context.start
    };
    row(positions.start)..row(positions.end)
}

/// The levels while documents are added.
#[derive(Default)]
struct Staircases {
    cores: Vec<Rectangle>,
    /// By depth: what later halves see after the core.
    later: Vec<Vec<Rectangle>>,
    /// By depth: what earlier halves see before the core.
    earlier: Vec<Vec<Rectangle>>,
    /// As in [`RectanglePlan`].
    edges: Vec<Range<usize>>,
    /// Maximum edge length that replaces rectangles of more than [`FEW`] anchors; 0 for none.
    room: usize,
}

impl Staircases {
    fn plan(self) -> RectanglePlan {
        let all = std::iter::once(self.cores).chain(self.later).chain(self.earlier);
        let levels = all.filter(|level| !level.is_empty()).collect();
        RectanglePlan { levels, edges: self.edges }
    }

    /// Adds the anchors from `first` on, which see the ranges `seen`; starts and ends ascend.
    fn add_document(&mut self, first: usize, seen: &[Range<usize>]) {
        let mut start = 0;
        while start < seen.len() {
            // All anchors whose view starts at or before `cut`.
            let cut = seen[start].end;
            let rest = &seen[start..];
            let count = rest.partition_point(|rows| rows.start <= cut);
            self.add_group(first + start, &rest[..count], cut);
            start += count;
        }
    }

    fn add_group(&mut self, first: usize, seen: &[Range<usize>], cut: usize) {
        let anchors = first..first + seen.len();
        push(&mut self.cores, anchors, seen[seen.len() - 1].start..cut);
        self.halve_later(0, first, seen);
        halve_earlier(&mut self.earlier, 0, first, seen);
    }

    /// Beyond the common part, the later half sees from the first anchor's end to its own first
    /// end. If there is room, each anchor sees from there to its own end through its edge.
    fn halve_later(&mut self, depth: usize, first: usize, seen: &[Range<usize>]) {
        if seen.len() < 2 {
            return;
        }
        let begin = seen[0].end;
        let is_near = seen[seen.len() - 1].end - begin <= self.room;
        if self.room > 0 && (is_near || seen.len() <= FEW) {
            let edges = &mut self.edges[first..first + seen.len()];
            edges.iter_mut().zip(seen).for_each(|(edge, rows)| *edge = begin..rows.end);
            return;
        }
        let (earlier, later) = seen.split_at(seen.len() / 2);
        let middle = first + earlier.len();
        push(level(&mut self.later, depth), middle..first + seen.len(), begin..later[0].end);
        self.halve_later(depth + 1, first, earlier);
        self.halve_later(depth + 1, middle, later);
    }
}

/// Beyond the common part, the earlier half sees from its last start to the last anchor's.
fn halve_earlier(
    levels: &mut Vec<Vec<Rectangle>>,
    depth: usize,
    first: usize,
    seen: &[Range<usize>],
) {
    if seen.len() < 2 {
        return;
    }
    let (earlier, later) = seen.split_at(seen.len() / 2);
    let last_start = |half: &[Range<usize>]| half[half.len() - 1].start;
    let middle = first + earlier.len();
    push(level(levels, depth), first..middle, last_start(earlier)..last_start(later));
    halve_earlier(levels, depth + 1, first, earlier);
    halve_earlier(levels, depth + 1, middle, later);
}

fn level(levels: &mut Vec<Vec<Rectangle>>, depth: usize) -> &mut Vec<Rectangle> {
    if levels.len() <= depth {
        levels.resize_with(depth + 1, Vec::new);
    }
    &mut levels[depth]
}

fn push(level: &mut Vec<Rectangle>, anchors: Range<usize>, context: Range<usize>) {
    if !context.is_empty() {
        level.push(Rectangle { anchors, context });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::WindowRule;

    fn rectangles(level: &[(Range<usize>, Range<usize>)]) -> Vec<Rectangle> {
        let one = |(anchors, context): &(Range<usize>, Range<usize>)| Rectangle {
            anchors: anchors.clone(),
            context: context.clone(),
        };
        level.iter().map(one).collect()
    }

    #[test]
    fn halves_by_hand() {
        // Two documents; the second has one anchor, whose context starts at context row 8.
        let of = |block_size| {
            let plan =
                BlockPlan::new(&[0, 20, 30], &[5, 6, 7, 8, 23], block_size, &[Visibility::FULL]);
            plan.rectangles(&Visibility::FULL)
        };
        // A block as large as a tile leaves no room for edges.
        let found = of(TILE_KEYS);
        let expected = [
            rectangles(&[(0..4, 0..5), (4..5, 8..11)]),
            rectangles(&[(2..4, 5..7)]),
            rectangles(&[(1..2, 5..6), (3..4, 7..8)]),
        ];
        assert_eq!(found.levels, expected);
        assert!(found.edges.len() == 5 && found.edges.iter().all(Range::is_empty));
        let found = of(TILE_KEYS - 1);
        assert_eq!(found.levels, expected[..1]);
        assert_eq!(found.edges[..4], [5..5, 5..6, 5..7, 5..8]);
    }

    #[test]
    fn halving_ends_where_a_tile_has_room() {
        let anchors: Vec<usize> = (10..26).chain([100]).collect();
        let found = |room: usize| {
            let block_size = TILE_KEYS - room;
            let plan = BlockPlan::new(&[0, 101], &anchors, block_size, &[Visibility::FULL]);
            plan.rectangles(&Visibility::FULL)
        };
        let expected = [
            rectangles(&[(0..17, 0..10)]),
            rectangles(&[(8..17, 10..18)]),
            rectangles(&[(4..8, 10..14), (12..17, 18..22)]),
            rectangles(&[(14..17, 22..24)]),
        ];
        assert_eq!(found(1).levels, expected);
        assert_eq!(found(1).edges[12..], [22..22, 22..23, 24..24, 24..25, 24..100]);
        assert_eq!(found(7).levels[..2], expected[..2]);
        assert_eq!(
            found(7).edges[..9],
            [10..10, 10..11, 10..12, 10..13, 10..14, 10..15, 10..16, 10..17, 18..18]
        );
    }

    #[test]
    fn a_served_window_by_hand() {
        // Slot k of block a sees positions from a + k - 3 on: 5 from 2 and 3, 6 from 3 and 4, 9
        // from 6 and 7.
        let sliding = Visibility::sliding(4);
        let plan = BlockPlan::new(&[0, 20], &[5, 6, 9], 2, &[sliding]);
        let found = plan.rectangles(&sliding);
        // 9 sees nothing before 5. Context rows start at position 2.
        let expected = [
            rectangles(&[(0..2, 2..3), (2..3, 5..7)]),
            rectangles(&[(1..2, 3..4)]),
            rectangles(&[(0..1, 1..2)]),
        ];
        assert_eq!(found.levels, expected);
        assert_eq!(found.edges, [0..1, 1..2, 4..5]);
        let fixed = Visibility { window: Some((3, WindowRule::Speculators)), ..sliding };
        let same_for_all_slots = plan.rectangles(&fixed);
        assert_eq!(same_for_all_slots.edges, [0..0, 1..1, 4..4]);
    }

    #[test]
    fn calls_grow_with_the_logarithm_of_the_most_anchors_and_not_with_documents() {
        let check = |anchors: &[usize], starts: &[usize], visibility: Visibility, expect| {
            let plan = BlockPlan::new(starts, anchors, 4, &[visibility]);
            assert_eq!(plan.rectangles(&visibility).levels.len(), expect, "{visibility:?}");
        };
        let many: Vec<usize> = (8..1032).step_by(2).collect();
        // Down to 16 anchors, whose last sees 30 rows more than their first.
        check(&many, &[0, 1040], Visibility::FULL, 1 + 5);
        let documents: Vec<usize> = many.iter().copied().chain([1045, 1050, 1071]).collect();
        check(&documents, &[0, 1040, 1060, 1080], Visibility::FULL, 1 + 5);
        // Up to 65 anchors see the position before the first of them.
        let window = Some((128, WindowRule::Speculators));
        let fixed = Visibility { window, ..Visibility::FULL };
        check(&documents, &[0, 1040, 1060, 1080], fixed, 1 + 7 + 7);
    }
}
