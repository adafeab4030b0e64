//! Schedules, AdamW and Muon against all reference vectors; the optimizers on both paths.

use dflash_draft::{Parameter, ParameterSpec};
use dflash_golden::{Case, rule_trials};
use dflash_settings::{SchedulerType, Warmup};
use dflash_tensor::Kernels;
use dflash_test_place::place;
use dflash_train::optimizer::{
    AdamWConfig, Algorithm, Groups, MuonConfig, MuonScale, Optimizer, OptimizerConfig, StepGate,
    WeightDecay,
};
use dflash_train::schedule::Schedule;
use libtest_mimic::Arguments;
use serde_json::Value;
use tch::Tensor;

fn main() {
    let trials = rule_trials(
        env!("CARGO_PKG_NAME"),
        &[("lr_schedule", schedule), ("muon", muon), ("adamw", adamw)],
    );
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn schedule(Case { value: case, .. }: &Case) {
    let kind = match case["type"].as_str().unwrap() {
        "linear" => SchedulerType::Linear,
        "cosine" => SchedulerType::Cosine,
        "none" | "constant" => SchedulerType::None,
        other => panic!("schedule {other} is not implemented"),
    };
    if kind == SchedulerType::Cosine {
        let cycles = case["cycles"].as_f64().unwrap_or(0.5);
        assert_eq!(cycles, 0.5, "half a cosine is what we train with");
    }
    let warmup = Warmup::Steps(case["warmup"].as_u64().unwrap());
    let schedule = Schedule { kind, warmup, decay_ratio: 0.0, minimum: 0.0 };
    let total = case["total"].as_u64().unwrap();
    for (step, expected) in case["multiplier_at_step"].as_object().unwrap() {
        let found = schedule.multiplier(step.parse().unwrap(), total);
        let expected = expected.as_f64().unwrap();
        assert!((found - expected).abs() < 1e-9, "step {step}: {found}, expected {expected}");
    }
}

/// Steps with the weights and gradients of the Muon case.
fn adamw(Case { value: case, file, .. }: &Case) {
    let number = |key: &str| case[key].as_f64().unwrap();
    let adamw = AdamWConfig {
        beta1: case["betas"][0].as_f64().unwrap(),
        beta2: case["betas"][1].as_f64().unwrap(),
        epsilon: number("eps"),
    };
    let weight_decay = WeightDecay { matrices: number("weight_decay"), norms: 0.0 };
    let config = OptimizerConfig { adamw, weight_decay, ..OptimizerConfig::default() };
    let source = |key: &str| if case[key].is_null() { &file["muon"][key] } else { &case[key] };
    follow(config, (source("w0"), source("grads")), case, 2e-7);
}

/// Both sides run Newton-Schulz in bfloat16, which the tolerance allows for.
fn muon(Case { value: case, .. }: &Case) {
    let number = |key: &str| case[key].as_f64().unwrap();
    let muon = MuonConfig {
        rate_ratio: 1.0,
        momentum: number("momentum"),
        iterations: case["ns_steps"].as_u64().unwrap() as usize,
        scale: match case["adjust"].as_str() {
            Some("match_rms_adamw") => MuonScale::MatchRmsAdamw,
            Some("original") | None => MuonScale::Original,
            Some(other) => panic!("adjustment {other} is not implemented"),
        },
    };
    let config = OptimizerConfig {
        algorithm: Algorithm::Muon(muon),
        weight_decay: WeightDecay { matrices: number("weight_decay"), norms: 0.0 },
        ..OptimizerConfig::default()
    };
    follow(config, (&case["w0"], &case["grads"]), case, 1e-5);
}

fn matrix(shape: [i64; 2]) -> Parameter {
    Parameter { spec: ParameterSpec::matrix("weight", shape, 0.0), offset: 0 }
}

/// Runs a case's steps on all paths and compares the weights after each.
fn follow(config: OptimizerConfig, (w0, gradients): (&Value, &Value), case: &Value, close: f64) {
    let rows = w0.as_array().unwrap().len() as i64;
    let gradients = gradients.as_array().unwrap();
    let expected = case["w"].as_array().unwrap();
    assert!(!gradients.is_empty() && gradients.len() == expected.len());
    for kernels in [Kernels::Fast, Kernels::Portable] {
        let mut weights = flat(w0);
        let elements = weights.numel() as i64;
        let matrix = matrix([rows, elements / rows]);
        let groups = Groups::of(&[matrix], &(0..elements));
        let mut optimizer = Optimizer::new(&config, groups, &weights).with_kernels(kernels);
        for (gradient, expected) in gradients.iter().zip(expected) {
            optimizer.step(&mut weights, &flat(gradient), case["lr"].as_f64().unwrap());
            let difference = (&weights - flat(expected)).abs().max().double_value(&[]);
            let close = place().whatever_the_kind(close);
            assert!(difference <= close, "{kernels:?} differs by {difference}");
        }
    }
    on_device(config, (w0, gradients), case, close);
}

/// As on a GPU: gradients arrive as sums and are divided, and a non-finite step is skipped.
fn on_device(
    config: OptimizerConfig,
    (w0, gradients): (&Value, &[Value]),
    case: &Value,
    close: f64,
) {
    let weights = flat(w0);
    let rows = w0.as_array().unwrap().len() as i64;
    let elements = weights.numel() as i64;
    let matrix = matrix([rows, elements / rows]);
    let groups = Groups::of(&[matrix], &(0..elements));
    let mut optimizer = Optimizer::new(&config, groups, &weights);
    let rate = case["lr"].as_f64().unwrap();
    let there = |x: Tensor| x.to_device(place().device);
    let go = || there(Tensor::from_slice(&[false]));
    let skip = || there(Tensor::from_slice(&[true]));
    for (gradient, expected) in gradients.iter().zip(case["w"].as_array().unwrap()) {
        let bad = Tensor::full_like(&weights, f64::NAN);
        let gate = StepGate::new(&there(Tensor::from_slice(&[f64::NAN])), skip());
        optimizer.step_on_device(&weights, &bad, rate, &gate).unwrap();
        let gate = StepGate::new(&there(Tensor::from_slice(&[4.0])), go());
        optimizer.step_on_device(&weights, &(flat(gradient) * 4.0), rate, &gate).unwrap();
        let difference = (&weights - flat(expected)).abs().max().double_value(&[]);
        let close = place().whatever_the_kind(close);
        assert!(difference <= close, "on the device, it differs by {difference}");
    }
}

/// All numbers of nested arrays, in order.
fn flat(value: &Value) -> Tensor {
    fn collect(value: &Value, into: &mut Vec<f32>) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| collect(item, into)),
            number => into.push(number.as_f64().unwrap() as f32),
        }
    }
    let mut numbers = Vec::new();
    collect(value, &mut numbers);
    Tensor::from_slice(&numbers).to_device(place().device)
}
