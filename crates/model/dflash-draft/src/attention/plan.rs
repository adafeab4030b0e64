//! Which context each chunk of anchors sees, as index ranges without tensors.
//!
//! Only context that some anchor can see goes through the draft: of each document the positions
//! before its last anchor (and, if every layer is sliding, not before the first window). These
//! rows, document after document, are the *context rows* that segments refer to.

use std::ops::Range;

/// Maximum slots per chunk (rows before folding of the heads). Larger chunks need fewer calls,
/// smaller ones waste less on masked scores.
const CHUNK_ROWS: usize = 512;

/// Minimum context rows for a separate call of a chunk's middle. A shorter middle joins the masked
/// edges, whose mask is cheaper than another call, result and merge.
const OWN_CALL_ROWS: usize = 128;

/// How a sliding layer's window is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRule {
    /// As vLLM and SGLang serve it: slot k of a block at a sees from a + k - window + 1 on.
    Serving,
    /// As speculators trains it: every slot of the block at a sees positions from a - window on.
    Speculators,
}

/// What the slots of one layer type see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// Window in tokens and its rule; `None` for full attention.
    pub window: Option<(usize, WindowRule)>,
    /// Whether attention within a block is causal.
    pub causal_in_block: bool,
}

impl Visibility {
    /// Full attention: all context before the anchor, and the whole block.
    pub const FULL: Self = Self { window: None, causal_in_block: false };

    /// A sliding layer as served: causal within the block.
    pub const fn sliding(window: usize) -> Self {
        Self { window: Some((window, WindowRule::Serving)), causal_in_block: true }
    }

    /// Document positions visible to slot `slot` of the block at `anchor`.
    pub fn context(&self, anchor: usize, slot: usize) -> Range<usize> {
        let first = match self.window {
            None => 0,
            Some((window, WindowRule::Serving)) => (anchor + slot + 1).saturating_sub(window),
            Some((window, WindowRule::Speculators)) => anchor.saturating_sub(window),
        };
        first.min(anchor)..anchor
    }

    /// Slots of its own block, of `block_size`, visible to slot `slot`.
    ///
    /// A served window includes them, so a window smaller than the block ends inside it.
    pub fn own(&self, slot: usize, block_size: usize) -> Range<usize> {
        if !self.causal_in_block {
            return 0..block_size;
        }
        let first = match self.window {
            Some((window, WindowRule::Serving)) => (slot + 1).saturating_sub(window),
            _ => 0,
        };
        first..slot + 1
    }
}

/// A document with anchors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentSpan {
    /// Range of its anchors in the row's sorted anchors.
    pub anchors: Range<usize>,
    /// Its first position in the packed row.
    pub row_start: usize,
    /// Document positions that go through the draft as context.
    pub context: Range<usize>,
    /// Index of the first of them among the context rows.
    pub context_row: usize,
}

/// A stretch of context rows that the queries of a chunk attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Range of context rows.
    pub context: Range<usize>,
    /// Visible columns of each slot in the chunk, relative to `context`; `None` if every slot sees
    /// all.
    pub row_limits: Option<Vec<Range<usize>>>,
}

/// Neighbouring anchors of one document that are processed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    /// Range in the row's sorted anchors.
    pub anchors: Range<usize>,
    /// Disjoint ranges that cover everything visible to the chunk's slots.
    pub segments: Vec<Segment>,
}

/// The blocks of one packed row and the context they need.
#[derive(Clone, Debug)]
pub struct BlockPlan {
    block_size: usize,
    anchors: Vec<usize>,
    spans: Vec<DocumentSpan>,
    context_rows: usize,
}

impl BlockPlan {
    /// Plans blocks of `block_size` at `anchors` (ascending positions in the packed row) over
    /// documents that begin at `document_starts` (last entry: the end of the last document).
    ///
    /// `visibilities` are those of all layers: if each has a window, context before the earliest
    /// window is dropped.
    ///
    /// # Panics
    /// If the anchors are not ascending or are outside the documents: a bug of the caller.
    pub fn new(
        document_starts: &[usize],
        anchors: &[usize],
        block_size: usize,
        visibilities: &[Visibility],
    ) -> Self {
        assert!(anchors.is_sorted(), "anchors must be ascending");
        let mut spans = Vec::new();
        let (mut next, mut context_rows) = (0, 0);
        for bounds in document_starts.windows(2) {
            let first = next;
            next += anchors[first..].partition_point(|&anchor| anchor < bounds[1]);
            if next == first {
                continue;
            }
            assert!(anchors[first] >= bounds[0], "an anchor lies between documents");
            let earliest = visibilities
                .iter()
                .map(|visibility| visibility.context(anchors[first] - bounds[0], 0).start)
                .min()
                .unwrap_or(0);
            let context = earliest..anchors[next - 1] - bounds[0];
            let length = context.len();
            spans.push(DocumentSpan {
                anchors: first..next,
                row_start: bounds[0],
                context,
                context_row: context_rows,
            });
            context_rows += length;
        }
        assert_eq!(next, anchors.len(), "an anchor lies beyond the last document");
        Self { block_size, anchors: anchors.to_vec(), spans, context_rows }
    }

    /// Slots per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Positions of the anchors in the packed row, ascending.
    pub fn anchors(&self) -> &[usize] {
        &self.anchors
    }

    /// Total number of slots: anchors times block size.
    pub fn slots(&self) -> usize {
        self.anchors.len() * self.block_size
    }

    /// Number of context rows.
    pub fn context_rows(&self) -> usize {
        self.context_rows
    }

    /// The documents that have anchors, in order.
    pub fn spans(&self) -> &[DocumentSpan] {
        &self.spans
    }

    /// Positions in the packed row of all context rows, as ranges in order.
    pub fn context_sources(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.spans
            .iter()
            .map(|span| span.row_start + span.context.start..span.row_start + span.context.end)
    }

    /// Position of each context row in its document.
    pub fn context_positions(&self) -> Vec<i64> {
        self.spans.iter().flat_map(|span| span.context.clone().map(|p| p as i64)).collect()
    }

    /// Position of each anchor in its document.
    pub(crate) fn anchor_positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.spans.iter().flat_map(|span| {
            self.anchors[span.anchors.clone()].iter().map(|anchor| anchor - span.row_start)
        })
    }

    /// Position of each slot in its document: the anchor's plus the slot's index.
    pub fn slot_positions(&self) -> Vec<i64> {
        let block = |anchor| anchor..anchor + self.block_size;
        self.anchor_positions().flat_map(block).map(|position| position as i64).collect()
    }

    /// Chunks of all documents for layers with `visibility`; `group` query heads share a key head.
    pub fn chunks(&self, visibility: &Visibility, group: usize) -> Vec<ChunkPlan> {
        let per_chunk = (CHUNK_ROWS / (self.block_size * group)).max(1);
        let mut chunks = Vec::new();
        for span in &self.spans {
            let mut start = span.anchors.start;
            while start < span.anchors.end {
                let end = (start + per_chunk).min(span.anchors.end);
                let segments = self.segments(span, start..end, visibility);
                chunks.push(ChunkPlan { anchors: start..end, segments });
                start = end;
            }
        }
        chunks
    }

    /// Splits what a chunk sees into an unmasked middle and masked edges.
    fn segments(
        &self,
        span: &DocumentSpan,
        anchors: Range<usize>,
        visibility: &Visibility,
    ) -> Vec<Segment> {
        let rows: Vec<Range<usize>> = self.anchors[anchors]
            .iter()
            .flat_map(|anchor| {
                let anchor = anchor - span.row_start;
                (0..self.block_size).map(move |slot| visibility.context(anchor, slot))
            })
            .collect();
        let bound = |pick: fn(&Range<usize>) -> usize| {
            let values = rows.iter().map(pick);
            (values.clone().min().unwrap_or(0), values.max().unwrap_or(0))
        };
        let (start_min, start_max) = bound(|row| row.start);
        let (end_min, end_max) = bound(|row| row.end);
        let cuts = if start_max + OWN_CALL_ROWS <= end_min {
            [start_min..start_max, start_max..end_min, end_min..end_max]
        } else {
            [start_min..end_max, 0..0, 0..0]
        };
        cuts.iter().filter(|cut| !cut.is_empty()).map(|cut| segment(span, cut, &rows)).collect()
    }
}

fn segment(span: &DocumentSpan, cut: &Range<usize>, rows: &[Range<usize>]) -> Segment {
    let limits: Vec<Range<usize>> = rows
        .iter()
        .map(|row| {
            let start = row.start.clamp(cut.start, cut.end) - cut.start;
            let end = row.end.clamp(cut.start, cut.end) - cut.start;
            start..end.max(start)
        })
        .collect();
    assert!(
        span.context.start <= cut.start && cut.end <= span.context.end,
        "a layer looks beyond the context that the plan was made for"
    );
    let whole = limits.iter().all(|limit| *limit == (0..cut.len()));
    let offset = span.context_row + cut.start - span.context.start;
    Segment { context: offset..offset + cut.len(), row_limits: (!whole).then_some(limits) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every (anchor index, slot, context row) visible through the chunks.
    fn seen(plan: &BlockPlan, visibility: &Visibility) -> Vec<(usize, usize, usize)> {
        let mut seen = Vec::new();
        for chunk in plan.chunks(visibility, 2) {
            for segment in &chunk.segments {
                for row in 0..chunk.anchors.len() * plan.block_size() {
                    let anchor = chunk.anchors.start + row / plan.block_size();
                    let columns = match &segment.row_limits {
                        None => 0..segment.context.len(),
                        Some(limits) => limits[row].clone(),
                    };
                    let slot = row % plan.block_size();
                    seen.extend(columns.map(|c| (anchor, slot, segment.context.start + c)));
                }
            }
        }
        seen.sort_unstable();
        seen
    }

    fn expected(plan: &BlockPlan, starts: &[usize], v: &Visibility) -> Vec<(usize, usize, usize)> {
        let sources: Vec<usize> = plan.context_sources().flatten().collect();
        let document = |p: usize| starts.partition_point(|&s| s <= p) - 1;
        let mut expected = Vec::new();
        for (index, &anchor) in plan.anchors().iter().enumerate() {
            let start = starts[document(anchor)];
            for slot in 0..plan.block_size() {
                for (row, &source) in sources.iter().enumerate() {
                    let same = document(source) == document(anchor);
                    if same && v.context(anchor - start, slot).contains(&(source - start)) {
                        expected.push((index, slot, row));
                    }
                }
            }
        }
        expected
    }

    #[test]
    fn chunks_show_exactly_what_the_rule_allows() {
        let starts = [0, 40, 41, 300, 420];
        let anchors: Vec<usize> =
            (3..40).step_by(3).chain((60..290).step_by(2)).chain([301, 419]).collect();
        let windows = [
            Visibility::FULL,
            Visibility::sliding(1),
            Visibility::sliding(9),
            Visibility::sliding(1000),
            Visibility { window: Some((7, WindowRule::Speculators)), causal_in_block: true },
        ];
        for visibility in windows {
            let plan = BlockPlan::new(&starts, &anchors, 8, &[visibility]);
            let want = expected(&plan, &starts, &visibility);
            assert!(!want.is_empty() || visibility.window == Some((1, WindowRule::Serving)));
            assert_eq!(seen(&plan, &visibility), want, "{visibility:?}");
        }
    }

    #[test]
    fn a_served_window_ends_inside_a_larger_block() {
        let check = |visibility: Visibility, expected: [Range<usize>; 4]| {
            assert_eq!([0, 1, 2, 3].map(|slot| visibility.own(slot, 4)), expected);
        };
        check(Visibility::FULL, [0..4, 0..4, 0..4, 0..4]);
        check(Visibility::sliding(4), [0..1, 0..2, 0..3, 0..4]);
        check(Visibility::sliding(2), [0..1, 0..2, 1..3, 2..4]);
        let fixed = Visibility { window: Some((2, WindowRule::Speculators)), ..Visibility::FULL };
        check(fixed, [0..4, 0..4, 0..4, 0..4]);
        check(Visibility { causal_in_block: true, ..fixed }, [0..1, 0..2, 0..3, 0..4]);
    }

    #[test]
    fn only_visible_context_travels() {
        let plan = BlockPlan::new(&[0, 10, 20], &[4, 7], 4, &[Visibility::FULL]);
        assert_eq!(plan.context_rows(), 7);
        assert!(plan.context_sources().flatten().eq(0..7));
        let plan = BlockPlan::new(&[0, 10, 20], &[14, 17], 4, &[Visibility::sliding(3)]);
        assert!(plan.context_sources().flatten().eq(12..17));
        assert_eq!(plan.slot_positions(), [4, 5, 6, 7, 7, 8, 9, 10]);
        assert_eq!(plan.context_positions(), [2, 3, 4, 5, 6]);
    }

    #[test]
    fn an_anchor_at_a_documents_start_sees_no_context() {
        let plan = BlockPlan::new(&[0, 5], &[0], 4, &[Visibility::FULL]);
        assert_eq!(plan.context_rows(), 0);
        assert!(plan.chunks(&Visibility::FULL, 1)[0].segments.is_empty());
    }
}
