//! Heads of targets: hidden state 0 and logits for every vector's family, from its checkpoint as is
//! and in the other forms that checkpoints take.

use std::collections::BTreeMap;
use std::path::Path;

use dflash_golden::{Entry, entries};
use dflash_target::{TargetFacts, TargetIo};
use dflash_tensor::DeviceKind;
use dflash_tensor::checkpoint::{TensorFile, write_safetensors};
use dflash_test_place::assert_close;
use libtest_mimic::Trial;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor, no_grad};

const TOLERANCE: f64 = 1e-4;

/// The type and device of tensors made here.
const FLOATS: (Kind, Device) = (Kind::Float, Device::Cpu);
/// Rows unused by any token.
const PADDING: i64 = 16;

/// A checkpoint to write: its configuration, and the tensors outside its layers.
#[derive(Debug)]
struct Checkpoint {
    config: Value,
    tensors: Vec<(String, Tensor)>,
}

/// Expected results of a head.
struct Golden {
    ids_t: Tensor,
    embedded_th: Tensor,
    last_th: Tensor,
    logits_tv: Tensor,
}

type Variant = (&'static str, fn(&mut Checkpoint));

const VARIANTS: [Variant; 6] = [
    ("as it is", |_| ()),
    ("nested", nested),
    ("a wrapper of another name", wrapped),
    ("padded matrices", padded_matrices),
    ("padded vocabulary", padded_vocabulary),
    ("without a word on tying", |checkpoint| {
        let key = "tie_word_embeddings";
        checkpoint.text_config().as_object_mut().unwrap().remove(key);
        checkpoint.config.as_object_mut().unwrap().remove(key);
    }),
];

pub(crate) fn trials() -> Vec<Trial> {
    let kinds = ["targets", "targets2", "target_heads"];
    let found = kinds.into_iter().flat_map(|kind| entries(kind, None));
    found.flat_map(|entry| VARIANTS.map(|variant| trial(&entry, variant))).collect()
}

fn trial(entry: &Entry, (name, change): Variant) -> Trial {
    let dir = entry.path.clone();
    Trial::test(format!("target_heads::{}::{name}", entry.name), move || {
        check(&dir, change);
        Ok(())
    })
}

fn check(dir: &Path, change: fn(&mut Checkpoint)) {
    let golden = Golden::open(dir);
    let mut checkpoint = Checkpoint::open(dir);
    change(&mut checkpoint);
    let written = tempfile::tempdir().unwrap();
    checkpoint.write_in_shards(written.path());
    let facts = TargetFacts::load(written.path(), None).unwrap();
    no_grad(|| {
        let head = TargetIo::of(written.path(), &facts, DeviceKind::CPU_F32).unwrap();
        assert_close("state 0", &head.embed(&golden.ids_t), &golden.embedded_th, TOLERANCE);
        // added rows have logits of their own
        let rows = golden.logits_tv.size()[1];
        let logits_tv = head.logits(&golden.last_th).narrow(1, 0, rows);
        assert_close("logits", &logits_tv, &golden.logits_tv, TOLERANCE);
        few_logits(written.path(), &facts, &golden);
        let normed_th = head.normed(&golden.last_th);
        let head = head.with_normed_states(true);
        let logits_tv = head.logits(&normed_th).narrow(1, 0, rows);
        assert_close("logits of normed states", &logits_tv, &golden.logits_tv, TOLERANCE);
    });
}

fn few_logits(dir: &Path, facts: &TargetFacts, golden: &Golden) {
    let ids = [7, 0, 11];
    let state_h = Vec::<f32>::try_from(golden.last_th.get(3)).unwrap();
    let few = TargetIo::logits_of(dir, facts, &state_h, false, &ids).unwrap();
    let expected = golden.logits_tv.get(3).index_select(0, &Tensor::from_slice(&ids));
    assert_close("a few logits", &Tensor::from_slice(&few), &expected, TOLERANCE);
}

impl Golden {
    fn open(dir: &Path) -> Self {
        let file = TensorFile::open(&dir.join("golden.safetensors")).unwrap();
        let tensor = |name: &str| file.any_tensor(name).unwrap();
        let (embedded_th, last_th) = match file.names().iter().any(|name| name == "hidden_states") {
            true => {
                let states = tensor("hidden_states");
                (states.get(0), states.get(states.size()[0] - 1))
            }
            false => (tensor("embedded"), tensor("last")),
        };
        let ids_t = tensor("input_ids").flatten(0, -1);
        Self { ids_t, embedded_th, last_th, logits_tv: tensor("logits") }
    }
}

impl Checkpoint {
    fn open(dir: &Path) -> Self {
        let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let file = TensorFile::open(&dir.join("model.safetensors")).unwrap();
        let is_outer = |name: &String| name.split('.').all(|part| part.parse::<u64>().is_err());
        let names = file.names().into_iter().filter(is_outer);
        let tensors = names.map(|name| (name.clone(), file.any_tensor(&name).unwrap())).collect();
        Self { config: serde_json::from_str(&config).unwrap(), tensors }
    }

    /// Writes one shard per tensor, and lists a missing one for the layers.
    fn write_in_shards(&self, dir: &Path) {
        let mut shards = BTreeMap::from([(
            "model.layers.0.mlp.up_proj.weight".to_owned(),
            "model-of-layers.safetensors".to_owned(),
        )]);
        for (number, (name, tensor)) in self.tensors.iter().enumerate() {
            let shard = format!("model-{number}.safetensors");
            write_safetensors(&dir.join(&shard), &[(name.clone(), tensor.shallow_clone())])
                .unwrap();
            shards.insert(name.clone(), shard);
        }
        let write = |file: &str, value: &Value| {
            std::fs::write(dir.join(file), value.to_string()).unwrap();
        };
        write("model.safetensors.index.json", &json!({ "weight_map": shards }));
        write("config.json", &self.config);
    }

    fn rename(&mut self, change: impl Fn(&str) -> String) {
        self.tensors.iter_mut().for_each(|(name, _)| *name = change(name));
    }

    fn text_config(&mut self) -> &mut Value {
        match self.config.get("text_config").is_some() {
            true => &mut self.config["text_config"],
            false => &mut self.config,
        }
    }
}

/// Moves flat names under another prefix, and nested ones one level deeper.
fn nested(checkpoint: &mut Checkpoint) {
    if checkpoint.config.get("text_config").is_none() {
        let text = checkpoint.config.clone();
        checkpoint.config = json!({ "architectures": text["architectures"], "text_config": text });
    }
    checkpoint.rename(|name| match name.strip_prefix("model.language_model.") {
        Some(rest) => format!("language_model.model.{rest}"),
        None => format!("language_model.{}", name.trim_start_matches("language_model.")),
    });
}

/// A multimodal model of unknown name around a text model of known type.
fn wrapped(checkpoint: &mut Checkpoint) {
    let mut text = checkpoint.text_config().clone();
    text.as_object_mut().unwrap().remove("architectures");
    let tied = checkpoint.config.get("tie_word_embeddings").cloned().unwrap_or(Value::Null);
    let architectures = ["ThingForConditionalGeneration"];
    checkpoint.config = json!({ "architectures": architectures, "model_type": "thing",
                                "text_config": text, "tie_word_embeddings": tied });
    checkpoint.rename(|name| {
        let bare = name.trim_start_matches("language_model.").trim_start_matches("model.");
        match bare.trim_start_matches("language_model.") {
            head if head.starts_with("lm_head") => head.to_owned(),
            bare => format!("model.language_model.{}", bare.trim_start_matches("backbone.")),
        }
    });
    let tower = Tensor::ones([4], FLOATS);
    checkpoint.tensors.push(("model.visual.merger.norm.weight".to_owned(), tower));
}

/// Matrices with more rows than the vocabulary.
fn padded_matrices(checkpoint: &mut Checkpoint) {
    let rows = checkpoint.text_config()["vocab_size"].as_i64().unwrap();
    for (_, tensor) in &mut checkpoint.tensors {
        if tensor.size().len() == 2 && tensor.size()[0] == rows {
            let padding = Tensor::full([PADDING, tensor.size()[1]], 9.0, FLOATS);
            *tensor = Tensor::cat(&[&*tensor, &padding], 0);
        }
    }
}

/// The same, with a configuration that counts the extra rows.
fn padded_vocabulary(checkpoint: &mut Checkpoint) {
    let rows = checkpoint.text_config()["vocab_size"].as_i64().unwrap();
    padded_matrices(checkpoint);
    for (_, tensor) in &mut checkpoint.tensors {
        if tensor.size() == [rows] {
            let padding = Tensor::zeros([PADDING], FLOATS);
            *tensor = Tensor::cat(&[&*tensor, &padding], 0);
        }
    }
    checkpoint.text_config()["vocab_size"] = json!(rows + PADDING);
}
