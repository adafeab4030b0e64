//! Scratch memory of the kernels.

/// A cache line of floats, for vector alignment.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Line([f32; 16]);

/// Scratch memory kept between calls; it grows to the largest request.
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
