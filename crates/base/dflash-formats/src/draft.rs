//! A draft's configuration, written as z-lab's `config.json` and read from it or from speculators'
//! form (module `speculators`).
//!
//! One file must work for every engine that serves drafts, so each Qwen3 field is explicit and the
//! block size is in both places where engines look for it.

mod block;
mod head;
mod outline;
mod speculators;

use std::path::Path;

use serde_json::{Value, json};

pub use block::BlockShape;
pub use head::HeadFields;
pub use outline::Outline;
pub use speculators::Verifier;

use crate::Result;
use crate::fields::Fields;
use crate::rope::{RopeScaling, Wanted};

/// llama.cpp's architecture name for drafts, and the prefix of its keys in GGUF files.
pub const ARCHITECTURE: &str = "dflash";

/// Layout of a draft's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// z-lab: config.json and model.safetensors.
    #[default]
    ZLab,
    /// speculators: the same files with another config.json.
    Speculators,
    /// llama.cpp: one GGUF file.
    Gguf,
}

/// The key of the drafter-specific settings in z-lab's layout.
const ZLAB_OWN: &str = "dflash_config";

/// Attention of a draft layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// The whole context and the whole block.
    Full,
    /// The last `sliding_window` tokens; causal in the block.
    Sliding,
}

impl LayerKind {
    fn name(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
        }
    }
}

/// A draft's configuration. Field names are Hugging Face's.
#[allow(missing_docs, reason = "Hugging Face's names")]
#[derive(Clone, Debug, PartialEq)]
pub struct DraftConfig {
    pub hidden_size: i64,
    pub intermediate_size: i64,
    pub num_attention_heads: i64,
    pub num_key_value_heads: i64,
    pub head_dim: i64,
    /// Whether the four attention projections have biases (as in z-lab's drafts for gpt-oss).
    pub attention_bias: bool,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies, if any.
    pub rope_scaling: Option<RopeScaling>,
    /// One entry per layer.
    pub layers: Vec<LayerKind>,
    /// Window of the sliding layers, if there are any.
    pub sliding_window: Option<usize>,
    /// Slots of a block, including the anchor's.
    pub block_size: usize,
    /// The token in the slots to predict.
    pub mask_token_id: i64,
    /// Auxiliary layers, 0 = embedding output, k = after k decoder layers; ascending.
    pub target_layer_ids: Vec<u32>,
    /// Number of target layers, if the checkpoint records it (speculators' do not).
    pub num_target_layers: Option<usize>,
    /// Rows of the target's embedding (padded, not `len(tokenizer)`).
    pub vocab_size: i64,
    pub max_position_embeddings: i64,
    /// Standard deviation of freshly initialised matrices.
    pub initializer_range: f64,
    /// The target's, if it defines one.
    pub eos_token_id: Option<Value>,
    /// The head.
    pub head: HeadFields,
}

impl DraftConfig {
    /// Query heads per key/value head.
    pub fn queries_per_kv(&self) -> i64 {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Total width of the keys (or values) of a position.
    pub fn kv_width(&self) -> i64 {
        self.num_key_value_heads * self.head_dim
    }

    /// Shape of a block.
    pub fn block(&self) -> BlockShape {
        self.head.block(self.block_size)
    }

    /// K, the number of auxiliary layers.
    pub fn aux_layers(&self) -> i64 {
        self.target_layer_ids.len() as i64
    }

    /// Reads `config.json` of a checkpoint directory.
    ///
    /// # Errors
    /// A missing file, a missing key, an unsupported rotary scaling or layer type.
    pub fn load(dir: &Path) -> Result<Self> {
        Self::from_fields(Fields::read(dir, "config.json")?)
    }

    /// Parses the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        Self::from_fields(Fields::parse(path, text)?)
    }

    /// Writes `config.json` to `dir`, in z-lab's form, for weights of type `dtype`.
    ///
    /// # Errors
    /// I/O.
    pub fn save(&self, dir: &Path, dtype: &str) -> Result<()> {
        write_config(dir, &self.to_json(dtype))
    }

    /// Writes `config.json` to `dir`, in speculators' form, for weights of type `dtype`;
    /// `draft_vocab_size` is the size of a pruned vocabulary.
    ///
    /// # Errors
    /// I/O.
    pub fn save_speculators(
        &self,
        dir: &Path,
        dtype: &str,
        draft_vocab_size: usize,
        verifier: &Verifier,
    ) -> Result<()> {
        write_config(dir, &speculators::to_json(self, dtype, draft_vocab_size, verifier))
    }

    fn from_fields(fields: Fields) -> Result<Self> {
        let form = Form::of(fields);
        match form.layout {
            Layout::Speculators => speculators::check(&form)?,
            _ => form.check_zlab()?,
        }
        let fields = &form.layers;
        let size = |key| fields.required(key, Fields::size);
        let layers = layer_kinds(fields)?;
        let sliding_window = match layers.contains(&LayerKind::Sliding) {
            true => Some(size("sliding_window")? as usize),
            false => None,
        };
        let (heads, kv_heads) = (size("num_attention_heads")?, size("num_key_value_heads")?);
        if heads % kv_heads != 0 {
            let expected = "it must divide num_attention_heads";
            return Err(fields.refuse("num_key_value_heads", expected));
        }
        if fields.text("hidden_act")?.is_some_and(|name| name != "silu") {
            return Err(fields.refuse("hidden_act", "drafts have silu"));
        }
        Ok(Self {
            hidden_size: size("hidden_size")?,
            intermediate_size: size("intermediate_size")?,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: size("head_dim")?,
            attention_bias: fields.flag("attention_bias")?,
            rms_norm_eps: fields.required("rms_norm_eps", Fields::number)?,
            rope_theta: rope_theta(fields)?,
            rope_scaling: rope_scaling(fields)?,
            layers,
            sliding_window,
            block_size: form.block_size()? as usize,
            mask_token_id: form.mask_token_id()?,
            target_layer_ids: form.target_layer_ids()?,
            num_target_layers: fields.size("num_target_layers")?.map(|layers| layers as usize),
            vocab_size: size("vocab_size")?,
            max_position_embeddings: size("max_position_embeddings")?,
            // Hugging Face's default for the Qwen family.
            initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
            eos_token_id: fields.value("eos_token_id").cloned(),
            head: form.head()?,
        })
    }

    /// Base and scaling as in Transformers 5 and vLLM; older readers use `rope_theta` and
    /// `rope_scaling`.
    fn rope_parameters(&self) -> Value {
        let plain = || json!({ "rope_type": "default" });
        let mut parameters =
            self.rope_scaling.map_or_else(plain, |scaling| Value::Object(scaling.to_json()));
        parameters["rope_theta"] = json!(self.rope_theta);
        parameters
    }

    /// z-lab's form, compatible with vLLM, SGLang and Transformers.
    fn to_json(&self, dtype: &str) -> Value {
        let layer_types: Vec<&str> = self.layers.iter().map(|layer| layer.name()).collect();
        let zlab_ids: Vec<i64> =
            self.target_layer_ids.iter().map(|&id| i64::from(id) + ZLAB_EMBEDDING).collect();
        let mut config = json!({
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            ZLAB_OWN: {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": zlab_ids,
            },
            "dtype": dtype,
            "eos_token_id": self.eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "layer_types": layer_types,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.layers.len(),
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.layers.len(),
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope_parameters(),
            "rope_scaling": self.rope_scaling.map(RopeScaling::to_json),
            "rope_theta": self.rope_theta,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": false,
            "torch_dtype": dtype,
            "use_cache": true,
            "use_sliding_window": self.sliding_window.is_some(),
            "vocab_size": self.vocab_size,
        });
        self.head.write(&mut config);
        config
    }
}

fn write_config(dir: &Path, config: &Value) -> Result<()> {
    let text = format!("{config:#}\n");
    Ok(dflash_io::write_bytes(&dir.join("config.json"), text.as_bytes())?)
}

/// z-lab's id of the embedding output. It counts layer outputs from 0, while we count, like
/// speculators and llama.cpp, the states between layers, starting with the embedding output.
const ZLAB_EMBEDDING: i64 = -1;

/// A `config.json` of either layout, and where its fields are.
struct Form {
    layout: Layout,
    /// The Qwen3 fields.
    layers: Fields,
    /// The drafter-specific fields.
    own: Fields,
}

impl Form {
    fn of(file: Fields) -> Self {
        if file.has(speculators::KIND) {
            let layers = file.object_or_empty(speculators::LAYERS);
            return Self { layout: Layout::Speculators, layers, own: file };
        }
        let own = file.object_or_empty(ZLAB_OWN);
        Self { layout: Layout::ZLab, layers: file, own }
    }

    /// Rejects drafters other than plain ones.
    fn check_zlab(&self) -> Result<()> {
        self.layers.required(ZLAB_OWN, Fields::object)?;
        let other_drafter = "only plain DFlash drafters can be read";
        // JetSpec's mask and DFlash2's candidate selector: other drafters that use DFlash's key.
        if self.own.flag("causal")? {
            return Err(self.own.refuse("causal", other_drafter));
        }
        if self.own.value("selector_rank").is_some() {
            return Err(self.own.refuse("selector_rank", other_drafter));
        }
        refuse_other_layers(&self.layers, &self.own)
    }

    fn block_size(&self) -> Result<i64> {
        match self.layers.size("block_size")? {
            Some(size) if self.layout == Layout::ZLab => Ok(size),
            _ => self.own.required("block_size", Fields::size),
        }
    }

    /// speculators' files describe only DFlash's own head.
    fn head(&self) -> Result<HeadFields> {
        match self.layout {
            Layout::ZLab => HeadFields::read(&self.own),
            _ => Ok(HeadFields::default()),
        }
    }

    fn mask_token_id(&self) -> Result<i64> {
        match self.own.token("mask_token_id")? {
            None if self.layout == Layout::ZLab => {
                self.layers.required("mask_token_id", Fields::token)
            }
            _ => self.own.required("mask_token_id", Fields::token),
        }
    }

    /// The auxiliary layers in our numbering.
    fn target_layer_ids(&self) -> Result<Vec<u32>> {
        let (key, first) = match self.layout {
            Layout::Speculators => ("aux_hidden_state_layer_ids", 0),
            _ => ("target_layer_ids", ZLAB_EMBEDDING),
        };
        let expected =
            format!("ascending layer numbers from {first} (embedding output) are expected");
        let ours = |id: &Value| u32::try_from(id.as_i64()?.checked_sub(first)?).ok();
        let list = |value: &Value| {
            let ids: Vec<u32> = value.as_array()?.iter().map(ours).collect::<Option<_>>()?;
            (!ids.is_empty() && ids.is_sorted_by(|a, b| a < b)).then_some(ids)
        };
        self.own.required(key, |fields, key| fields.typed(key, &expected, list))
    }
}

/// Rejects layer features that some published drafts have in addition to Qwen3's.
fn refuse_other_layers(fields: &Fields, dflash: &Fields) -> Result<()> {
    let plain = "drafts have Qwen3's layers, without that";
    for key in ["attention_sink_bias", "use_swa"] {
        if dflash.flag(key)? {
            return Err(dflash.refuse(key, plain));
        }
    }
    if dflash.value("attention_value_scale").is_some() {
        return Err(dflash.refuse("attention_value_scale", plain));
    }
    for key in ["is_causal", "rope_is_neox_style", "is_neox_style"] {
        // the default if absent: neither causal nor interleaved
        let expected = key != "is_causal";
        if fields.value(key).is_some() && fields.flag(key)? != expected {
            return Err(fields.refuse(key, plain));
        }
    }
    Ok(())
}

fn rope_theta(fields: &Fields) -> Result<f64> {
    if let Some(rope) = fields.object("rope_parameters")?
        && let Some(theta) = rope.number("rope_theta")?
    {
        return Ok(theta);
    }
    fields.required("rope_theta", Fields::number)
}

fn rope_scaling(fields: &Fields) -> Result<Option<RopeScaling>> {
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(rope) = fields.object(key)? else { continue };
        match RopeScaling::wanted(&rope)? {
            Wanted::Plain => {}
            Wanted::Scaled(scaling) => return Ok(Some(scaling)),
            Wanted::Other(_) => {
                let key = if rope.has("rope_type") { "rope_type" } else { "type" };
                let expected = "drafts are run with plain, llama3 and yarn rotary embedding";
                return Err(rope.refuse(key, expected));
            }
        }
    }
    Ok(None)
}

fn layer_kinds(fields: &Fields) -> Result<Vec<LayerKind>> {
    let count = fields.required("num_hidden_layers", Fields::size)? as usize;
    let Some(names) = fields.texts("layer_types")? else {
        return Ok(vec![LayerKind::Full; count]);
    };
    if names.len() != count {
        return Err(fields.refuse("layer_types", "num_hidden_layers entries are expected"));
    }
    let kind = |name: &String| match name.as_str() {
        "full_attention" => Ok(LayerKind::Full),
        "sliding_attention" => Ok(LayerKind::Sliding),
        _ => {
            let expected = "full_attention and sliding_attention are implemented";
            Err(fields.refuse("layer_types", expected))
        }
    };
    names.iter().map(kind).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> DraftConfig {
        DraftConfig {
            hidden_size: 32,
            intermediate_size: 64,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 8,
            attention_bias: false,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            rope_scaling: None,
            layers: vec![LayerKind::Full, LayerKind::Sliding],
            sliding_window: Some(128),
            block_size: 4,
            mask_token_id: 95,
            target_layer_ids: vec![2, 6, 10],
            num_target_layers: Some(12),
            vocab_size: 96,
            max_position_embeddings: 256,
            initializer_range: 0.02,
            eos_token_id: None,
            head: HeadFields::default(),
        }
    }

    fn parse(change: impl FnOnce(&mut Value)) -> Result<DraftConfig> {
        let mut value = config().to_json("bfloat16");
        change(&mut value);
        DraftConfig::parse(Path::new("config.json"), &value.to_string())
    }

    #[test]
    fn what_is_written_reads_back_and_has_zlabs_layer_ids() {
        assert_eq!(parse(|_| ()).unwrap(), config());
        let value = config().to_json("bfloat16");
        assert_eq!(value["dflash_config"]["target_layer_ids"], json!([1, 5, 9]));
    }

    #[test]
    fn another_head_is_described_and_named_in_the_architecture() {
        let plain = config().to_json("bfloat16");
        assert!(plain["dflash_config"].get("head").is_none());
        let keys = json!({"rank": 4}).as_object().unwrap().clone();
        let head = HeadFields { kind: "other".into(), sample_from_anchor: true, keys };
        let config = DraftConfig { head, ..config() };
        let value = config.to_json("bfloat16");
        assert_eq!(value["architectures"], json!(["DFlashDraftModelWith_other"]));
        let read = DraftConfig::parse(Path::new("config.json"), &value.to_string()).unwrap();
        assert_eq!((read.block().proposals(), &read), (4, &config));
        let message = parse(|config| config["dflash_config"]["head"] = json!({})).unwrap_err();
        assert!(message.to_string().contains("dflash_config.head.kind"), "{message}");
    }

    #[test]
    fn what_cannot_be_honoured_is_named() {
        let check = |key: &str, value: Value, expect: &str| {
            let message = parse(|config| config[key] = value).unwrap_err().to_string();
            assert!(message.contains(expect), "{message}");
        };
        check("attention_bias", json!(1), "`attention_bias` is 1");
        check("hidden_act", json!("gelu"), "`hidden_act` is \"gelu\"");
        check("rope_scaling", json!({"rope_type": "yarn"}), "`rope_scaling.factor` is missing");
        check("rope_parameters", json!({"type": "longrope"}), "`rope_parameters.type`");
        check("layer_types", json!(["full_attention"]), "num_hidden_layers entries");
        check("layer_types", json!(["full_attention", "linear"]), "linear");
        check("sliding_window", json!(null), "`sliding_window` is null");
        check("num_key_value_heads", json!(3), "must divide");
        check("hidden_size", json!("wide"), "`hidden_size` is \"wide\"");
        for (key, value) in [("causal", json!(true)), ("selector_rank", json!(16))] {
            let change = |config: &mut Value| config["dflash_config"][key] = value;
            let message = parse(change).unwrap_err().to_string();
            assert!(message.contains(&format!("dflash_config.{key}")), "{message}");
        }
    }
}
