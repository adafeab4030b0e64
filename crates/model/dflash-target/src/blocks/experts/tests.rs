//! Routing and experts against loops in plain arithmetic, and every storage layout of experts.

use dflash_tensor::checkpoint::write_safetensors;
use dflash_tensor::{DeviceKind, Weights};
use dflash_test_support::seeded;

use super::*;
use crate::parallel::Shard;

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const PLAIN: Routing =
    Routing { top_k: 2, scores: Scores::Softmax, normalised: false, scale: 1.0, groups: None };

fn vectors(x: &Tensor) -> Vec<Vec<f32>> {
    Vec::try_from(x).unwrap()
}

fn router(routing: Routing, logits: &[f32]) -> (Router, Tensor) {
    // With an identity weight the inputs are the logits.
    let experts = logits.len() as i64;
    let router = Router {
        weight_eh: Tensor::eye(experts, CPU),
        bias_e: None,
        correction_e: None,
        expert_scale_e: None,
        routing,
    };
    (router, Tensor::from_slice(logits).view([1, -1]))
}

fn check(router: &Router, x: &Tensor, experts: &[i64], shares: &[f32]) {
    let routed = router.route(x);
    assert_eq!(Vec::<i64>::try_from(routed.experts_tk.view([-1])).unwrap(), experts);
    let found = Vec::<f32>::try_from(routed.shares_tk.view([-1])).unwrap();
    let close = found.iter().zip(shares).all(|(found, share)| (found - share).abs() < 1e-6);
    assert!(close && found.len() == shares.len(), "{found:?}, expected {shares:?}");
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[test]
fn softmax_over_all_with_and_without_normalising_and_over_the_top_k_alone() {
    // Logarithms of 1, 2, 3, 4: softmax is tenths.
    let logits = [1f32, 2.0, 3.0, 4.0].map(f32::ln);
    let (plain, x) = router(PLAIN, &logits);
    check(&plain, &x, &[3, 2], &[0.4, 0.3]);
    let (normalised, x) = router(Routing { normalised: true, scale: 7.0, ..PLAIN }, &logits);
    check(&normalised, &x, &[3, 2], &[4.0, 3.0]);
    let (of_top_k, x) = router(Routing { scores: Scores::SoftmaxOfTopK, ..PLAIN }, &logits);
    check(&of_top_k, &x, &[3, 2], &[4.0 / 7.0, 3.0 / 7.0]);
}

#[test]
fn a_bias_moves_logits_a_correction_the_choice_alone_and_a_scale_the_shares_alone() {
    let sigmoid_routing = Routing { scores: Scores::Sigmoid, ..PLAIN };
    let (mut router, x) = router(sigmoid_routing, &[0.5, 0.1, -0.3]);
    check(&router, &x, &[0, 1], &[sigmoid(0.5), sigmoid(0.1)]);
    router.correction_e = Some(Tensor::from_slice(&[0.0f32, 0.0, 0.5]));
    check(&router, &x, &[2, 0], &[sigmoid(-0.3), sigmoid(0.5)]);
    router.bias_e = Some(Tensor::from_slice(&[0.0f32, 2.0, 0.0]));
    check(&router, &x, &[2, 1], &[sigmoid(-0.3), sigmoid(2.1)]);
    router.expert_scale_e = Some(Tensor::from_slice(&[3.0f32, 5.0, 2.0]));
    check(&router, &x, &[2, 1], &[2.0 * sigmoid(-0.3), 5.0 * sigmoid(2.1)]);
}

#[test]
fn a_group_is_as_good_as_its_two_best() {
    let groups = Some(ExpertGroups { count: 3, kept: 1 });
    let routing = Routing { scores: Scores::Sigmoid, groups, ..PLAIN };
    // The best single expert is alone in its group; the second group's two best sum to more.
    let (router, x) = router(routing, &[2.0, -4.0, 1.0, 0.9, 0.0, 0.0]);
    check(&router, &x, &[2, 3], &[sigmoid(1.0), sigmoid(0.9)]);
}

/// Five experts of inner width 4 and hidden size 6, with or without biases.
fn experts(gated: Gated, weighed: Weighed, bias: bool) -> Experts {
    let random = |shape: &[i64]| Tensor::randn(shape, CPU);
    Experts {
        gate_up_ehi: random(&[5, 6, 8]),
        down_eih: random(&[5, 4, 6]),
        biases: bias.then(|| (random(&[5, 8]), random(&[5, 6]))),
        gated,
        weighed,
        shard: Shard::WHOLE,
    }
}

/// One token's weighted sum over its experts, by definition.
fn by_definition(experts: &Experts, x_h: &Tensor, top_k: &[i64], shares: &[f32]) -> Tensor {
    let mut sum = Tensor::zeros([1, 6], CPU);
    for (&expert, &share) in top_k.iter().zip(shares) {
        let share = f64::from(share);
        let x = x_h.view([1, -1]) * if experts.weighed == Weighed::Inputs { share } else { 1.0 };
        let bias = |of: fn(&(Tensor, Tensor)) -> &Tensor| {
            experts.biases.as_ref().map(|biases| of(biases).get(expert))
        };
        let linear = |x: &Tensor, weight: &Tensor, bias: Option<Tensor>| {
            x.linear(&weight.get(expert).tr(), bias)
        };
        let gate_up = linear(&x, &experts.gate_up_ehi, bias(|biases| &biases.0));
        let (gate, up) = (gate_up.narrow(1, 0, 4), gate_up.narrow(1, 4, 4));
        let inner = match experts.gated {
            Gated::Silu => gate.sigmoid() * &gate * up,
            Gated::GeluTanh => {
                let bent: Tensor = (&gate + 0.044715 * gate.pow_tensor_scalar(3))
                    * (2.0 / std::f64::consts::PI).sqrt();
                0.5 * &gate * (1.0 + bent.tanh()) * up
            }
            Gated::Clamped { alpha, limit } => {
                let gate = gate.minimum(&Tensor::from(limit as f32));
                (up.clamp(-limit, limit) + 1.0) * &gate * (&gate * alpha).sigmoid()
            }
        };
        let out = linear(&inner, &experts.down_eih, bias(|biases| &biases.1));
        sum += out * if experts.weighed == Weighed::Outputs { share } else { 1.0 };
    }
    sum
}

#[test]
fn experts_of_sorted_tokens_are_those_of_each_token_alone() {
    let _draws = seeded(tch::manual_seed);
    // Expert 3 has no token; the other experts' tokens are not adjacent.
    let top_k = [[4, 0], [1, 4], [0, 2], [4, 1], [2, 0], [0, 4], [1, 2]];
    let shares: Vec<[f32; 2]> = (0..7).map(|token| [0.1 + token as f32, 0.7]).collect();
    let x_th = Tensor::randn([7, 6], CPU);
    let routed = Routed {
        experts_tk: Tensor::from_slice(top_k.as_flattened()).view([7, 2]),
        shares_tk: Tensor::from_slice(shares.as_flattened()).view([7, 2]),
    };
    for gated in [Gated::Silu, Gated::GeluTanh, Gated::Clamped { alpha: 1.702, limit: 0.5 }] {
        for (weighed, bias) in [(Weighed::Outputs, true), (Weighed::Inputs, false)] {
            let experts = experts(gated, weighed, bias);
            let found = experts.forward(&x_th, &routed);
            for token in 0..7 {
                let at = token as usize;
                let alone = by_definition(&experts, &x_th.get(token), &top_k[at], &shares[at]);
                let own = found.narrow(0, token, 1);
                assert!(own.allclose(&alone, 1e-4, 1e-4, false), "{gated:?}, token {token}");
            }
        }
    }
}

fn read(tensors: &[(&str, Tensor)], stored: Stored, bias: bool) -> Result<Experts> {
    let dir = tempfile::tempdir().unwrap();
    let named: Vec<_> =
        tensors.iter().map(|(name, x)| (format!("m.{name}"), x.contiguous())).collect();
    write_safetensors(&dir.path().join("model.safetensors"), &named).unwrap();
    let weights = Weights::open(dir.path()).unwrap();
    let spec = ExpertsSpec {
        module: "m",
        names: ["w1", "w3", "w2"],
        stored,
        experts: 2,
        hidden: 32,
        inner: 64,
        bias,
        gated: Gated::Silu,
        weighed: Weighed::Outputs,
    };
    Experts::new(
        &Init {
            weights: Some(&weights),
            place: DeviceKind::CPU_F32,
            prefix: "",
            shard: Shard::WHOLE,
            packing: None,
        },
        &spec,
    )
}

/// Gate [E, I, H], up, and down [E, H, I] of two experts, in the layout of linear layers.
fn linear_layers() -> [Tensor; 3] {
    let random = |shape: &[i64]| Tensor::randn(shape, CPU);
    [random(&[2, 64, 32]), random(&[2, 64, 32]), random(&[2, 32, 64])]
}

fn assert_holds(experts: &Experts, [gate, up, down]: &[Tensor; 3]) {
    assert_eq!(experts.gate_up_ehi.transpose(1, 2), Tensor::cat(&[gate, up], 1));
    assert_eq!(experts.down_eih.transpose(1, 2), *down);
}

#[test]
fn experts_are_read_in_every_way_they_are_stored() {
    let _draws = seeded(tch::manual_seed);
    let layers = linear_layers();
    let [gate, up, down] = &layers;
    let each: Vec<(String, Tensor)> = (0..2)
        .flat_map(|e| {
            [("w1", gate), ("w3", up), ("w2", down)]
                .map(|(name, x)| (format!("{e}.{name}.weight"), x.get(e)))
        })
        .collect();
    let each: Vec<(&str, Tensor)> =
        each.iter().map(|(name, x)| (name.as_str(), x.copy())).collect();
    assert_holds(&read(&each, Stored::OutputsFirst, false).unwrap(), &layers);
    let gate_up = Tensor::cat(&[gate, up], 1);
    let fused = [("gate_up_proj", gate_up.copy()), ("down_proj", down.copy())];
    assert_holds(&read(&fused, Stored::OutputsFirst, false).unwrap(), &layers);
    let turned = [("gate_up_proj", gate_up.transpose(1, 2)), ("down_proj", down.transpose(1, 2))];
    assert_holds(&read(&turned, Stored::InputsFirst, false).unwrap(), &layers);
    let by_turns = Tensor::stack(&[gate, up], 2).flatten(1, 2);
    let biases = [Tensor::randn([2, 128], CPU), Tensor::randn([2, 32], CPU)];
    let interleaved = [
        ("gate_up_proj", by_turns.transpose(1, 2)),
        ("down_proj", down.transpose(1, 2)),
        ("gate_up_proj_bias", biases[0].copy()),
        ("down_proj_bias", biases[1].copy()),
    ];
    let experts = read(&interleaved, Stored::Interleaved, true).unwrap();
    assert_holds(&experts, &layers);
    let (gate_up_bias, down_bias) = experts.biases.unwrap();
    let turns = biases[0].view([2, 64, 2]);
    assert_eq!(gate_up_bias, Tensor::cat(&[turns.select(2, 0), turns.select(2, 1)], 1));
    assert_eq!(down_bias, biases[1]);
    let missing = read(&fused[..1], Stored::OutputsFirst, false).unwrap_err().to_string();
    assert!(missing.contains("has no tensor m.down_proj"), "{missing}");
    let turned = read(&turned, Stored::OutputsFirst, false).unwrap_err().to_string();
    assert!(turned.contains("m.gate_up_proj has shape [2, 32, 128]"), "{turned}");
}

#[test]
fn mxfp4_blocks_are_read_by_the_formats_rule_and_by_turns() {
    let _draws = seeded(tch::manual_seed);
    let bytes = |shape: &[i64], least: i64, most: i64| {
        Tensor::randint_low(least, most, shape, (Kind::Int64, Device::Cpu)).to_kind(Kind::Uint8)
    };
    let stored = [
        ("gate_up_proj_blocks", bytes(&[2, 128, 1, 16], 0, 256)),
        ("gate_up_proj_scales", bytes(&[2, 128, 1], 118, 128)),
        ("down_proj_blocks", bytes(&[2, 32, 2, 16], 0, 256)),
        ("down_proj_scales", bytes(&[2, 32, 2], 118, 128)),
    ];
    let experts = read(&stored, Stored::Interleaved, false).unwrap();
    let value = |at: usize, index: [i64; 3], element: i64| {
        let block = |name: usize| stored[name].1.get(index[0]).get(index[1]).get(index[2]);
        let byte = block(at).get(element / 2).int64_value(&[]);
        let code = (byte >> (4 * (element % 2))) & 15;
        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(code & 7) as usize];
        let signed = if code < 8 { magnitude } else { -magnitude };
        signed * 2f64.powi(block(at + 1).int64_value(&[]) as i32 - 127)
    };
    for (expert, row, input) in [(0, 0, 0), (1, 3, 31), (1, 126, 7), (0, 127, 16)] {
        let column = if row % 2 == 0 { row / 2 } else { 64 + row / 2 };
        let found = experts.gate_up_ehi.double_value(&[expert, input, column]);
        assert_eq!(found, value(0, [expert, row, 0], input), "row {row}, input {input}");
    }
    for (expert, row, inner) in [(0, 0, 0), (1, 31, 63), (1, 5, 33)] {
        let found = experts.down_eih.double_value(&[expert, inner, row]);
        assert_eq!(found, value(2, [expert, row, inner / 32], inner % 32));
    }
    assert!(vectors(&experts.gate_up_ehi.get(0)).iter().flatten().any(|&x| x != 0.0));
}

/// Bytes of the given shape, computed by `of`.
fn pattern(shape: &[i64], of: impl Fn(i64) -> i64) -> Tensor {
    let count = shape.iter().product();
    let bytes: Vec<u8> = (0..count).map(|at| of(at) as u8).collect();
    Tensor::from_slice(&bytes).view(shape)
}

/// Against Transformers 5.17: `_convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)` of
/// these bytes, then the float64 sum of all values times their index modulo 97.
#[test]
fn mxfp4_is_transformers_mxfp4() {
    let blocks = |shape: &[i64]| pattern(shape, |at| (at * 37 + 11) % 256);
    let scales = |shape: &[i64]| pattern(shape, |at| 118 + at * 5 % 10);
    let stored = [
        ("gate_up_proj_blocks", blocks(&[2, 128, 1, 16])),
        ("gate_up_proj_scales", scales(&[2, 128, 1])),
        ("down_proj_blocks", blocks(&[2, 32, 2, 16])),
        ("down_proj_scales", scales(&[2, 32, 2])),
    ];
    let experts = read(&stored, Stored::Interleaved, false).unwrap();
    let weighed = |x: &Tensor| {
        let place = Tensor::arange(x.numel() as i64, (Kind::Int64, Device::Cpu)).remainder(97);
        (x.reshape([-1]).to_kind(Kind::Double) * place).sum(Kind::Double).double_value(&[])
    };
    let by_turns = experts.gate_up_ehi.view([2, 32, 2, 64]).transpose(2, 3).flatten(2, 3);
    assert_eq!(weighed(&by_turns), -146.25390625);
    assert_eq!(by_turns.double_value(&[1, 3, 5]), -0.125);
    assert_eq!(weighed(&experts.down_eih), 567.6005859375);
    assert_eq!(experts.down_eih.double_value(&[0, 7, 30]), 0.0029296875);
}
