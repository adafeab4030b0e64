//! `dflash export` as users run it: round trips in every layout, and what is refused.

use std::path::Path;

use dflash_draft::objective::DraftVocabulary;
use dflash_draft::{Draft, DraftConfig, Fresh};
use serde_json::Value;
use tch::{Device, Kind};

use crate::world::{Run, World};

/// Auxiliary layers that every engine can return.
const EARLY: [&str; 2] = ["--target-layer-ids", "1"];

/// A world with a drafter of a few steps.
fn trained(more: &[&str]) -> World {
    let world = World::new();
    let run = world.train("draft", &[&["--max-steps", "3"], more].concat());
    assert!(run.success(), "{}", run.stderr);
    world
}

/// Exports `draft` as `output`, both in the world.
fn export(world: &World, (draft, output): (&str, &str), more: &[&str]) -> Run {
    let path = |name: &str| world.path(name).to_string_lossy().into_owned();
    let (draft, target, output) = (path(draft), path("target"), path(output));
    let line = ["export", "--draft", &draft, "--target", &target, "--output", &output];
    world.engine(&[&line, more].concat())
}

fn succeeds(world: &World, places: (&str, &str), more: &[&str]) -> String {
    let run = export(world, places, more);
    assert!(run.success(), "{more:?}: {}", run.stderr);
    assert_eq!(run.stdout.trim_end(), world.path(places.1).to_string_lossy());
    run.stderr
}

/// Drafts of a world's two-layer target usually use the last layer's states.
const WITHOUT_SGLANG: [&str; 1] = ["--without-sglang"];

/// Exports and expects a refusal that says `expect` and leaves nothing behind.
fn refused(world: &World, places: (&str, &str), more: &[&str], expect: &str) {
    let before = names(&world.path("."));
    let run = export(world, places, more);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains(expect), "{}", run.stderr);
    assert_eq!(names(&world.path(".")), before);
}

fn names(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<String> =
        dir.read_dir().unwrap().map(|entry| name(entry).into_string().unwrap()).collect();
    names.sort();
    names
}

fn load(world: &World, name: &str) -> Draft {
    let dir = dflash_run::draft_dir(&world.path(name)).unwrap();
    Draft::load(&dir, Device::Cpu, Kind::Float).unwrap()
}

fn vocabulary(world: &World, name: &str) -> Option<DraftVocabulary> {
    DraftVocabulary::load(&dflash_run::draft_dir(&world.path(name)).unwrap()).unwrap()
}

fn config(world: &World, name: &str) -> Value {
    let text = std::fs::read(world.path(name).join("config.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// The per-slot counts of `dflash eval`.
fn accepted(world: &World, name: &str) -> Value {
    world.eval(&world.path(name))["slots"].clone()
}

/// Changes the configuration of the drafter in `name`, a directory without links.
fn change(world: &World, name: &str, change: impl FnOnce(&mut Value)) {
    let mut value = config(world, name);
    change(&mut value);
    std::fs::write(world.path(name).join("config.json"), value.to_string()).unwrap();
}

#[test]
fn a_draft_goes_through_every_layout_and_comes_back_bit_for_bit() {
    let world = trained(&EARLY);
    let own = load(&world, "draft");
    let ways = [("speculators", "spec"), ("gguf", "draft.gguf"), ("zlab", "zlab")];
    for (format, output) in ways {
        let said = succeeds(&world, ("draft", output), &["--format", format]);
        assert!(
            said.contains("is 0 of its tensor's largest weight, that of a forward pass 0"),
            "{said}"
        );
        let back = format!("{format}-back");
        succeeds(&world, (output, &back), &[]);
        let read = load(&world, &back);
        assert!(read.flat().equal(own.flat()), "{format}");
        assert_eq!(read.config(), own.config(), "{format}");
    }
    assert_eq!(accepted(&world, "spec"), accepted(&world, "gguf-back"));
    let made_for = &config(&world, "gguf-back")["dflash_target"];
    assert!(made_for["weights"].is_string(), "{made_for}");
    refused(&world, ("draft", "spec"), &[], "already exists");
}

#[test]
fn each_type_is_stored_as_it_is_called() {
    let world = trained(&EARLY);
    let bytes = |name: &str| std::fs::metadata(world.path(name)).unwrap().len();
    for (dtype, name) in [("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32")] {
        succeeds(&world, ("draft", dtype), &["--dtype", dtype]);
        assert_eq!(config(&world, dtype)["dtype"], name);
        let gguf = format!("{dtype}.gguf");
        succeeds(&world, ("draft", &gguf), &["--dtype", dtype, "--format", "gguf"]);
    }
    assert!(bytes("f32/model.safetensors") > bytes("f16/model.safetensors") * 19 / 10);
    let said = succeeds(&world, ("draft", "q8.gguf"), &["--dtype", "q8_0", "--format", "gguf"]);
    assert!(!said.contains("is 0 of"), "{said}");
    assert!(
        bytes("q8.gguf") < bytes("bf16.gguf") * 2 / 3,
        "{} {}",
        bytes("q8.gguf"),
        bytes("bf16.gguf")
    );
    succeeds(&world, ("q8.gguf", "from-q8"), &["--dtype", "f32"]);
    let run = export(&world, ("draft", "x"), &["--dtype", "q8_0"]);
    assert!(run.stderr.contains("--dtype q8_0 needs --format gguf"), "{}", run.stderr);
}

#[test]
fn a_pruned_vocabulary_travels_or_is_left_out_on_request() {
    let world = trained(&[&EARLY[..], &["--draft-vocab-size", "20"]].concat());
    let own = vocabulary(&world, "draft").unwrap();
    refused(&world, ("draft", "zlab"), &[], "20 of 64 tokens");
    succeeds(&world, ("draft", "zlab"), &["--full-vocabulary"]);
    assert_eq!(vocabulary(&world, "zlab"), None);
    succeeds(&world, ("draft", "spec"), &["--format", "speculators"]);
    assert_eq!(vocabulary(&world, "spec"), Some(own.clone()));
    assert_eq!(config(&world, "spec")["draft_vocab_size"], 20);
    succeeds(&world, ("draft", "draft.gguf"), &["--format", "gguf"]);
    succeeds(&world, ("draft.gguf", "back"), &["--format", "speculators"]);
    assert_eq!(vocabulary(&world, "back"), Some(own));
    assert_eq!(accepted(&world, "back"), accepted(&world, "draft"));
}

#[test]
fn what_an_engine_would_serve_wrongly_is_refused_with_the_reason() {
    let world = trained(&["--num-layers", "2"]);
    // It uses the state after the last layer.
    refused(&world, ("draft", "plain"), &[], "SGLang cannot serve this draft");
    refused(&world, ("draft", "plain"), &[], "layer id 2 of 0 to 2");
    succeeds(&world, ("draft", "plain"), &WITHOUT_SGLANG);
    let copy = |name: &str| {
        world.copy_target("plain", name);
    };
    // And one that uses the embedding, whose id is -1 in this layout.
    copy("embedding");
    change(&world, "embedding", |config| {
        let ids = config["dflash_config"]["target_layer_ids"].as_array_mut().unwrap();
        ids[0] = (-1).into();
    });
    refused(&world, ("embedding", "x"), &[], "layer id 0 of 0 to 2");
    copy("mixed");
    change(&world, "mixed", |config| {
        config["layer_types"] = serde_json::json!(["full_attention", "sliding_attention"]);
        config["sliding_window"] = 16.into();
    });
    let causality = "one causality for all layers";
    refused(&world, ("mixed", "x"), &["--format", "speculators"], causality);
    refused(&world, ("mixed", "x"), &["--format", "gguf"], causality);
    succeeds(&world, ("mixed", "mixed-zlab"), &WITHOUT_SGLANG);
    refused(&world, ("plain", "x"), &["--format", "gguf"], "layer id 2 is not available");
    copy("mask");
    change(&world, "mask", |config| config["dflash_config"]["mask_token_id"] = 61.into());
    refused(
        &world,
        ("mask", "x"),
        &WITHOUT_SGLANG,
        "mask token 61 is the end-of-text token there; name the target",
    );
    copy("wide");
    change(&world, "wide", |config| config["vocab_size"] = 80.into());
    refused(&world, ("wide", "x"), &WITHOUT_SGLANG, "`vocab_size` is 80, the target's is 64");
    // A mask token outside the smaller vocabulary: no flag of this command would help.
    change(&world, "wide", |config| config["dflash_config"]["mask_token_id"] = 75.into());
    refused(&world, ("wide", "x"), &WITHOUT_SGLANG, "`vocab_size` is 80, the target's is 64");
    succeeds(&world, ("plain", "spec"), &["--format", "speculators"]);
    let verifier = &config(&world, "spec")["speculators_config"]["verifier"]["name_or_path"];
    assert_eq!(verifier, "target", "no path of this machine");
    copy("deep");
    change(&world, "deep", |config| config["num_target_layers"] = 3.into());
    refused(&world, ("deep", "x"), &WITHOUT_SGLANG, "`num_target_layers` is 3");
    world.write_other_target("other");
    let other = world.path("other").to_string_lossy().into_owned();
    let elsewhere = ["--target", &other, "--without-sglang"];
    refused(&world, ("plain", "x"), &elsewhere, "pass --allow-other-target");
    let allowed = ["--target", &other, "--allow-other-target", "--without-sglang"];
    succeeds(&world, ("plain", "x"), &allowed);
}

/// z-lab's drafts for gpt-oss have attention biases: training starts from them, updates them,
/// resumes them bit for bit, and exports them to the engines that apply them.
#[test]
fn biases_of_the_attention_are_trained_and_exported() {
    let world = trained(&EARLY);
    let plain = load(&world, "draft");
    let config = DraftConfig { attention_bias: true, ..plain.config().clone() };
    let biased = Draft::zeros(config, Device::Cpu);
    for parameter in biased.layout().parameters() {
        let same = plain.layout().parameters().iter().find(|p| p.name == parameter.name);
        match same {
            Some(same) => parameter.view(biased.flat()).copy_(&same.view(plain.flat())),
            None => _ = parameter.view(biased.flat()).fill_(0.25),
        }
    }
    std::fs::create_dir(world.path("biased")).unwrap();
    biased.save(&world.path("biased")).unwrap();
    let path = world.path("biased").to_string_lossy().into_owned();
    let start = ["--from-pretrained", &path, "--save-every", "3", "--target-layer-ids", "1"];
    let run = world.train("whole", &[&start[..], &["--max-steps", "6"]].concat());
    assert!(run.success(), "{}", run.stderr);
    let after = load(&world, "whole");
    assert!(after.config().attention_bias);
    for parameter in after.layout().parameters().iter().filter(|it| it.fresh == Fresh::Zeros) {
        let moved = (parameter.view(after.flat()) - 0.25).abs().max().double_value(&[]);
        assert!(moved > 1e-4, "{} moved by {moved}", parameter.name);
    }
    let split = ["--resume", "--nproc", "1"];
    std::fs::remove_dir_all(world.path("whole").join("step-000006")).unwrap();
    let run = world.train("whole", &[&start[..], &["--max-steps", "6"], &split].concat());
    assert!(run.success(), "{}", run.stderr);
    assert!(load(&world, "whole").flat().equal(after.flat()), "resumed bit for bit");
    succeeds(&world, ("whole", "zlab"), &[]);
    succeeds(&world, ("whole", "spec"), &["--format", "speculators"]);
    assert_eq!(self::config(&world, "spec")["transformer_layer_config"]["attention_bias"], true);
    for name in ["zlab", "spec"] {
        assert!(load(&world, name).flat().equal(after.flat()), "{name}");
    }
    assert_eq!(accepted(&world, "zlab"), accepted(&world, "whole"));
    refused(&world, ("whole", "x"), &["--format", "gguf"], "has no biases");
}

#[test]
fn sliding_layers_keep_their_window_in_gguf() {
    let world = trained(&[&EARLY[..], &["--sliding-window", "8"]].concat());
    let own = load(&world, "draft");
    succeeds(&world, ("draft", "draft.gguf"), &["--format", "gguf"]);
    succeeds(&world, ("draft.gguf", "back"), &[]);
    assert_eq!(load(&world, "back").config(), own.config());
    assert_eq!(own.config().sliding_window, Some(8));
}

#[test]
fn a_gguf_file_that_is_not_whole_or_not_ours_is_named() {
    let world = trained(&EARLY);
    succeeds(&world, ("draft", "draft.gguf"), &["--format", "gguf"]);
    let whole = std::fs::read(world.path("draft.gguf")).unwrap();
    let of = |bytes: &[u8], expect: &str| {
        std::fs::write(world.path("bad.gguf"), bytes).unwrap();
        refused(&world, ("bad.gguf", "x"), &[], expect);
    };
    of(&whole[..whole.len() - 64], "is not whole");
    of(&whole[..100], "cut off in its header");
    of(b"GGUFnonsense", "is of version");
    of(b"safetensors", "does not begin with GGUF");
    let key = b"dflash.block_size";
    let at = whole.windows(key.len()).position(|window| window == key).unwrap();
    let mut other = whole.clone();
    other[at + 7..at + 12].copy_from_slice(b"other");
    of(&other, "`dflash.block_size` is missing");
    let dir = world.path("x");
    assert!(DraftConfig::load(&dir).is_err() && !dir.exists());
}
