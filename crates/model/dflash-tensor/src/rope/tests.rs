//! Compares frequencies with Transformers 5.17 (`ROPE_INIT_FUNCTIONS` on a LlamaConfig with four
//! heads of the given width and these rope_parameters), printed as doubles.

use serde_json::{Value, json};

use super::*;

fn read(parameters: &Value, head_dim: i64) -> Result<Rope> {
    let config = json!({ "rope_parameters": parameters, "max_position_embeddings": 512 });
    let text = Fields::parse(std::path::Path::new("config.json"), &config.to_string()).unwrap();
    let parameters = rope_parameters(&text).unwrap();
    let (theta, partial, pairs) = (1e4, 1.0, Pairs::Halves);
    Rope::read(RopeKeys { text: &text, parameters, head_dim, theta, partial, pairs })
}

/// At position 1 the angle is the frequency.
fn frequencies(rotary: &Rotary) -> (Vec<f64>, f64) {
    let tables = rotary.tables(&Tensor::from_slice(&[1i64]));
    let angle = tables.sin_td.to_kind(Kind::Double).atan2(&tables.cos_td.to_kind(Kind::Double));
    let length = (tables.sin_td.square() + tables.cos_td.square()).sqrt();
    (Vec::try_from(angle.view([-1])).unwrap(), length.double_value(&[0, 0]))
}

fn check(parameters: &Value, head_dim: i64, expected: &[f64], factor: f64) {
    let (found, length) = frequencies(&read(parameters, head_dim).unwrap().rotary(Device::Cpu));
    assert_eq!(found.len(), expected.len(), "{parameters}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= 3e-7 * expected.abs(),
            "{parameters}: {found}, {expected}"
        );
    }
    assert!((length - factor).abs() < 1e-6, "{parameters}: factor {length}");
}

#[test]
fn every_type_has_transformers_frequencies() {
    let linear = json!({ "type": "linear", "rope_theta": 1e4, "factor": 8.0 });
    let expected = [
        0.125,
        0.03952847048640251,
        0.012500000186264515,
        0.0039528473280370235,
        0.0012499999720603228,
        0.00039528473280370235,
        0.0001250000059371814,
        3.9528473280370235e-05,
    ];
    check(&linear, 16, &expected, 1.0);
    let llama3 = json!({ "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
    let expected = [
        1.0,
        0.07940301299095154,
        0.004700753837823868,
        0.0009115831344388425,
        0.00017677668074611574,
        3.428102354519069e-05,
        6.647869668086059e-06,
        1.289173155782919e-06,
    ];
    check(&llama3, 16, &expected, 1.0);
    let proportional = json!({ "rope_type": "proportional", "rope_theta": 1e6,
        "partial_rotary_factor": 0.25 });
    let turning = [1.0, 0.4216965138912201, 0.17782793939113617, 0.07498941570520401];
    check(&proportional, 32, &[&turning[..], &[0.0; 12]].concat(), 1.0);
}

#[test]
fn yarn_has_transformers_frequencies_and_factor() {
    let gpt_oss = json!({ "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
        "original_max_position_embeddings": 64 });
    let expected = [
        1.0,
        0.11690013855695724,
        0.012703318148851395,
        0.0028635566122829914,
        0.0006454972317442298,
        0.00014550669584423304,
        3.2799827749840915e-05,
        7.3936716944444925e-06,
    ];
    check(&gpt_oss, 16, &expected, 1.138629436111989);
    let deepseek = json!({ "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 4096 });
    let expected = [
        1.0,
        0.3162277638912201,
        0.10000000149011612,
        0.023914724588394165,
        0.005124999675899744,
        0.0008498621755279601,
        2.499999936844688e-05,
        7.905694474175107e-06,
    ];
    check(&deepseek, 16, &expected, 1.0879546075066122);
}

fn longrope() -> Value {
    json!({ "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2, 4, 8, 16, 32],
        "original_max_position_embeddings": 64 })
}

#[test]
fn longrope_has_two_sets_and_its_factor_from_the_lengths() {
    let short = [
        1.0,
        0.1958576887845993,
        0.038679901510477066,
        0.007692307699471712,
        0.001538881566375494,
        0.00030943931778892875,
    ];
    check(&longrope(), 16, &short, 1.224744871391589);
    let long = [
        1.0,
        0.1077217236161232,
        0.011603971011936665,
        0.0012499999720603228,
        0.00013465214578900486,
        1.4504967111861333e-05,
    ];
    let rotary = read(&longrope(), 16).unwrap().rotary(Device::Cpu);
    let tables = rotary.long_tables(&Tensor::from_slice(&[1i64])).unwrap();
    let ratio = Vec::<f64>::try_from((tables.sin_td / tables.cos_td).atan().view([-1])).unwrap();
    for (found, expected) in ratio.iter().zip(long) {
        assert!((found - expected).abs() <= 3e-7 * expected, "{found}, {expected}");
    }
}

#[test]
fn what_is_missing_or_unknown_is_named() {
    let message = |parameters: Value| read(&parameters, 16).unwrap_err().to_string();
    assert!(
        message(json!({ "rope_type": "dynamic", "factor": 2.0 }))
            .contains("rope_parameters.rope_type")
    );
    assert!(
        message(json!({ "rope_type": "linear" })).contains("`rope_parameters.factor` is missing")
    );
    let mut short = longrope();
    short["short_factor"] = json!([1.0]);
    assert!(message(short).contains("a list of 6 numbers is needed"));
    assert!(message(json!({ "partial_rotary_factor": 1.5 })).contains("partial_rotary_factor"));
}

#[test]
fn llama3_keeps_fast_and_stretches_slow_frequencies() {
    let scaling = Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 64,
    };
    let scaled = scale_frequencies(&scaling, &Tensor::from_slice(&[1.0f32, 0.01]));
    assert!(scaled.allclose(&Tensor::from_slice(&[1.0f32, 0.00125]), 1e-6, 0.0, false));
}
