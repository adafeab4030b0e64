//! Times the matmuls of decoding on one thread, at every CPU instruction level that this processor
//! supports, against their bounds: multiply-adds on registers only, and a plain read of the same
//! weights.
//!
//! Prints a line per level, product type, shape and number of rows: GFLOP/s and their share of the
//! register bound, GB/s of weights and their share of the plain read. `kernels avx2 avx512` selects
//! levels.

#![allow(unsafe_code, reason = "loops of one level, called where the processor has it")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use dflash_kernels::decode::{Head, Products, floats, floats_mut};
use dflash_kernels::{CpuLevel, at_cpu_level};
use tch::{Device, Kind, Tensor};

/// Depth and outputs, and whether weights exceed the caches.
const SHAPES: [(i64, i64, bool); 4] =
    [(256, 512, false), (256, 1536, false), (1024, 3072, false), (1024, 131_072, true)];
const ROWS: [i64; 4] = [1, 4, 8, 64];
const TYPES: [Products; 3] = [Products::Float32, Products::Bfloat16Weights, Products::Bfloat16];

fn main() {
    tch::set_num_threads(1);
    let named: Vec<String> = std::env::args().skip(1).collect();
    let is_wanted = |level: &CpuLevel| named.is_empty() || named.iter().any(|n| n == level.name());
    println!("level       products         shape          rows  GFLOP/s  of peak    GB/s  of read");
    for (depth, outputs, is_beyond) in SHAPES {
        let weight_io = Tensor::randn([depth, outputs], (Kind::Float, Device::Cpu));
        // Values exact in bfloat16, so that all types use the same numbers.
        let weight_io = weight_io.to_kind(Kind::BFloat16).to_kind(Kind::Float);
        for products in TYPES {
            let head = Head::new(&weight_io, products);
            for level in CpuLevel::here().into_iter().filter(is_wanted) {
                let bounds = Bounds::of(level, bytes(products, depth, outputs));
                for rows in ROWS.into_iter().filter(|&rows| !is_beyond || rows <= 8) {
                    let seconds = at_cpu_level(level, || seconds_of(&head, depth, rows));
                    report(level, products, (depth, outputs, rows), seconds, &bounds);
                }
            }
        }
    }
}

fn bytes(products: Products, depth: i64, outputs: i64) -> usize {
    let each = if products == Products::Float32 { 4 } else { 2 };
    (depth * outputs) as usize * each
}

fn report(
    level: CpuLevel,
    products: Products,
    (depth, outputs, rows): (i64, i64, i64),
    seconds: f64,
    bounds: &Bounds,
) {
    let flops = 2.0 * (depth * outputs * rows) as f64 / seconds;
    let read = bytes(products, depth, outputs) as f64 / seconds;
    println!(
        "{:<11} {:<16} {:>5} x {:<7} {rows:>3} {:>8.1} {:>7.0}% {:>8.1} {:>7.0}%",
        level.name(),
        format!("{products:?}").to_lowercase(),
        depth,
        outputs,
        flops * 1e-9,
        100.0 * flops / bounds.flops,
        read * 1e-9,
        100.0 * read / bounds.read,
    );
}

fn seconds_of(head: &Head, depth: i64, rows: i64) -> f64 {
    let options = (Kind::Float, Device::Cpu);
    let x = Tensor::randn([rows, depth], options);
    let mut logits = Tensor::zeros([rows, head.outputs() as i64], options);
    fastest(|| head.logits(floats(&x), None, floats_mut(&mut logits)))
}

/// The shortest time of a call: other load only adds to it.
fn fastest(mut call: impl FnMut()) -> f64 {
    call();
    let start = Instant::now();
    let mut best = f64::INFINITY;
    for count in 1.. {
        let begin = Instant::now();
        call();
        best = best.min(begin.elapsed().as_secs_f64());
        if count >= 3 && start.elapsed() > Duration::from_millis(60) {
            break;
        }
    }
    best
}

/// The best rates of a thread, per second.
struct Bounds {
    flops: f64,
    /// Bytes read from the same amount of memory.
    read: f64,
}

impl Bounds {
    fn of(level: CpuLevel, bytes: usize) -> Self {
        let probe = Probe::of(level);
        let memory = vec![1.0f32; bytes / 4];
        // SAFETY: the processor has the level.
        let read = fastest(|| unsafe {
            black_box((probe.read)(black_box(&memory)));
        });
        let steps = 200_000;
        // SAFETY: as above.
        let added = fastest(|| unsafe {
            black_box((probe.multiply_add)(black_box(steps)));
        });
        let flops = 2.0 * (steps * SUMS * probe.lanes) as f64;
        Self { flops: flops / added, read: bytes as f64 / read }
    }
}

/// Number of accumulators, enough that none waits for itself.
const SUMS: usize = 12;

struct Probe {
    lanes: usize,
    multiply_add: unsafe fn(usize) -> f32,
    read: unsafe fn(&[f32]) -> f32,
}

impl Probe {
    #[cfg(target_arch = "x86_64")]
    fn of(level: CpuLevel) -> Self {
        match level {
            CpuLevel::Avx512 | CpuLevel::Avx512bf16 => avx512::PROBE,
            CpuLevel::Avx2 => avx2::PROBE,
            CpuLevel::Baseline | CpuLevel::Neon => baseline::PROBE,
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn of(_: CpuLevel) -> Self {
        neon::PROBE
    }
}

macro_rules! probe {
    ($name:ident, $arch:ident, $features:literal, $vector:ident, $lanes:literal,
     $load:ident, $splat:ident, $add:ident, |$sum:ident, $x:ident, $y:ident| $multiply_add:expr) => {
        mod $name {
            use std::arch::$arch::*;

            use super::{Probe, SUMS};

            pub(super) const PROBE: Probe = Probe { lanes: $lanes, multiply_add, read };

            #[target_feature(enable = $features)]
            unsafe fn multiply_add(steps: usize) -> f32 {
                let ($x, $y) = ($splat(0.5), $splat(1.0));
                let mut sums = [$y; SUMS];
                for _ in 0..steps {
                    for sum in &mut sums {
                        let $sum = *sum;
                        *sum = $multiply_add;
                    }
                }
                first(sums.into_iter().fold($y, |a, b| $add(a, b)))
            }

            #[target_feature(enable = $features)]
            unsafe fn read(memory: &[f32]) -> f32 {
                let mut sums = [$splat(0.0); 8];
                for part in memory.chunks_exact(8 * $lanes) {
                    for (sum, part) in sums.iter_mut().zip(part.chunks_exact($lanes)) {
                        // SAFETY: the part is as long as a vector.
                        *sum = $add(*sum, unsafe { $load(part.as_ptr()) });
                    }
                }
                first(sums.into_iter().fold($splat(0.0), |a, b| $add(a, b)))
            }

            #[target_feature(enable = $features)]
            fn first(vector: $vector) -> f32 {
                // SAFETY: a vector is floats.
                unsafe { std::mem::transmute::<$vector, [f32; $lanes]>(vector)[0] }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
probe!(baseline, x86_64, "sse2", __m128, 4, _mm_loadu_ps, _mm_set1_ps, _mm_add_ps, |sum, x, y| {
    _mm_add_ps(_mm_mul_ps(sum, x), y)
});
#[cfg(target_arch = "x86_64")]
probe!(
    avx2,
    x86_64,
    "avx2,fma",
    __m256,
    8,
    _mm256_loadu_ps,
    _mm256_set1_ps,
    _mm256_add_ps,
    |sum, x, y| _mm256_fmadd_ps(sum, x, y)
);
#[cfg(target_arch = "x86_64")]
probe!(
    avx512,
    x86_64,
    "avx512f",
    __m512,
    16,
    _mm512_loadu_ps,
    _mm512_set1_ps,
    _mm512_add_ps,
    |sum, x, y| _mm512_fmadd_ps(sum, x, y)
);
#[cfg(target_arch = "aarch64")]
probe!(neon, aarch64, "neon", float32x4_t, 4, vld1q_f32, vdupq_n_f32, vaddq_f32, |sum, x, y| {
    vfmaq_f32(y, sum, x)
});
