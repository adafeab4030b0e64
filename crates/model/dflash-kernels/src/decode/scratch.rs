//! Memory that the kernels work in.

/// A cache line of floats, for the alignment of whole vectors.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Line([f32; 16]);

/// Memory of calls, kept between them: it grows to what the largest takes.
#[derive(Debug, Default)]
pub(super) struct Scratch(Vec<Line>);

impl Scratch {
    /// At least `count` floats, aligned to a cache line.
    pub(super) fn floats(&mut self, count: i64) -> *mut f32 {
        let lines = (count as usize).div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        self.0.as_mut_ptr().cast()
    }
}
