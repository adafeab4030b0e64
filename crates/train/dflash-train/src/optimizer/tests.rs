//! Both optimizers on groups of parameters, compared with hand-computed values.

use dflash_draft::{Fresh, Parameter, ParameterSpec, Role};
use dflash_test_support::seeded;
use tch::Device;

use super::*;

fn parameter(shape: &[i64], offset: i64) -> Parameter {
    let role = if shape.len() > 1 { Role::Matrix } else { Role::Vector };
    Parameter { spec: ParameterSpec::new("", shape, role, Fresh::Zeros), offset }
}

/// A matrix of four elements and, after a gap, a norm of two.
fn parameters() -> [Parameter; 2] {
    [parameter(&[2, 2], 0), parameter(&[2], 16)]
}

const ELEMENTS: i64 = 32;

fn ones() -> Tensor {
    Tensor::ones([ELEMENTS], (Kind::Float, Device::Cpu))
}

fn optimizer(
    algorithm: Algorithm,
    weight_decay: WeightDecay,
    master_weights: &Tensor,
) -> Optimizer {
    let config = OptimizerConfig { algorithm, weight_decay, ..OptimizerConfig::default() };
    Optimizer::new(&config, Groups::of(&parameters(), &(0..ELEMENTS)), master_weights)
}

/// Takes one step from ones; `expected` holds a matrix element, a norm element and padding.
fn check(algorithm: Algorithm, weight_decay: WeightDecay, gradient: f64, expected: [f64; 3]) {
    let mut master_weights = ones();
    let gradient = ones() * gradient;
    optimizer(algorithm, weight_decay, &master_weights).step(&mut master_weights, &gradient, 0.1);
    for (index, expected) in [0, 17, 20].into_iter().zip(expected) {
        let found = master_weights.double_value(&[index]);
        assert!((found - expected).abs() < 1e-6, "{found}, expected {expected}");
    }
}

#[test]
fn weight_decay_goes_by_group() {
    let muon = Algorithm::Muon(MuonConfig { rate_ratio: 2.0, ..MuonConfig::default() });
    let matrices = WeightDecay { matrices: 0.5, norms: 0.0 };
    let both = WeightDecay { matrices: 0.5, norms: 0.2 };
    check(Algorithm::AdamW, matrices, 0.0, [0.95, 1.0, 1.0]);
    check(Algorithm::AdamW, both, 0.0, [0.95, 0.98, 1.0]);
    // Muon's matrices decay at Muon's rate
    check(muon, matrices, 0.0, [0.9, 1.0, 1.0]);
    check(muon, both, 0.0, [0.9, 0.98, 1.0]);
    check(muon, WeightDecay::default(), 0.0, [1.0, 1.0, 1.0]);
}

/// With Muon, an embedding is updated by AdamW and does not decay.
#[test]
fn embeddings_move_by_adamw_and_never_decay() {
    let _draws = seeded(tch::manual_seed);
    let spec = ParameterSpec::embedding("w1", [2, 2], Fresh::Zeros);
    let parameters = [parameter(&[2, 2], 0), Parameter { spec, offset: 16 }];
    let muon = Algorithm::Muon(MuonConfig::default());
    let weight_decay = WeightDecay { matrices: 0.5, norms: 0.2 };
    for algorithm in [Algorithm::AdamW, muon] {
        for gradient in [0.0, -3.0] {
            let (mut master_weights, gradient) = (ones(), ones() * gradient);
            let groups = Groups::of(&parameters, &(0..ELEMENTS));
            let config = OptimizerConfig { algorithm, weight_decay, ..OptimizerConfig::default() };
            let mut optimizer = Optimizer::new(&config, groups.clone(), &master_weights);
            optimizer.step(&mut master_weights, &gradient, 0.1);
            let expected = if gradient.double_value(&[0]) == 0.0 { 1.0 } else { 1.1 };
            assert!((master_weights.double_value(&[17]) - expected).abs() < 1e-6, "{algorithm:?}");
            let on_device = ones();
            let mut optimizer = Optimizer::new(&config, groups, &on_device);
            let gate = StepGate::new(&Tensor::from_slice(&[1.0]), Tensor::from_slice(&[false]));
            optimizer.step_on_device(&on_device, &gradient, 0.1, &gate).unwrap();
            assert!((on_device.double_value(&[17]) - expected).abs() < 1e-6, "{algorithm:?}");
        }
    }
}

#[test]
fn adamw_s_first_step_has_the_size_of_the_rate() {
    check(Algorithm::AdamW, WeightDecay::default(), -3.0, [1.1, 1.1, 1.1]);
}

#[test]
fn with_muon_norms_move_as_with_adamw() {
    let _draws = seeded(tch::manual_seed);
    let gradients = [(); 3].map(|()| Tensor::randn([ELEMENTS], (Kind::Float, Device::Cpu)));
    let norms = [Algorithm::AdamW, Algorithm::Muon(MuonConfig::default())].map(|algorithm| {
        let mut master_weights = ones();
        let mut optimizer = optimizer(algorithm, WeightDecay::default(), &master_weights);
        for gradient in &gradients {
            optimizer.step(&mut master_weights, gradient, 0.01);
        }
        Vec::<f32>::try_from(master_weights.narrow(0, 16, 2)).unwrap()
    });
    assert_eq!(norms[0], norms[1]);
    assert_ne!(norms[0], [1.0, 1.0]);
}

#[test]
fn matrices_side_by_side_are_made_orthogonal_one_by_one() {
    let _draws = seeded(tch::manual_seed);
    // like q, k and v: no gap between them
    let side_by_side = [parameter(&[4, 3], 0), parameter(&[2, 3], 12)];
    let gradient = Tensor::randn([18], (Kind::Float, Device::Cpu));
    let algorithm = Algorithm::Muon(MuonConfig::default());
    let config = OptimizerConfig { algorithm, ..OptimizerConfig::default() };
    let step = |parameters: &[Parameter], gradient: &Tensor| {
        let mut master_weights = gradient.zeros_like();
        let groups = Groups::of(parameters, &(0..gradient.size()[0]));
        Optimizer::new(&config, groups, &master_weights).step(&mut master_weights, gradient, 0.01);
        Vec::<f32>::try_from(master_weights).unwrap()
    };
    let joined = step(&side_by_side, &gradient);
    let first = step(&[parameter(&[4, 3], 0)], &gradient.narrow(0, 0, 12).contiguous());
    let second = step(&[parameter(&[2, 3], 0)], &gradient.narrow(0, 12, 6).contiguous());
    assert_eq!(joined, [first, second].concat());
}
