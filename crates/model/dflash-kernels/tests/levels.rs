//! The CPU kernels at every instruction level that this processor supports, compared with
//! libtorch's operations and with each other.

use dflash_kernels::decode::{Head, Products, floats, floats_mut};
use dflash_kernels::kernels::{self, AdamWStep};
use dflash_kernels::{CpuLevel, at_cpu_level};
use dflash_test_support::seeded;
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Asserts that `work` gives `expected` at every level, within a few units in the last place.
fn check(what: &str, expected: &Tensor, work: impl Fn() -> Tensor) {
    for level in CpuLevel::here() {
        let found = at_cpu_level(level, &work);
        let apart = (&found - expected).abs().max().double_value(&[]);
        let scale = expected.abs().max().double_value(&[]).max(1.0);
        assert!(apart <= 4e-6 * scale, "{what} at {level}: {apart}");
    }
}

#[test]
fn every_level_computes_what_libtorch_does() {
    let _alone = seeded(tch::manual_seed);
    // Not a multiple of any vector width.
    let (rows, dim) = (37, 83);
    let x = Tensor::randn([rows, dim], FLOAT);
    let weight = Tensor::randn([dim], FLOAT);
    let norm = &x / (x.square().mean_dim(-1, true, Kind::Float) + 1e-6).sqrt() * &weight;
    check("rms_norm", &norm, || kernels::rms_norm(&x, &weight, 1e-6));
    let gate_up = Tensor::randn([rows, 2 * dim], FLOAT);
    let halves = gate_up.chunk(2, 1);
    let activated = halves[0].silu() * &halves[1];
    check("swiglu", &activated, || kernels::swiglu(&gate_up));
    let labels = Tensor::randint(dim, [rows], (Kind::Int64, Device::Cpu));
    let ce = -x.log_softmax(-1, Kind::Float).gather(1, &labels.unsqueeze(1), false).squeeze_dim(1);
    check("softmax_cross_entropy", &ce, || {
        kernels::softmax_cross_entropy(&mut x.copy(), &labels).ce_m
    });
    let step =
        AdamWStep { beta1: 0.9, beta2: 0.99, epsilon: 1e-8, step_size: 0.1, root_correction2: 1.0 };
    let (mean, variance) = (&weight * 0.1, weight.square() * 0.01);
    let moved = Tensor::zeros([dim], FLOAT) - &mean / (variance.sqrt() + 1e-8) * 0.1;
    check("adamw", &moved, || {
        let (parameter, zeros) = (Tensor::zeros([dim], FLOAT), Tensor::zeros([dim], FLOAT));
        kernels::adamw(&parameter, &weight, &zeros, &zeros.zeros_like(), step);
        parameter
    });
}

#[test]
fn every_level_projects_to_the_same_logits() {
    let _alone = seeded(tch::manual_seed);
    let (hidden, vocabulary, rows) = (96, 211, 5);
    let weight = Tensor::randn([hidden, vocabulary], FLOAT).to_kind(Kind::BFloat16);
    let x = Tensor::randn([rows, hidden], FLOAT).to_kind(Kind::BFloat16).to_kind(Kind::Float);
    let exact = x.matmul(&weight.to_kind(Kind::Float));
    for products in [Products::Bfloat16Weights, Products::Bfloat16] {
        check("logits", &exact, || {
            let mut logits = exact.zeros_like();
            // Packed at this level, whose layout may differ from the best level's.
            Head::new(&weight, products).logits(floats(&x), None, floats_mut(&mut logits));
            logits
        });
    }
}
