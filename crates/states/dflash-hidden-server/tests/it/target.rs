//! A real target, tiny and random, behind the server.

use std::path::Path;

use dflash_hidden_server::{Error, Featurizer, Loader, PackedPrompts, TargetFeaturizer};
use dflash_hidden_states::{Dtype, HiddenStates, ModelList, TARGET_HEADER};
use dflash_identity::TargetIdentity;
use dflash_settings::HiddenServerSettings;
use dflash_target::{Target, TargetConfig};
use serde_json::json;
use tch::{Device, Kind, Tensor, no_grad};

use crate::double::{Running, config, refusal, states};

const VOCAB: i64 = 64;

/// A random target of six layers, saved.
fn saved(dir: &Path) -> Target {
    let target = Target::random(TargetConfig::qwen3(32, 6, VOCAB), 7, Device::Cpu);
    target.save(dir, Kind::Float).unwrap();
    target
}

fn settings(wire_dtype: Dtype) -> HiddenServerSettings {
    HiddenServerSettings { target_layer_ids: Some(vec![5, 0, 2]), wire_dtype, ..config() }
}

fn loader(dir: &Path, settings: HiddenServerSettings) -> Loader {
    let dir = dir.to_owned();
    Box::new(move || Ok(Box::new(TargetFeaturizer::load(&dir, &settings)?)))
}

fn prompt(tokens: i64, seed: i64) -> Vec<i64> {
    (0..tokens).map(|token| (token * seed + 3) % VOCAB).collect()
}

/// One prompt alone through the target.
fn alone(target: &Target, ids: &[i64], layer: u32) -> Vec<f32> {
    let states = no_grad(|| {
        target.forward_packed(&Tensor::from_slice(ids), &[0, ids.len() as i64], &[layer])
    });
    Vec::<f32>::try_from(states[0].flatten(0, -1)).unwrap()
}

/// One layer of a record as float32. A bf16 is the upper half of a float32.
fn values(states: &HiddenStates, layer: u32) -> Vec<f32> {
    let bytes = states.layer(layer).unwrap();
    match states.dtype {
        Dtype::F32 => f32s(bytes),
        Dtype::Bf16 => f32s(&bytes.chunks(2).flat_map(|b| [0, 0, b[0], b[1]]).collect::<Vec<_>>()),
    }
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
}

fn assert_close(got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len());
    let scale = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
    let worst = got.iter().zip(expected).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
    assert!(worst <= tolerance * scale, "off by {worst} at a scale of {scale}");
}

#[tokio::test(flavor = "multi_thread")]
async fn served_rows_are_the_target_s() {
    let dir = tempfile::tempdir().unwrap();
    let target = saved(dir.path());
    // bf16 keeps 8 bits: half a unit in the last place is a relative 2^-9.
    for (wire, tolerance) in [(Dtype::F32, 1e-5), (Dtype::Bf16, 2f32.powi(-8))] {
        let server = Running::load(config(), loader(dir.path(), settings(wire)));
        let ids = prompt(37, 5);
        let got = states(server.prompt(&ids).await).await;
        assert_eq!((got.layer_ids.as_slice(), got.dtype), ([0, 2, 5].as_slice(), wire));
        for layer in [0, 2, 5] {
            let rows = values(&got, layer);
            assert_close(&rows, &alone(&target, &ids, layer), tolerance);
        }
        let last = json!({"input_ids": ids, "layer_ids": [6]}).to_string();
        let last = states(server.post(last).await).await;
        assert_close(&values(&last, 6), &alone(&target, &ids, 6), tolerance);
        let (status, _) = refusal(server.prompt(&[VOCAB]).await).await;
        assert_eq!(status, 400);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_and_every_reply_say_which_model_it_is() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let settings = HiddenServerSettings {
        target: dir.path().to_string_lossy().into_owned(),
        ..settings(Dtype::F32)
    };
    let expected = TargetIdentity::read(dir.path(), &settings.target).unwrap();
    let server = Running::load(config(), loader(dir.path(), settings));
    let list = server.get("/v1/models").await.bytes().await.unwrap();
    let list: ModelList = serde_json::from_slice(&list).unwrap();
    let served = list.data[0].metadata.as_ref().unwrap().target.as_ref().unwrap();
    assert_eq!(served, &expected);
    assert_eq!(list.data[0].id, expected.name);
    let reply = server.prompt(&prompt(5, 3)).await;
    assert_eq!(reply.headers()[TARGET_HEADER], expected.digests());
}

#[test]
fn prompts_in_one_batch_do_not_see_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let target = saved(dir.path());
    let mut model = TargetFeaturizer::load(dir.path(), &settings(Dtype::F32)).unwrap();
    let prompts = [prompt(9, 3), prompt(1, 1), prompt(20, 7)];
    let packed = PackedPrompts::new(prompts.iter().map(Vec::as_slice));
    assert_eq!(packed.document_starts, [0, 9, 10, 30]);
    let rows = model.features(&packed, &[2, 5]).unwrap().rows().unwrap();
    for (ids, rows) in prompts.iter().zip(&rows) {
        for (layer, rows) in [2, 5].into_iter().zip(rows) {
            assert_close(&f32s(rows), &alone(&target, ids, layer), 1e-5);
        }
    }
}

#[test]
fn what_cannot_be_served_is_named_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let refused = |change: &dyn Fn(&mut HiddenServerSettings)| {
        let mut settings = settings(Dtype::Bf16);
        change(&mut settings);
        TargetFeaturizer::load(dir.path(), &settings).unwrap_err()
    };
    let text = refused(&|settings| settings.target_layer_ids = Some(vec![2, 7])).to_string();
    assert!(text.contains('7') && text.contains('6'), "{text}");
    let error = refused(&|settings| settings.max_model_len = Some(4096));
    assert!(matches!(error, Error::TooLongContext { asked: 4096, limit: 2048 }), "{error:?}");
    let absent = TargetFeaturizer::load(Path::new("/no/such/model"), &settings(Dtype::Bf16));
    let text = absent.unwrap_err().to_string();
    assert!(text.contains("/no/such/model"), "{text}");
}

#[test]
fn layers_have_a_default() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let settings = HiddenServerSettings { max_model_len: Some(100), ..config() };
    let model = TargetFeaturizer::load(dir.path(), &settings).unwrap();
    let facts = model.facts();
    let served = &facts.metadata;
    assert!(served.layer_ids.len() > 2 && served.layer_ids.iter().all(|&id| id <= 6), "{facts:?}");
    assert_eq!((facts.max_model_len, served.hidden_size, served.vocab_size), (100, 32, 64));
}
