//! Products of half precision into a float32 sum.

use dflash_torch_sys::ffi::{self, Failure, RawTensor};
use tch::{Kind, Tensor};

// In `cpp/device.cpp` of the bindings.
unsafe extern "C" {
    fn dflash_add_product(
        sum: *const RawTensor,
        left: *const RawTensor,
        right: *const RawTensor,
    ) -> Failure;
}

/// `sum += left right`, for a float32 `sum` and factors in half precision on a GPU: the product is added
/// up in float32 and never rounded, in one call.
///
/// # Panics
/// Where libtorch refuses it, as tch does: tensors that are not on a GPU, for one.
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

    /// It gets as far as libtorch's dispatcher, which has the operator for GPUs alone.
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
