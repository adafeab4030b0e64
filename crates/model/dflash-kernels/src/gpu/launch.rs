//! Runs a kernel of `cuda/kernels.cu` on a GPU or in the CPU emulation, or only records it on the
//! fake GPU; name, size and argument struct are the same in all cases.

use std::ffi::{CString, c_char, c_void};

use dflash_torch_sys::ffi::Failure;
use dflash_torch_sys::trace;
use tch::{Device, Kind, Tensor};

use super::image;

unsafe extern "C" {
    fn dflash_emulate(
        name: *const c_char,
        blocks: u32,
        threads: u32,
        shared: usize,
        arguments: *const c_void,
        bytes: usize,
    ) -> Failure;
    #[cfg(test)]
    fn dflash_emulated_kernel(index: usize, bytes: *mut usize) -> *const c_char;
}

/// Where the kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runner {
    /// On the GPU with this index, on libtorch's current stream.
    Gpu(usize),
    /// On CPU tensors, emulated thread by thread; slow, for tests.
    Emulation,
}

impl Runner {
    fn holds(self, x: &Tensor) -> bool {
        x.device()
            == match self {
                Self::Gpu(index) => Device::Cuda(index),
                Self::Emulation => Device::Cpu,
            }
    }

    fn is_fake_cuda(self) -> bool {
        self != Self::Emulation && trace::is_fake_cuda()
    }
}

/// A kernel and its threads per block. Names are those of `DFLASH_KERNELS` in the source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    pub(super) threads: u32,
}

/// Everything for a launch except the argument struct.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) kernel: Kernel,
    /// Name suffix of the instance, [`Moves::instance`].
    pub(super) instance: &'static str,
    pub(super) blocks: i64,
    /// Shared memory per block, in floats.
    pub(super) shared: i64,
    /// All tensors that the kernel reads, and all that it writes.
    pub(super) reads: &'a [&'a Tensor],
    pub(super) writes: &'a [&'a Tensor],
}

impl Launch<'_> {
    /// Launches the kernel. `arguments` builds the argument struct; it is not called on a fake GPU,
    /// which has no pointers.
    ///
    /// # Panics
    /// If the driver refuses the launch, as tch does on libtorch errors.
    pub(super) fn run<A: Copy>(&self, runner: Runner, arguments: impl FnOnce() -> A) {
        let all = || self.reads.iter().chain(self.writes);
        let name = self.kernel.name;
        assert!(all().all(|x| runner.holds(x)), "{name}: a tensor lies on another device");
        if self.blocks == 0 {
            return;
        }
        if runner.is_fake_cuda() {
            return trace::own_kernel(name, self.reads, self.writes);
        }
        let blocks = u32::try_from(self.blocks).expect("a row has fewer than 2^32 blocks");
        let shared = usize::try_from(self.shared).expect("not negative") * size_of::<f32>();
        let size = Size { blocks, threads: self.kernel.threads, shared };
        let mut arguments = arguments();
        let place = (&raw mut arguments).cast::<c_void>();
        // SAFETY: the struct is the kernel's, and its pointers are live and large enough, as its
        // builder in `gpu.rs` has checked.
        let outcome = unsafe {
            match runner {
                Runner::Gpu(index) => {
                    let name = image::KernelInstance { name, instance: self.instance };
                    image::launch(index, name, size, place).map_err(|error| error.to_string())
                }
                Runner::Emulation => {
                    emulate(&(name.to_owned() + self.instance), size, place, size_of::<A>())
                }
            }
        };
        outcome.unwrap_or_else(|error| panic!("{name}{}: {error}", self.instance));
    }
}

/// Blocks, threads per block, shared bytes per block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) blocks: u32,
    pub(super) threads: u32,
    pub(super) shared: usize,
}

/// # Safety
/// `arguments` must point to the kernel's struct with valid pointers.
unsafe fn emulate(
    name: &str,
    size: Size,
    arguments: *mut c_void,
    bytes: usize,
) -> Result<(), String> {
    let name = CString::new(name).expect("names have no NUL");
    let Size { blocks, threads, shared } = size;
    // SAFETY: guaranteed by the caller; the name is NUL-terminated.
    let failure =
        unsafe { dflash_emulate(name.as_ptr(), blocks, threads, shared, arguments, bytes) };
    failure.message().map_or(Ok(()), Err)
}

/// Largest unit that a thread of the kernel moves at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moves {
    Sixteen,
    /// Two elements: the two halves of a head.
    Pair,
}

impl Moves {
    /// The kernel's instance for `kind`. It moves several elements at once if `sizes`, in elements,
    /// are multiples and all `tensors` are aligned.
    pub(super) fn instance(
        self,
        runner: Runner,
        kind: Kind,
        tensors: &[&Tensor],
        sizes: &[i64],
    ) -> &'static str {
        let several = match (self, kind) {
            (Self::Sixteen, Kind::BFloat16) => 8,
            (Self::Sixteen, _) => 4,
            (Self::Pair, _) => 2,
        };
        let fits = sizes.iter().all(|size| size % several == 0)
            && tensors.iter().all(|x| begins_at_multiple(runner, x, several as usize));
        match (self, kind, fits) {
            (Self::Sixteen, Kind::BFloat16, true) => "_bf16x8",
            (Self::Pair, Kind::BFloat16, true) => "_bf16x2",
            (_, Kind::BFloat16, false) => "_bf16x1",
            (Self::Sixteen, Kind::Float, true) => "_f32x4",
            (Self::Pair, Kind::Float, true) => "_f32x2",
            (_, Kind::Float, false) => "_f32x1",
            _ => panic!("the kernels take float32 and bfloat16, not {kind:?}"),
        }
    }
}

/// Whether `x` is aligned to `elements`. Fake tensors have no address and count as aligned.
pub(super) fn begins_at_multiple(runner: Runner, x: &Tensor, elements: usize) -> bool {
    let bytes = elements * x.kind().elt_size_in_bytes();
    runner.is_fake_cuda() || (x.data_ptr() as usize).is_multiple_of(bytes)
}

/// Name and struct size of every kernel in the source.
#[cfg(test)]
pub(super) fn kernels() -> Vec<(String, usize)> {
    let mut all = Vec::new();
    let mut bytes = 0;
    // SAFETY: null, or a static string.
    unsafe {
        loop {
            let name = dflash_emulated_kernel(all.len(), &mut bytes);
            if name.is_null() {
                return all;
            }
            all.push((std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned(), bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<A: Copy>(name: &str, threads: u32, mut arguments: A) -> Result<(), String> {
        let size = Size { blocks: 1, threads, shared: 4096 };
        // SAFETY: the call is refused before the struct is read.
        unsafe { emulate(name, size, (&raw mut arguments).cast(), size_of::<A>()) }
    }

    #[test]
    fn a_launch_that_is_not_the_kernels_is_refused() {
        assert!(run("swiglu_f32x3", 32, [0u64; 3]).unwrap_err().contains("no such kernel"));
        assert!(run("swiglu_f32x4", 32, [0u64; 4]).unwrap_err().contains("another size"));
        assert!(run("swiglu_f32x4", 40, [0u64; 3]).unwrap_err().contains("whole warps"));
    }
}
