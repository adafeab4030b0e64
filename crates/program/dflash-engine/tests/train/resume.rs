//! What a resumed run reports, refuses, changes and never loses.

use std::path::Path;
use std::process::Command;

use crate::running::Running;
use crate::world::{Run, World, losses, sorted_checkpoints};

fn succeed(world: &World, save: &str, more: &[&str]) -> Run {
    let run = world.train(save, more);
    assert!(run.success(), "{more:?}: {}", run.stderr);
    run
}

fn refuse(world: &World, save: &str, more: &[&str], expected: &str) {
    let run = world.train(save, more);
    assert_eq!(run.code, Some(1), "{more:?}: {}", run.stderr);
    assert!(run.stderr.contains(expected), "{more:?}: {}", run.stderr);
}

/// Removes the checkpoints after `last`, as if the run had been killed then.
pub(crate) fn kill_after(world: &World, save: &str, last: &str) {
    for name in sorted_checkpoints(&world.path(save)).iter().filter(|name| name.as_str() > last) {
        std::fs::remove_dir_all(world.path(save).join(name)).unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-r").args([from, to]).status().unwrap().success());
}

/// The learning rate of every step.
fn rates(world: &World, save: &str) -> Vec<f64> {
    world.lines(save, "metrics.jsonl").iter().map(|line| line["lr"].as_f64().unwrap()).collect()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_resumed_run_says_where_it_goes_on_and_saves_only_what_it_trained() {
    let world = World::new();
    refuse(&world, "nowhere", &["--resume"], "there is no checkpoint in ");
    refuse(&world, "nowhere", &["--resume-from", "3"], "has no checkpoint of step 3");
    assert!(!world.path("nowhere").exists());
    let first = succeed(&world, "out", &["--resume-or-start", "--max-steps", "4"]);
    assert!(!first.stderr.contains("resuming"), "{}", first.stderr);
    let before = std::fs::metadata(world.path("out/step-000004/config.json")).unwrap().modified();
    for flag in ["--resume", "--resume-or-start"] {
        let again = succeed(&world, "out", &[flag, "--max-steps", "4"]);
        let said = "resuming step 4 of 4: nothing is left to train\n";
        assert!(again.stderr.contains(said), "{}", again.stderr);
        assert!(!again.stderr.contains("saved "), "{}", again.stderr);
        assert!(again.stdout.trim().ends_with("step-000004"), "{}", again.stdout);
    }
    let after = std::fs::metadata(world.path("out/step-000004/config.json")).unwrap().modified();
    assert_eq!(before.unwrap(), after.unwrap());
    let on = ["--max-steps", "6", "--resume", "--allow-changed", "max-steps"];
    let on = succeed(&world, "out", &on);
    assert!(on.stderr.contains("resuming step 4 of 6\n"), "{}", on.stderr);
    assert!(on.stderr.contains("saved "), "{}", on.stderr);
}

#[test]
fn a_change_of_settings_is_listed_and_refused_unless_it_is_named() {
    let world = World::new();
    succeed(&world, "out", &["--max-steps", "3"]);
    let others = ["--loss", "kl", "--lr", "0.02", "--max-anchors", "9", "--max-steps", "5"];
    let listed = "loss ce -> kl, lr 0.01 -> 0.02, max-anchors 512 -> 9, max-steps 3 -> 5";
    let names = "loss,lr,max-anchors,max-steps";
    let resume = |more: &[&'static str]| [&others[..], &["--resume"], more].concat();
    let remedy = format!(
        "{listed}; use the settings that it was trained with, or pass --allow-changed {names} to"
    );
    refuse(&world, "out", &resume(&[]), &remedy);
    refuse(&world, "out", &resume(&["--allow-changed", "loss,lr"]), listed);
    refuse(&world, "out", &resume(&["--allow-changed", "speed"]), "--allow-changed is speed, but");
    let fresh = world.train("fresh", &["--allow-changed", "lr"]);
    assert_eq!(fresh.code, Some(2), "{}", fresh.stderr);
    assert!(fresh.stderr.contains("required") && fresh.stderr.contains("--resume"));
    // two ranks are refused alike, and not restarted
    let two = ["--nproc", "2", "--max-restarts", "2"];
    let run = world.train("out", &resume(&two));
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("rows-per-step 1 -> 2"), "{}", run.stderr);
    assert!(!run.stderr.contains("starting all ranks again"), "{}", run.stderr);
    assert_eq!(sorted_checkpoints(&world.path("out")), ["step-000003"]);
    let run = succeed(&world, "out", &resume(&["--allow-changed", names]));
    for change in listed.split(", ") {
        assert!(run.stderr.contains(&format!("changed: {change}\n")), "{}", run.stderr);
    }
    // from then on these are the run's settings
    refuse(&world, "out", &["--resume", "--max-steps", "5"], "loss kl -> ce, lr 0.02 -> 0.01");
    succeed(&world, "out", &resume(&[]));
}

#[test]
fn a_resumed_run_takes_its_shape_from_its_checkpoint() {
    let world = World::new();
    let base = succeed(&world, "base", &["--max-steps", "1", "--num-layers", "3"]).stdout;
    let base = Path::new(base.trim());
    // The world's flags set a shape, which these omit.
    let train = |save: &str, more: &[&str]| {
        let mut arguments = world.arguments(save, &[]);
        for flag in ["--num-layers", "--block-size", "--target-layer-ids"] {
            let at = arguments.iter().position(|argument| argument == flag).unwrap();
            arguments.drain(at..at + 2);
        }
        arguments.extend(more.iter().map(ToString::to_string));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        world.engine(&arguments)
    };
    let from = ["--from-pretrained", base.to_str().unwrap()];
    let begun = train("out", &[&["--max-steps", "3"], &from[..]].concat());
    assert!(begun.success(), "{}", begun.stderr);
    assert!(begun.stderr.contains("training 3 layers "), "{}", begun.stderr);
    // Without the flag, and with another path to the same draft.
    let link = world.path("link");
    std::os::unix::fs::symlink(base, &link).unwrap();
    let spelt = ["--from-pretrained", link.to_str().unwrap()];
    for more in [&[][..], &from, &spelt] {
        let resumed = train("out", &[&["--max-steps", "3", "--resume"], more].concat());
        assert!(resumed.success(), "{more:?}: {}", resumed.stderr);
        assert!(resumed.stderr.contains("resuming step 3 of 3"), "{}", resumed.stderr);
    }
    let other = succeed(&world, "other", &["--max-steps", "2", "--num-layers", "3"]).stdout;
    let other = ["--max-steps", "3", "--resume", "--from-pretrained", other.trim()];
    let refused = train("out", &other);
    let told = format!("began from {}; do not pass the flag", base.display());
    assert!(refused.stderr.contains(&told), "{}", refused.stderr);
    let refused = train("out", &["--max-steps", "3", "--resume", "--num-layers", "2"]);
    let told = "it was trained with --num-layers 3, this run asks for 2";
    assert!(refused.stderr.contains(told), "{}", refused.stderr);
    // Settings are compared before contacting a server; there is none here.
    let nobody = format!("http://127.0.0.1:{}", crate::running::free_port());
    let nowhere = world.path("nowhere").display().to_string();
    let asks = ["--endpoint", &nobody, "--hidden-states-path", &nowhere];
    let asks = [&asks[..], &["--on-missing", "generate", "--max-steps", "4", "--resume"]].concat();
    let refused = train("out", &asks);
    assert!(refused.stderr.contains("with other settings: max-steps 3 -> 4"), "{}", refused.stderr);
    assert!(!refused.stderr.contains("waiting"), "{}", refused.stderr);
}

#[test]
fn what_changes_last_bits_is_recorded_and_said() {
    let world = World::new();
    succeed(&world, "out", &["--max-steps", "2"]);
    let state = json(&world.path("out/step-000002/trainer/state.json"));
    let run = json(&world.path("out/run.json"));
    for settings in [&state["settings"], &run["settings"]] {
        assert_eq!(settings["threads"], "1", "{settings}");
        assert_eq!((&settings["ranks"], &settings["device"]), (&"1".into(), &"cpu".into()));
        assert_eq!(settings["compute_dtype"], "float32");
        assert!(settings["processor"].is_string() && settings["libtorch"].is_string());
    }
    let mut command = world.command("out", &["--max-steps", "2", "--resume"]);
    let run = Running::start(command.env("OMP_NUM_THREADS", "2")).end();
    assert!(run.success(), "{}", run.stderr);
    assert!(run.stderr.contains("changed: threads 1 -> 2\n"), "{}", run.stderr);
}

#[test]
fn a_longer_run_goes_on_from_its_learning_rate() {
    let world = World::new();
    for kind in ["cosine", "linear", "wsd"] {
        let with = |steps: &'static str| {
            let common = ["--epochs", "9", "--save-every", "3", "--scheduler-type", kind];
            [&common[..], &["--max-steps", steps]].concat()
        };
        let leave = ["--resume", "--allow-changed", "max-steps"];
        let save = |name: &str| format!("{kind}-{name}");
        succeed(&world, &save("first"), &with("12"));
        let first = rates(&world, &save("first"));
        kill_after(&world, &save("first"), "step-000006");
        for other in ["longer", "shorter", "below"] {
            copy(&world.path(&save("first")), &world.path(&save(other)));
        }
        let run = succeed(&world, &save("longer"), &[&with("24")[..], &leave].concat());
        let said = "was to end at step 12 and now ends at 24";
        assert!(run.stderr.contains(said), "{}", run.stderr);
        let longer = rates(&world, &save("longer"));
        assert_eq!((longer.len(), &longer[..6]), (24, &first[..6]));
        assert!(longer[1..].is_sorted_by(|a, b| a >= b), "{kind} jumps back: {longer:?}");
        assert!(longer[5] - longer[6] <= 0.25 * longer[5], "{kind} falls: {longer:?}");
        assert!(longer[23] < 0.2 * longer[0].max(longer[1]), "{kind} stays: {longer:?}");
        // a restart of the longer run follows the same curve without --allow-changed
        let last = sorted_checkpoints(&world.path(&save("longer"))).pop().unwrap();
        copy(&world.path(&save("longer")), &world.path(&save("again")));
        kill_after(&world, &save("again"), "step-000015");
        succeed(&world, &save("again"), &[&with("24")[..], &["--resume"]].concat());
        assert_eq!(rates(&world, &save("again")), longer);
        assert_eq!(world.state(&save("again"), &last), world.state(&save("longer"), &last));
        succeed(&world, &save("shorter"), &[&with("8")[..], &leave].concat());
        let shorter = rates(&world, &save("shorter"));
        assert_eq!(shorter.len(), 8);
        assert!(shorter[1..].is_sorted_by(|a, b| a >= b), "{kind}: {shorter:?}");
        let below = succeed(&world, &save("below"), &[&with("4")[..], &leave].concat());
        let said = "resuming step 6 of 6: nothing is left";
        assert!(below.stderr.contains(said), "{}", below.stderr);
    }
    // a schedule that has ended stays at its end, and the run says what to do
    let over = ["--epochs", "9", "--max-steps", "12"];
    succeed(&world, "over", &over);
    let more = ["--epochs", "9", "--max-steps", "60", "--resume", "--allow-changed", "max-steps"];
    let run = succeed(&world, "over", &more);
    let said = "for a new schedule start a run from this one's weights, with --from-pretrained";
    assert!(run.stderr.contains(said), "{}", run.stderr);
    let rates = rates(&world, "over");
    assert!(rates[11..].is_sorted_by(|a, b| a >= b) && rates[59] > 0.0, "{rates:?}");
}

#[test]
fn a_run_goes_on_from_an_earlier_checkpoint_and_keeps_the_later_ones() {
    let world = World::new();
    let more = ["--save-every", "3"];
    succeed(&world, "out", &more);
    let all = sorted_checkpoints(&world.path("out"));
    let last = all.last().unwrap().clone();
    copy(&world.path("out"), &world.path("before"));
    refuse(&world, "out", &[&more[..], &["--resume-from", "4"]].concat(), "there are 3, 6, ");
    let run = succeed(&world, "out", &[&more[..], &["--resume-from", "6"]].concat());
    assert!(run.stderr.contains("resuming step 6 of "), "{}", run.stderr);
    assert!(
        run.stderr.contains("after-000006; remove it when it is no longer needed"),
        "{}",
        run.stderr
    );
    assert_eq!(sorted_checkpoints(&world.path("out")), all);
    assert_eq!(world.state("out", &last), world.state("before", &last));
    assert_eq!(losses(&world.path("out")), losses(&world.path("before")));
    let aside = "out/after-000006";
    assert_eq!(sorted_checkpoints(&world.path(aside)), all[2..]);
    assert_eq!(world.state(aside, &last), world.state("before", &last));
    assert_eq!(losses(&world.path(aside)), losses(&world.path("before")));
    // nothing follows the last one
    let step = last.trim_start_matches("step-").trim_start_matches('0').to_owned();
    let run = succeed(&world, "out", &[&more[..], &["--resume-from", &step]].concat());
    assert!(!run.stderr.contains("remove it"), "{}", run.stderr);
}

#[test]
fn a_restarted_worker_resumes_by_itself() {
    let world = World::new();
    let start = |save: &str, count: &str, job: &str, more: &[&str]| {
        let mut command = world.command(save, more);
        command.env("RANK", "0").env("WORLD_SIZE", "1").env("TORCHELASTIC_RUN_ID", job);
        Running::start(command.env("TORCHELASTIC_RESTART_COUNT", count)).end()
    };
    let more = ["--save-every", "3"];
    let fresh = start("out", "1", "one", &more);
    assert!(fresh.success() && !fresh.stderr.contains("resuming"), "{}", fresh.stderr);
    let whole = losses(&world.path("out"));
    kill_after(&world, "out", "step-000006");
    let refused = start("out", "0", "one", &more);
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("pass --resume to continue it"), "{}", refused.stderr);
    let other = start("out", "1", "another", &more);
    assert!(other.stderr.contains("pass --resume to continue it"), "{}", other.stderr);
    // flags about where to start have been obeyed already
    for flags in [&[][..], &["--resume"], &["--resume-from", "3"]] {
        kill_after(&world, "out", "step-000006");
        let on = start("out", "2", "one", &[&more[..], flags].concat());
        assert!(on.success(), "{}", on.stderr);
        assert!(on.stderr.contains("resuming step 6 of "), "{flags:?}: {}", on.stderr);
        assert_eq!(losses(&world.path("out")), whole);
    }
}

/// Rewrites a run's record in the form of releases with other names and defaults.
fn age(path: &Path, key: &str) {
    let mut record = json(path);
    let settings = record[key].as_object_mut().unwrap();
    let texts = settings["lr"].is_string();
    let [ratio, none]: [serde_json::Value; 2] = if texts {
        ["0.04".into(), "default".into()]
    } else {
        [0.04.into(), serde_json::Value::Null]
    };
    settings.remove("adam_betas");
    settings.remove("warmup");
    settings.insert("warmup_ratio".into(), ratio);
    for unset in ["warmup_steps", "adam_beta1", "adam_beta2"] {
        settings.insert(unset.into(), none.clone());
    }
    if !texts {
        settings.insert("keep_last".into(), none);
        settings.insert("validation_ratio".into(), 0.0.into());
        settings.insert("resume".into(), false.into());
        settings.insert("resume_or_start".into(), false.into());
    }
    std::fs::write(path, record.to_string()).unwrap();
}

#[test]
fn a_run_that_an_earlier_release_began_keeps_its_defaults() {
    let world = World::new();
    let earlier = ["--adam-betas", "0.9,0.999", "--max-anchors", "5", "--keep-last", "0"];
    let steps =
        ["--save-every", "1", "--max-steps", "13", "--no-epoch-checkpoints", "--epochs", "9"];
    let whole = [&earlier[..], &steps].concat();
    succeed(&world, "whole", &whole);
    copy(&world.path("whole"), &world.path("part"));
    kill_after(&world, "part", "step-000012");
    age(&world.path("part/run.json"), "settings");
    age(&world.path("part/run.json"), "config");
    age(&world.path("part/step-000012/trainer/state.json"), "settings");
    let run = succeed(&world, "part", &[&steps[..], &["--resume"]].concat());
    assert!(run.stderr.contains("resuming step 12 of 13\n"), "{}", run.stderr);
    assert!(!run.stderr.contains("changed:"), "{}", run.stderr);
    assert_eq!(losses(&world.path("whole")), losses(&world.path("part")));
    let all = sorted_checkpoints(&world.path("whole"));
    assert_eq!((all.len(), &all), (13, &sorted_checkpoints(&world.path("part"))));
    assert_eq!(world.state("whole", &all[12]), world.state("part", &all[12]));
    // a run of this release keeps the last ten
    succeed(&world, "new", &steps);
    assert_eq!(sorted_checkpoints(&world.path("new")).len(), 10);
    let betas = "adam-betas 0.9,0.999 -> 0.9,0.95";
    refuse(
        &world,
        "part",
        &[&steps[..], &["--resume", "--adam-betas", "0.9,0.95"]].concat(),
        betas,
    );
}
