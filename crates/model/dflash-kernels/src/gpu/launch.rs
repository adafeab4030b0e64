//! Starts a kernel of `cuda/kernels.cu` on a GPU, in the CPU emulation, or only records it on the
//! fake GPU, always with the same name, size and argument struct.

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
    /// On the GPU of this number, behind what libtorch put on its current stream.
    Gpu(usize),
    /// On CPU tensors, thread by thread: slow, for tests.
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

/// A kernel and the threads of a block. The names are those of `DFLASH_KERNELS` in the source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    pub(super) threads: u32,
}

/// A kernel with all that a launch of it takes but its struct.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) kernel: Kernel,
    /// Which of the kernel's instances, [`Moves::instance`].
    pub(super) instance: &'static str,
    pub(super) blocks: i64,
    /// Floats that the threads of a block share.
    pub(super) shared: i64,
    /// All tensors that it reads, and all that it writes or changes.
    pub(super) reads: &'a [&'a Tensor],
    pub(super) writes: &'a [&'a Tensor],
}

impl Launch<'_> {
    /// Starts it. `arguments` makes the kernel's struct; where the CUDA device is fake there are no
    /// pointers, and it is not called.
    ///
    /// # Panics
    /// Where the driver refuses the launch, as tch does where libtorch fails.
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
        // SAFETY: the struct is the kernel's, and what it points to is alive and large enough: its
        // maker in `gpu.rs` has checked that.
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

/// Blocks, threads of each, bytes that these share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) blocks: u32,
    pub(super) threads: u32,
    pub(super) shared: usize,
}

/// # Safety
/// `arguments` is the kernel's struct, whose pointers are good.
unsafe fn emulate(
    name: &str,
    size: Size,
    arguments: *mut c_void,
    bytes: usize,
) -> Result<(), String> {
    let name = CString::new(name).expect("names have no NUL");
    let Size { blocks, threads, shared } = size;
    // SAFETY: the caller's; the name ends with NUL.
    let failure =
        unsafe { dflash_emulate(name.as_ptr(), blocks, threads, shared, arguments, bytes) };
    failure.message().map_or(Ok(()), Err)
}

/// How many bytes a thread of a kernel moves at once at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moves {
    Sixteen,
    /// Two elements: halves of a head.
    Pair,
}

impl Moves {
    /// The instance of a kernel for tensors of `kind`: several elements at once where `sizes`, in
    /// elements, are multiples of them and all `tensors` begin at one.
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

/// Whether `x` begins at a multiple of `elements`. A fake tensor has no address, and is taken to.
pub(super) fn begins_at_multiple(runner: Runner, x: &Tensor, elements: usize) -> bool {
    let bytes = elements * x.kind().elt_size_in_bytes();
    runner.is_fake_cuda() || (x.data_ptr() as usize).is_multiple_of(bytes)
}

/// Names and bytes of the structs of all kernels that the source has.
#[cfg(test)]
pub(super) fn kernels() -> Vec<(String, usize)> {
    let mut all = Vec::new();
    let mut bytes = 0;
    // SAFETY: null, or a static text.
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
        // SAFETY: each is refused before its struct is read.
        unsafe { emulate(name, size, (&raw mut arguments).cast(), size_of::<A>()) }
    }

    #[test]
    fn a_launch_that_is_not_the_kernels_is_refused() {
        assert!(run("swiglu_f32x3", 32, [0u64; 3]).unwrap_err().contains("no such kernel"));
        assert!(run("swiglu_f32x4", 32, [0u64; 4]).unwrap_err().contains("another size"));
        assert!(run("swiglu_f32x4", 40, [0u64; 3]).unwrap_err().contains("whole warps"));
    }
}
