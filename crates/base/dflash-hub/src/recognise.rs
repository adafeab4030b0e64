//! What a path or a directory is that is not the model it was given as: so that the error can say so, where
//! the reader of its files would only miss a key.

use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::Misnamed;
use crate::part::ModelPart;

/// The first bytes of a GGUF file.
const GGUF: &[u8; 4] = b"GGUF";

/// What the file `path` is, where a model directory is needed.
pub(crate) fn file(path: &Path, part: ModelPart) -> Misnamed {
    let mut magic = [0; 4];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    let named_gguf = path.extension().is_some_and(|ending| ending == "gguf");
    match (named_gguf || read.is_ok() && &magic == GGUF, part.is_draft()) {
        (true, false) => Misnamed::GgufTarget,
        (true, true) => Misnamed::GgufDraft,
        (false, _) => Misnamed::File,
    }
}

/// What the model in `dir` is, if it is not a `part`.
pub(crate) fn directory(dir: &Path, part: ModelPart) -> Option<Misnamed> {
    let text = match std::fs::read(dir.join("config.json")) {
        Ok(text) => text,
        // Quantized models are often fetched as a folder of such files alone.
        Err(_) if holds_gguf(dir) && part.is_draft() => return Some(Misnamed::GgufDraft),
        Err(_) if holds_gguf(dir) && !dir.join("tokenizer.json").is_file() => {
            return Some(Misnamed::GgufTarget);
        }
        Err(_) => return None,
    };
    let config: Value = serde_json::from_slice(&text).ok()?;
    match (Kind::of(&config)?, part.is_draft()) {
        (Kind::Dflash | Kind::EarlyDflash, false) => Some(Misnamed::DraftAsTarget),
        (Kind::Drafter(name), false) => Some(Misnamed::OtherDraftAsTarget { name }),
        (Kind::EarlyDflash, true) => Some(Misnamed::EarlyDraft),
        (Kind::Drafter(name), true) => Some(Misnamed::OtherDraft { name }),
        (Kind::Model(name), true) => Some(Misnamed::TargetAsDraft { name }),
        (Kind::Dflash, true) | (Kind::Model(_), false) => None,
    }
}

fn holds_gguf(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| path.extension().is_some_and(|end| end == "gguf"))
}

/// The kind of model that a `config.json` describes.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// A DFlash drafter, in z-lab's form or speculators'.
    Dflash,
    /// One of z-lab's first drafters, whose program knew the mask token and the layers that are read.
    EarlyDflash,
    /// A drafter of another kind.
    Drafter(String),
    /// A language model.
    Model(String),
}

impl Kind {
    /// `None` where nothing in the file says what it is.
    fn of(config: &Value) -> Option<Self> {
        let architecture = config["architectures"][0].as_str().unwrap_or_default();
        if config["dflash_config"].is_object() {
            return Some(Self::Dflash);
        }
        if let Some(kind) = config["speculators_model_type"].as_str() {
            return Some(match kind {
                "dflash" => Self::Dflash,
                other => Self::Drafter(of_speculators(other)),
            });
        }
        if let Some(name) = other_drafter(config, architecture) {
            return Some(Self::Drafter(format!("{name} ({architecture})")));
        }
        match architecture {
            "" => None,
            "DFlashDraftModel" => Some(Self::EarlyDflash),
            name if name.contains("DFlash") => None,
            name => Some(Self::Model(name.to_owned())),
        }
    }
}

fn of_speculators(kind: &str) -> String {
    match kind {
        "eagle3" => "an EAGLE-3 drafter in speculators' layout".to_owned(),
        "eagle" => "an EAGLE drafter in speculators' layout".to_owned(),
        other => format!("a drafter of speculators' algorithm {other}"),
    }
}

/// The kind of drafter by the architecture that its trainer wrote: SpecForge's `LlamaForCausalLMEagle3`, vLLM's
/// `Eagle3LlamaForCausalLM`, `EAGLEModel`, `MedusaModel`, `MLPSpeculatorPreTrainedModel`, and multi-token heads.
fn other_drafter(config: &Value, architecture: &str) -> Option<&'static str> {
    let name = architecture.to_lowercase();
    let kind = config["model_type"].as_str().unwrap_or_default().to_lowercase();
    let says = |word: &str| name.contains(word) || kind.contains(word);
    // EAGLE-3 reads three layers and proposes from a vocabulary of its own.
    let has_own_vocabulary = config["draft_vocab_size"].is_number();
    match () {
        () if says("eagle3") || says("eagle") && has_own_vocabulary => Some("an EAGLE-3 drafter"),
        () if config["eagle_config"].is_object() => Some("an EAGLE-3 drafter"),
        () if says("eagle") => Some("an EAGLE drafter"),
        () if says("medusa") => Some("a Medusa drafter"),
        () if says("mlpspeculator") || says("mlp_speculator") => Some("an MLP speculator"),
        () if says("mtpmodel") || name.ends_with("mtp") => Some("a multi-token-prediction drafter"),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_configuration_says_what_it_describes() {
        let check = |config: Value, expect: Option<Kind>| assert_eq!(Kind::of(&config), expect);
        let named = |name: &str| json!({ "architectures": [name] });
        let drafter = |text: &str| Some(Kind::Drafter(text.to_owned()));
        check(
            json!({"dflash_config": {}, "architectures": ["DFlashDraftModel"]}),
            Some(Kind::Dflash),
        );
        check(json!({"speculators_model_type": "dflash"}), Some(Kind::Dflash));
        check(named("DFlashDraftModel"), Some(Kind::EarlyDflash));
        let eagle3 = "an EAGLE-3 drafter (LlamaForCausalLMEagle3)";
        check(named("LlamaForCausalLMEagle3"), drafter(eagle3));
        check(
            named("Eagle3LlamaForCausalLM"),
            drafter("an EAGLE-3 drafter (Eagle3LlamaForCausalLM)"),
        );
        let speculators = json!({"speculators_model_type": "eagle3", "architectures": ["X"]});
        check(speculators, drafter("an EAGLE-3 drafter in speculators' layout"));
        check(named("EAGLEModel"), drafter("an EAGLE drafter (EAGLEModel)"));
        check(named("MedusaModel"), drafter("a Medusa drafter (MedusaModel)"));
        check(named("Qwen3ForCausalLM"), Some(Kind::Model("Qwen3ForCausalLM".to_owned())));
        check(json!({"hidden_size": 64}), None);
    }

    #[test]
    fn a_gguf_file_is_known_by_its_name_or_its_first_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        assert_eq!(file(&path("blob", b"GGUF\x03"), ModelPart::Target), Misnamed::GgufTarget);
        assert_eq!(file(&path("a.gguf", b""), ModelPart::Draft), Misnamed::GgufDraft);
        assert_eq!(file(&path("b.bin", b"none"), ModelPart::Head), Misnamed::File);
    }
}
