//! What is saved, resumed and refused.

use std::path::Path;

use dflash_run::recorded;
use dflash_settings::{
    CheckpointSettings, Classed, Dtype, Resume, SchedulerType, TrainSettings, Warmup,
};
use dflash_train::config::TrainConfig;

use crate::load;
use crate::world::{Saved, World, refused, resumed, with};

#[test]
fn old_checkpoints_go_and_the_best_stays() {
    let world = World::new();
    let save = world.path("kept");
    std::fs::create_dir(&save).unwrap();
    std::fs::write(save.join("best.json"), r#"{"step":2,"acceptance_length":3.0}"#).unwrap();
    std::fs::write(save.join("run.json"), "{}").unwrap();
    let config = with(world.config("kept"), |settings| {
        settings.checkpoints = CheckpointSettings {
            save_every: Some(1),
            keep_last: Some(2),
            keep_every: Some(5),
            ..CheckpointSettings::default()
        };
        settings.rows.max_steps = Some(12);
    });
    world.train(&config).unwrap();
    assert_eq!(world.saved("kept"), [2, 5, 10, 11, 12]);
}

#[test]
fn a_save_path_that_holds_something_else_is_left_alone() {
    let world = World::new();
    std::fs::create_dir(world.path("thesis")).unwrap();
    std::fs::write(world.path("thesis").join("chapter1.tex"), "words").unwrap();
    let error = refused(world.train(&world.config("thesis")));
    assert!(error.contains("chapter1.tex"), "{error}");
    assert_eq!(std::fs::read_dir(world.path("thesis")).unwrap().count(), 1);
}

#[test]
fn damaged_checkpoints_are_named_and_the_one_before_goes_on() {
    let world = World::new();
    let config = with(world.config("out"), |settings| settings.checkpoints.save_every = Some(3));
    let last = world.train(&config).unwrap().saved();
    let steps = world.saved("out");
    let before = steps[steps.len() - 2];
    let expected = world.losses("out");
    let check = |file: &str, damage: fn(&Path)| {
        let (path, aside) = (last.join(file), world.path("aside"));
        std::fs::copy(&path, &aside).unwrap();
        damage(&path);
        let error = refused(world.train(&resumed(&config)));
        let remedy = format!("which is damaged; remove it to continue from step {before}");
        assert!(error.contains(&remedy), "{file}: {error}");
        assert!(error.contains(last.to_str().unwrap()), "{file}: {error}");
        std::fs::copy(&aside, &path).unwrap();
    };
    check("trainer/state.safetensors", |path| {
        let mut bytes = std::fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).unwrap();
    });
    check("trainer/state.safetensors", |path| {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(1000).unwrap();
    });
    check("trainer/state.safetensors", |path| std::fs::write(path, "").unwrap());
    check("trainer/state.json", |path| std::fs::write(path, "{").unwrap());
    check("trainer/state.json", |path| {
        let state = std::fs::read_to_string(path).unwrap();
        std::fs::write(path, state.replacen("\"step\": ", "\"step\": 1", 1)).unwrap();
    });
    check("trainer/state.json", |path| std::fs::remove_file(path).unwrap());
    check("config.json", |path| std::fs::write(path, "{}").unwrap());
    check("config.json", |path| std::fs::remove_file(path).unwrap());
    std::fs::remove_dir_all(&last).unwrap();
    world.train(&resumed(&config)).unwrap();
    assert_eq!(world.losses("out"), expected);
}

#[test]
fn another_draft_is_refused_by_the_flag_that_differs() {
    let world = World::new();
    world.train(&world.config("out")).unwrap();
    let check = |change: fn(&mut TrainConfig), expected: &str| {
        let mut config = resumed(&world.config("out"));
        change(&mut config);
        let error = refused(world.train(&config));
        assert!(error.contains(&format!("trained with {expected}")), "{error}");
    };
    check(|config| config.draft.num_layers = 1, "--num-layers 2, this run asks for 1");
    check(|config| config.draft.block_size = 8, "--block-size 4, this run asks for 8");
    let layers = "--target-layer-ids [1, 2], this run asks for [0, 2]";
    check(|config| config.draft.target_layer_ids = vec![0, 2], layers);
    let window = "--sliding-window off, this run asks for 5";
    check(|config| config.draft.sliding_window = Some(5), window);
    let vocabulary = "--draft-vocab-size off, this run asks for 40";
    check(|config| config.draft.vocab_size = Some(40), vocabulary);
    check(|config| config.settings.rows.seed = 7, "--seed 0, this run asks for 7");
}

#[test]
fn other_settings_are_listed_and_refused_unless_allowed() {
    let world = World::new();
    world.train(&world.config("out")).unwrap();
    let check = |change: fn(&mut TrainSettings), expected: &str| {
        let config = with(resumed(&world.config("out")), change);
        let error = refused(world.train(&config));
        assert!(error.contains(&format!("with other settings: {expected};")), "{error}");
        let (name, _) = expected.split_once(' ').unwrap();
        assert!(error.contains(&format!("--allow-changed {name} to continue")), "{error}");
        let leave = vec![name.replace('-', "_")];
        let allowed = with(config, |settings| settings.allow_changed = Some(leave));
        // further training would affect the next check
        assert!(world.train(&with(allowed, |it| it.rows.epochs = Some(2))).is_ok(), "{expected}");
    };
    check(|it| it.objective.loss = vec!["kl".parse().unwrap()], "loss ce -> kl");
    check(|it| it.objective.gamma = Some(5.0), "gamma 4.0 -> 5.0");
    check(|it| it.objective.gamma = None, "gamma 4.0 -> default");
    check(|it| it.objective.dpace_alpha = Some(0.5), "dpace-alpha default -> 0.5");
    check(|it| it.objective.teacher_labels = true, "teacher-labels false -> true");
    check(|it| it.optimizer.lr = 0.02, "lr 0.01 -> 0.02");
    check(|it| it.optimizer.max_grad_norm = 2.0, "max-grad-norm 1.0 -> 2.0");
    check(|it| it.optimizer.weight_decay = 0.1, "weight-decay 0.0 -> 0.1");
    check(|it| it.optimizer.adam_betas = Some(vec![0.9, 0.9]), "adam-betas default -> 0.9,0.9");
    check(|it| it.optimizer.warmup = Warmup::Share(0.1), "warmup 0.04 -> 0.1");
    check(|it| it.optimizer.min_lr_ratio = 0.1, "min-lr-ratio 0.0 -> 0.1");
    check(
        |it| it.optimizer.scheduler_type = SchedulerType::Linear,
        "scheduler-type cosine -> linear",
    );
    check(|it| it.rows.anchors_per_sequence = 4, "anchors-per-sequence 8 -> 4");
    check(|it| it.rows.max_anchors = Some(9), "max-anchors 3072 -> 9");
    check(|it| it.rows.max_steps = Some(2), "max-steps default -> 2");
    check(|it| it.compute.compute_dtype = Dtype::Bfloat16, "compute-dtype float32 -> bfloat16");
    check(|it| it.rows.gradient_accumulation_steps = 2, "rows-per-step 1 -> 2");
    let unknown = with(resumed(&world.config("out")), |settings| {
        settings.allow_changed = Some(vec!["learning-rate".to_owned()]);
    });
    let error = refused(world.train(&unknown));
    assert!(
        error.contains("--allow-changed is learning-rate, but a resumed run can change"),
        "{error}"
    );
    let other_start = with(resumed(&world.config("out")), |settings| {
        settings.draft.from_pretrained = Some("elsewhere".to_owned());
    });
    let error = refused(world.train(&other_start));
    assert!(
        error.contains("--from-pretrained is elsewhere, but the resumed run began fresh"),
        "{error}"
    );
}

#[test]
fn every_setting_knows_what_it_is_to_a_resumed_run() {
    let settings = World::new().config("out").settings;
    let written = serde_json::to_value(&settings).unwrap();
    let mut written: Vec<&str> = written.as_object().unwrap().keys().map(String::as_str).collect();
    let classed = TrainSettings::settings();
    let mut keys: Vec<&str> = classed.iter().map(|setting| setting.key).collect();
    written.sort_unstable();
    keys.sort_unstable();
    assert_eq!(keys, written);
    let recorded = recorded(&settings);
    for setting in classed {
        let decides = matches!(setting.resume, Resume::Compared | Resume::Told);
        assert_eq!(recorded.contains_key(setting.key), decides, "{}", setting.key);
    }
}

#[test]
fn a_bound_on_steps_counts_those_of_another_batch_size() {
    let world = World::new();
    let config = with(world.config("out"), |settings| {
        settings.rows.epochs = None;
        settings.rows.max_steps = Some(4);
        settings.rows.gradient_accumulation_steps = 3;
    });
    world.train(&config).unwrap();
    let config = with(resumed(&config), |settings| {
        settings.rows.max_steps = Some(9);
        settings.rows.gradient_accumulation_steps = 1;
        settings.allow_changed = Some(vec!["max_steps".to_owned(), "--rows-per-step".to_owned()]);
    });
    assert_eq!(world.train(&config).unwrap().step, 9);
}

#[test]
fn starts_that_do_not_fit_are_refused() {
    let world = World::new();
    let first = world
        .train(&with(world.config("first"), |settings| settings.rows.max_steps = Some(1)))
        .unwrap();
    let dir = &first.saved();
    let start = |save: &str| {
        let config = TrainConfig { pretrained_dir: Some(dir.clone()), ..world.config(save) };
        world.train(&config)
    };
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("10000.0", "500.0")).unwrap();
    let error = refused(start("foreign"));
    assert!(error.contains("rope_theta is 500"), "{error}");
    assert!(!world.path("foreign").exists());
    std::fs::write(&path, text).unwrap();
    let master_weights = dir.join("trainer/state.safetensors");
    let whole = std::fs::read(&master_weights).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&master_weights, flipped).unwrap();
    let error = refused(start("damaged"));
    assert!(error.contains("state.safetensors does not match its state.json"), "{error}");
    assert!(!world.path("damaged").join("metrics.jsonl").exists());
    std::fs::write(&master_weights, whole).unwrap();
    let draft = load(dir);
    let _ = draft.flat().narrow(0, 7, 1).fill_(f64::NAN);
    draft.save(dir).unwrap();
    std::fs::remove_dir_all(dir.join("trainer")).unwrap();
    let error = refused(start("broken"));
    assert!(error.contains("fc.weight holds values that are not finite"), "{error}");
}
