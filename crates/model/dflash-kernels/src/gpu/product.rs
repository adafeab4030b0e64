//! Half-precision matrix products accumulated in float32.

use dflash_torch_sys::ffi::{self, Failure, RawTensor};
use tch::{Kind, Tensor};

// Defined in `cpp/device.cpp` of the bindings.
unsafe extern "C" {
    fn dflash_add_product(
        sum: *const RawTensor,
        left: *const RawTensor,
        right: *const RawTensor,
    ) -> Failure;
}

/// `sum += left right` for a float32 `sum` and half-precision factors on a GPU: accumulated in
/// float32 without rounding, in one call.
///
/// # Panics
/// If libtorch refuses the call, as tch does: tensors that are not on a GPU, for example.
pub fn add_product(sum: &Tensor, left: &Tensor, right: &Tensor) {
    assert!(sum.kind() == Kind::Float && left.kind() == right.kind());
    let raw = |x: &Tensor| x.as_ptr().cast::<std::ffi::c_void>();
    // SAFETY: live tensors.
    let failure = unsafe { dflash_add_product(raw(sum), raw(left), raw(right)) };
    ffi::checked("add a product", failure).unwrap_or_else(|error| panic!("{error}"));
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// The call reaches libtorch's dispatcher, which has this operator only for GPUs.
    #[test]
    fn a_cpu_refuses_it_by_name() {
        let refused = std::panic::catch_unwind(|| {
            let half = Tensor::zeros([2, 2], (Kind::BFloat16, Device::Cpu));
            add_product(&half.to_kind(Kind::Float), &half, &half);
        });
        let message = *refused.unwrap_err().downcast::<String>().unwrap();
        assert!(
            message.starts_with("add a product: Could not run 'aten::addmm.dtype"),
            "{message}"
        );
    }
}
