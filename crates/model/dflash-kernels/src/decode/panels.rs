//! Storage of packed matrices, with packing and unpacking.
//!
//! A panel is 32 columns stored depth by depth, in 4-byte words: one float32, or two consecutive
//! bfloat16 of a column, the first in the low half. Transposition here moves whole words.

use std::ffi::c_void;
use std::ops::Range;
use std::thread;

use memmap2::MmapMut;

use super::matrix::PANEL;
use super::raw;

/// Words per panel row.
const WIDTH: usize = PANEL as usize;
/// Rows transposed at a time: a cache line of each column.
const TILE: usize = 16;
/// Minimum words per thread.
const SHARE: usize = 1 << 16;

/// Adjacent columns of a panel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    pub(super) panel: usize,
    pub(super) lanes: Range<usize>,
}

/// Panels, [count, depth, 32] words. The memory map provides zero pages on first write.
#[derive(Debug)]
pub(super) struct Panels {
    memory: MmapMut,
    /// Words per column.
    depth: usize,
    count: usize,
}

impl Panels {
    /// Zeroed panels.
    ///
    /// # Panics
    /// When memory runs out.
    pub(super) fn new(count: usize, depth: usize) -> Self {
        let bytes = (count * depth * WIDTH * 4).max(1);
        // libtorch's wording, so that callers recognise it as out of memory.
        let memory = MmapMut::map_anon(bytes).unwrap_or_else(|error| {
            panic!("can't allocate memory: {bytes} bytes of packed weights: {error}")
        });
        Self { memory, depth, count }
    }

    pub(super) fn bytes(&self) -> usize {
        self.count * self.depth * WIDTH * 4
    }

    pub(super) fn pointer(&self) -> *const c_void {
        self.memory.as_ptr().cast()
    }

    fn words(&self) -> &[u32] {
        // SAFETY: the map is page-aligned, has this many words, and any bit pattern is valid.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.bytes() / 4) }
    }

    fn words_mut(&mut self) -> &mut [u32] {
        let words = self.bytes() / 4;
        // SAFETY: as in `words`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), words) }
    }

    fn panel(&self, panel: usize) -> &[u32] {
        let size = self.depth * WIDTH;
        &self.words()[panel * size..(panel + 1) * size]
    }

    pub(super) fn floats_of_all(&self) -> &[f32] {
        // SAFETY: as in `words`.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.bytes() / 4) }
    }

    /// Sums a range of words; the cost is that of reading them.
    pub(super) fn sum(&self, Range { start, end }: Range<usize>) -> u64 {
        let mut sums = [0u64; 8 * TILE];
        let mut tiles = self.words()[start..end].chunks_exact(sums.len());
        for tile in &mut tiles {
            sums.iter_mut().zip(tile).for_each(|(sum, &word)| *sum += u64::from(word));
        }
        sums.iter().sum::<u64>()
            + tiles.remainder().iter().map(|&word| u64::from(word)).sum::<u64>()
    }

    /// Writes `rows` [columns, depth] to the columns of `runs`.
    pub(super) fn put(&mut self, runs: &[Columns], mut rows: &[u32], threads: usize) {
        let (size, depth) = (self.depth * WIDTH, self.depth);
        // Split by panel: within such a group, consecutive runs are in consecutive panels.
        for runs in runs.chunk_by(|run, next| next.panel == run.panel + 1) {
            let panels = self.words_mut()[runs[0].panel * size..].chunks_exact_mut(size);
            let mut work: Vec<_> = panels
                .zip(runs)
                .map(|(panel, run)| {
                    let (own, others) = rows.split_at(run.lanes.len() * depth);
                    rows = others;
                    (panel, run.lanes.start, own)
                })
                .collect();
            let shares = (runs.len() * size).div_ceil(SHARE).min(threads);
            in_shares(&mut work, shares, |(panel, lane, rows)| turn(panel, *lane, rows, depth));
        }
    }

    /// Writes the columns of `runs` side by side to `out`: [depth, columns], or twice as many rows
    /// if a word holds two values.
    ///
    /// # Safety
    /// `out` must have room for them.
    pub(super) unsafe fn unpack(
        &self,
        runs: &[Columns],
        way: raw::Unpack,
        out: *mut c_void,
        threads: usize,
    ) {
        let run = |Columns { panel, lanes }: &Columns| {
            assert!(*panel < self.count && lanes.end <= WIDTH, "{panel}, {lanes:?}");
            let [panel, lane, count] = [*panel, lanes.start, lanes.len()].map(|x| x as i64);
            raw::Columns { panel, lane, count }
        };
        let runs: Vec<raw::Columns> = runs.iter().map(run).collect();
        let width: i64 = runs.iter().map(|run| run.count).sum();
        let shares = (self.depth * width as usize).div_ceil(SHARE).clamp(1, threads.max(1));
        // SAFETY: the panels have these columns, and `out` has room.
        unsafe {
            raw::dflash_unpack(
                self.memory.as_ptr().cast(),
                self.depth as i64,
                runs.as_ptr(),
                runs.len() as i64,
                width,
                way,
                out,
                shares as i64,
            );
        }
    }

    /// Reads a float32 column.
    pub(super) fn row(&self, panel: usize, lane: usize, x: &mut [f32]) {
        let column = self.panel(panel)[lane..].iter().step_by(WIDTH);
        x.iter_mut().zip(column).for_each(|(x, &word)| *x = f32::from_bits(word));
    }

    /// Reads a column of bfloat16 pairs as float32.
    pub(super) fn widened_row(&self, panel: usize, lane: usize, x: &mut [f32]) {
        let column = self.panel(panel)[lane..].iter().step_by(WIDTH);
        for (pair, &word) in x.chunks_mut(2).zip(column) {
            pair[0] = f32::from_bits(word << 16);
            if let Some(second) = pair.get_mut(1) {
                *second = f32::from_bits(word & 0xffff_0000);
            }
        }
    }
}

/// Transposes `rows` [columns, depth] into the columns of `panel` from `lane` on.
fn turn(panel: &mut [u32], lane: usize, rows: &[u32], depth: usize) {
    for start in (0..depth).step_by(TILE) {
        let end = (start + TILE).min(depth);
        for (column, row) in rows.chunks_exact(depth).enumerate() {
            let out = panel[start * WIDTH + lane + column..].iter_mut().step_by(WIDTH);
            out.zip(&row[start..end]).for_each(|(out, &word)| *out = word);
        }
    }
}

/// Runs `each` on the items of `work`, on up to `threads` threads including the current one.
fn in_shares<T: Send>(work: &mut [T], threads: usize, each: impl Fn(&mut T) + Sync) {
    let share = work.len().div_ceil(threads.max(1)).max(1);
    let mut shares = work.chunks_mut(share);
    let own = shares.next();
    thread::scope(|scope| {
        for share in shares {
            let each = &each;
            scope.spawn(move || share.iter_mut().for_each(each));
        }
        own.into_iter().flatten().for_each(&each);
    });
}
