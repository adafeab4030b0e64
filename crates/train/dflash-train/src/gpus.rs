//! GPU capabilities by name: NVIDIA's figures, and the attention efficiency of each family.

/// A model of GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gpu {
    /// Substring of the name reported by the driver.
    pub(crate) name: &'static str,
    /// Dense bfloat16 peak of the tensor cores with float32 accumulation, TFLOP/s.
    pub(crate) tflops: f64,
    /// Peak memory bandwidth, GB/s.
    pub(crate) bandwidth: f64,
    /// Memory, GB.
    pub(crate) memory: f64,
    /// GPU family.
    pub(crate) family: Family,
}

/// Determines the share of the peak that libtorch's flash attention reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// A100, RTX 30.
    Ampere,
    /// L4, L40, RTX 40.
    Ada,
    /// H100, H200.
    Hopper,
    /// B200, RTX 50.
    Blackwell,
}

use Family::{Ada, Ampere, Blackwell, Hopper};

const fn gpu(name: &'static str, tflops: f64, bandwidth: f64, memory: f64, family: Family) -> Gpu {
    Gpu { name, tflops, bandwidth, memory, family }
}

/// From NVIDIA's data sheets and architecture white papers, which usually print the doubled peak
/// "with sparsity". The first entry whose name occurs in the GPU's counts.
const GPUS: [Gpu; 23] = [
    gpu("GB200", 2500.0, 8000.0, 186.0, Blackwell),
    gpu("B200", 2250.0, 8000.0, 180.0, Blackwell),
    gpu("H200 NVL", 835.0, 4800.0, 141.0, Hopper),
    gpu("H200", 989.0, 4800.0, 141.0, Hopper),
    gpu("H100 NVL", 835.0, 3900.0, 94.0, Hopper),
    gpu("H100 PCIe", 756.0, 2000.0, 80.0, Hopper),
    gpu("H100", 989.0, 3350.0, 80.0, Hopper),
    gpu("H800", 989.0, 3350.0, 80.0, Hopper),
    gpu("H20", 148.0, 4000.0, 96.0, Hopper),
    gpu("A100-SXM4-40GB", 312.0, 1555.0, 40.0, Ampere),
    gpu("A100-PCIE-40GB", 312.0, 1555.0, 40.0, Ampere),
    gpu("A100", 312.0, 2039.0, 80.0, Ampere),
    gpu("A800", 312.0, 2039.0, 80.0, Ampere),
    gpu("A30", 165.0, 933.0, 24.0, Ampere),
    gpu("A40", 149.7, 696.0, 48.0, Ampere),
    gpu("A10", 125.0, 600.0, 24.0, Ampere),
    gpu("L40S", 362.0, 864.0, 48.0, Ada),
    gpu("L40", 181.0, 864.0, 48.0, Ada),
    gpu("L4", 121.0, 300.0, 24.0, Ada),
    gpu("RTX 6000 Ada", 364.2, 960.0, 48.0, Ada),
    gpu("RTX 5090", 209.5, 1792.0, 32.0, Blackwell),
    gpu("RTX 4090", 165.2, 1008.0, 24.0, Ada),
    gpu("RTX 3090", 71.0, 936.0, 24.0, Ampere),
];

impl Gpu {
    /// Finds a GPU by the name from the driver or a user: any case, or the number alone.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let name = name.trim().to_lowercase();
        if name.is_empty() {
            return None;
        }
        let known = |gpu: &&Self| contains_name(&name, &gpu.name.to_lowercase());
        let typed = |gpu: &&Self| gpu.name.to_lowercase().split(' ').any(|word| word == name);
        GPUS.iter().find(known).or_else(|| GPUS.iter().find(typed)).copied()
    }

    /// The name that a mistyped one is probably for.
    pub(crate) fn nearest(name: &str) -> Option<&'static str> {
        dflash_settings::nearest(name, GPUS.map(|gpu| gpu.name))
    }

    /// All names, for messages.
    pub(crate) fn names() -> String {
        GPUS.map(|gpu| gpu.name).join(", ")
    }
}

/// Whether `name` has `part` in it as a word of its own: an H1000 or an A10G is not an H100 or an A10,
/// and a laptop's GPU is smaller than its name. A GH200 and a GB200 are what they contain.
fn contains_name(name: &str, part: &str) -> bool {
    let is_whole = |(at, part): (usize, &str)| {
        let (before, after) = (&name[..at], &name[at + part.len()..]);
        let starts = before.ends_with(|letter: char| !letter.is_alphanumeric());
        let is_grace = before == "g" || before.ends_with(" g");
        let ends = after.chars().next().is_none_or(|letter| !letter.is_alphanumeric());
        (before.is_empty() || starts || is_grace) && ends
    };
    !name.contains("laptop") && name.match_indices(part).any(is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_find_their_own_figures() {
        let check = |name: &str, tflops: Option<f64>| {
            assert_eq!(Gpu::named(name).map(|gpu| gpu.tflops), tflops, "{name}");
        };
        check("NVIDIA H100 80GB HBM3", Some(989.0));
        check("NVIDIA H100 PCIe", Some(756.0));
        check("NVIDIA H200", Some(989.0));
        check("NVIDIA GH200 480GB", Some(989.0));
        check("NVIDIA H20", Some(148.0));
        check("NVIDIA A100-SXM4-80GB", Some(312.0));
        check("NVIDIA L40S", Some(362.0));
        check("NVIDIA L4", Some(121.0));
        check("NVIDIA GeForce RTX 4090", Some(165.2));
        check("NVIDIA GB200", Some(2500.0));
        check("NVIDIA Unheard 9", None);
        check("NVIDIA A10G", None);
        check("NVIDIA GeForce RTX 4090 Laptop GPU", None);
        check("h100x", None);
        check("notanh100really", None);
        for other in ["h1000", "b2000", "NVIDIA L400", "a1000"] {
            check(other, None);
        }
        for (typed, tflops) in
            [("h200", 989.0), ("h100", 989.0), ("b200", 2250.0), ("a100", 312.0), ("4090", 165.2)]
        {
            check(typed, Some(tflops));
        }
        check("", None);
        assert_eq!(Gpu::named("NVIDIA A100-SXM4-40GB").unwrap().memory, 40.0);
    }
}
