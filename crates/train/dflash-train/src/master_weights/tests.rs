//! Whole and sharded master weights are updated and stored identically.

use dflash_dist::Single;
use dflash_draft::DraftConfig;
use dflash_tensor::checkpoint::TensorWriter;
use tch::Device;

use super::*;
use crate::fake::draft_config;
use crate::optimizer::{Algorithm, MuonConfig, WeightDecay};
use crate::shards::Rank;

const RATE: f64 = 1e-3;

fn config() -> DraftConfig {
    DraftConfig { intermediate_size: 64, ..draft_config(32, 3) }
}

fn muon() -> OptimizerConfig {
    let weight_decay = WeightDecay { matrices: 0.1, norms: 0.01 };
    let algorithm = Algorithm::Muon(MuonConfig::default());
    OptimizerConfig { algorithm, weight_decay, ema_decay: Some(0.9), ..OptimizerConfig::default() }
}

fn adamw() -> OptimizerConfig {
    OptimizerConfig { algorithm: Algorithm::AdamW, ..muon() }
}

/// A fresh draft and its master weights, for `rank` of several if given.
fn parameters(
    kind: Kind,
    optimizer: &OptimizerConfig,
    rank: Option<Rank>,
) -> (Draft, MasterWeights) {
    let fresh = Draft::init(config(), Device::Cpu, |shape| wave(shape, 1.7));
    let layout = fresh.layout();
    let shards = match (rank, optimizer.algorithm) {
        (None, _) => Shards::whole(layout.elements()),
        (Some(rank), Algorithm::AdamW) => Shards::even(layout.elements(), rank),
        (Some(rank), Algorithm::Muon(_)) => Shards::by_parameter(layout, rank),
    };
    MasterWeights::new(fresh, kind, optimizer, shards)
}

/// Noise-like numbers of magnitude one. libtorch's generator is shared by all threads, so parallel
/// tests cannot rely on its seed.
fn wave(shape: &[i64], frequency: f64) -> Tensor {
    let elements: i64 = shape.iter().product();
    let positions = Tensor::arange(elements, (Kind::Float, Device::Cpu));
    (positions * frequency).sin().view(shape)
}

/// Gradients of three steps, the same for every caller.
fn gradients(elements: i64) -> Vec<Tensor> {
    (1..=3).map(|step| wave(&[elements], 0.7 * f64::from(step))).collect()
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

#[test]
fn shares_move_as_the_whole_does_and_each_rank_holds_its_part() {
    tch::no_grad(|| {
        for optimizer in [adamw(), muon()] {
            let (draft, mut whole) = parameters(Kind::Float, &optimizer, None);
            let start = draft.flat().copy();
            let gradients = gradients(draft.layout().elements());
            gradients.iter().for_each(|gradient| whole.step(gradient, RATE));
            assert!(largest_difference(&start, &whole.weights) > RATE);
            let mut held = Vec::new();
            for rank in 0..2 {
                let (_, mut part) =
                    parameters(Kind::Float, &optimizer, Some(Rank { rank, world_size: 2 }));
                gradients.iter().for_each(|gradient| part.step(gradient, RATE));
                let expected = part.shards.view(&whole.weights);
                assert_eq!(largest_difference(&part.weights, &expected), 0.0);
                let averages =
                    [&part.average, &whole.average].map(|a| &a.as_ref().unwrap().weights);
                let expected = part.shards.view(averages[1]);
                assert_eq!(largest_difference(averages[0], &expected), 0.0);
                held.push(part.elements());
            }
            let all = whole.elements();
            assert_eq!(held.iter().sum::<i64>(), all, "nothing is held twice");
            assert!(held.iter().all(|&held| held < all * 6 / 10), "{held:?} of {all}");
        }
    });
}

#[test]
fn updates_far_below_bfloat16_s_resolution_are_not_lost() {
    tch::no_grad(|| {
        let optimizer = OptimizerConfig::default();
        let (draft, mut master_weights) = parameters(Kind::BFloat16, &optimizer, None);
        assert_eq!(
            (draft.flat().kind(), master_weights.weights.kind()),
            (Kind::BFloat16, Kind::Float)
        );
        let layout = draft.layout();
        let norm = layout.parameters().iter().find(|p| p.name == "norm.weight").unwrap();
        let gradient = draft.flat().ones_like().to_kind(Kind::Float);
        // below 1, bfloat16 values are 2^-8 = 0.0039 apart; a step of 1e-4 rounds away
        for step in 1..=100 {
            master_weights.step(&gradient, 1e-4);
            master_weights.publish(&draft, &Single).unwrap();
            let in_draft = norm.view(draft.flat()).double_value(&[0]);
            if step == 1 {
                assert_eq!(in_draft, 1.0);
            }
        }
        let master = norm.view(&master_weights.weights).double_value(&[0]);
        let in_draft = norm.view(draft.flat()).double_value(&[0]);
        assert!((master - 0.99).abs() < 1e-5, "{master}");
        assert!((in_draft - 0.99).abs() <= 0.002, "{in_draft}");
        assert_eq!(master_weights.weights.kind(), Kind::Float);
    });
}

#[test]
fn what_one_rank_wrote_others_take_their_shares_of() {
    tch::no_grad(|| {
        for optimizer in [adamw(), muon()] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state.safetensors");
            let (draft, mut writer) = parameters(Kind::Float, &optimizer, None);
            let gradients = gradients(draft.layout().elements());
            writer.step(&gradients[0], RATE);
            assert_eq!(writer.served_name(), AVERAGE);
            let mut file = TensorWriter::create(&path, &writer.entries()).unwrap();
            writer.stream(&Single, &mut |piece| file.append(piece).unwrap()).unwrap();
            file.finish().unwrap();
            writer.step(&gradients[1], RATE);
            for rank in [None, Some(0), Some(1), Some(2)] {
                let rank = rank.map(|rank| Rank { rank, world_size: 3 });
                let (draft, mut reader) = parameters(Kind::Float, &optimizer, rank);
                reader.restore(&draft, &TensorFile::open(&path).unwrap(), 1).unwrap();
                reader.step(&gradients[1], RATE);
                let expected = reader.shards.view(&writer.weights);
                assert_eq!(largest_difference(&reader.weights, &expected), 0.0);
            }
        }
    });
}

#[test]
fn the_average_follows_by_its_share() {
    let master_weights = Tensor::from_slice(&[1.0f32, -4.0]);
    let mut average = Average::new(0.75, &master_weights);
    let mut master_weights = master_weights;
    for next in [[2.0f32, -4.0], [4.0, 0.0]] {
        master_weights.copy_(&Tensor::from_slice(&next));
        average.update(&master_weights);
    }
    // by hand: 0.75 * 1 + 0.25 * 2 = 1.25; 0.75 * 1.25 + 0.25 * 4 = 1.9375; and -4 -> -4 -> -3
    assert_eq!(Vec::<f32>::try_from(&average.weights).unwrap(), [1.9375, -3.0]);
}

/// A gate that divides by `divisor`, or skips the step.
fn gate(divisor: f64, skip: bool) -> StepGate {
    StepGate::new(&Tensor::from_slice(&[divisor]), Tensor::from_slice(&[skip]))
}

fn state_of(master_weights: &MasterWeights) -> Vec<Tensor> {
    master_weights.state().iter().map(|part| part.tensor.copy()).collect()
}

#[test]
fn steps_that_the_device_decides_are_those_of_the_host() {
    tch::no_grad(|| {
        let decay = |matrices, norms| OptimizerConfig {
            weight_decay: WeightDecay { matrices, norms },
            ..adamw()
        };
        // The two paths round in different order, on weights of about one.
        const CLOSE: f64 = 1e-6;
        for optimizer in [decay(0.1, 0.1), decay(0.1, 0.0), muon()] {
            for (kind, rank) in
                [(Kind::Float, None), (Kind::BFloat16, Some(Rank { rank: 1, world_size: 2 }))]
            {
                let (draft, mut host) = parameters(kind, &optimizer, rank);
                let (_, mut device) = parameters(kind, &optimizer, rank);
                let layout = draft.layout();
                // gaps between parameters get no gradient
                let inside = Tensor::zeros([layout.elements()], (Kind::Float, Device::Cpu));
                layout.parameters().iter().for_each(|it| drop(it.view(&inside).fill_(1.0)));
                for gradient in gradients(layout.elements()) {
                    let gradient = gradient * &inside;
                    host.step(&gradient, RATE);
                    device.step_on_device(&(gradient * 8.0), RATE, &gate(8.0, false)).unwrap();
                    let bad = Tensor::full_like(draft.flat(), f64::NAN).to_kind(Kind::Float);
                    device.step_on_device(&bad, RATE, &gate(f64::NAN, true)).unwrap();
                }
                let (host, device) = (state_of(&host), state_of(&device));
                for (expected, found) in host.iter().zip(&device) {
                    let difference = largest_difference(expected, found);
                    let name = optimizer.algorithm.name();
                    assert!(difference <= CLOSE, "{name}: {difference}");
                }
            }
        }
    });
}

#[test]
fn a_skipped_step_leaves_every_bit_of_the_state() {
    tch::no_grad(|| {
        for optimizer in [adamw(), muon()] {
            let (draft, mut master_weights) = parameters(Kind::Float, &optimizer, None);
            let gradients = gradients(draft.layout().elements());
            master_weights.step_on_device(&gradients[0].copy(), RATE, &gate(2.0, false)).unwrap();
            let before = state_of(&master_weights);
            for bad in [f64::NAN, f64::INFINITY] {
                let bad = Tensor::full_like(&gradients[0], bad);
                master_weights.step_on_device(&bad, RATE, &gate(f64::NAN, true)).unwrap();
            }
            for (before, after) in before.iter().zip(state_of(&master_weights)) {
                assert!(before.equal(&after));
            }
            // the next step is the same as if the skipped one had not happened
            let (_, mut other) = parameters(Kind::Float, &optimizer, None);
            let go_on = |master_weights: &mut MasterWeights, gradients: &[Tensor]| {
                for gradient in gradients {
                    master_weights
                        .step_on_device(&gradient.copy(), RATE, &gate(2.0, false))
                        .unwrap();
                }
            };
            go_on(&mut master_weights, &gradients[1..]);
            go_on(&mut other, &gradients);
            for (one, other) in state_of(&master_weights).iter().zip(state_of(&other)) {
                assert!(one.equal(&other));
            }
        }
    });
}
