//! kill -9 at random moments, including during saves: saved progress is never lost, partial saves
//! are never taken for complete, and in the end every loss is that of an undisturbed run.
//!
//! A few kills by default; `make soak` does fifty (DFLASH_SOAK_KILLS).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use dflash_test_support::{ChaCha8Rng, Rng, random};

use crate::running::{Running, send};
use crate::world::{World, losses, sorted_checkpoints};

const KILLS: &str = "DFLASH_SOAK_KILLS";

/// Number of kills by default.
const FEW: u32 = 4;

/// Saves as often as possible, so that many kills hit one, and removes old checkpoints, so that
/// some hit a removal.
const ARGUMENTS: [&str; 4] = ["--save-every", "2", "--epochs", "100"];

fn kills() -> u32 {
    std::env::var(KILLS).ok().and_then(|kills| kills.parse().ok()).unwrap_or(FEW)
}

/// A random moment before `limit`.
fn below(limit: Duration, random: &mut ChaCha8Rng) -> Duration {
    limit.mul_f64(random.random())
}

/// Every checkpoint's trainer state, by name.
fn states(world: &World, save: &str) -> BTreeMap<String, Vec<u8>> {
    let names = sorted_checkpoints(&world.path(save));
    names.into_iter().map(|name| (name.clone(), world.state(save, &name)[0].clone())).collect()
}

fn last_saved(said: &str) -> Option<String> {
    said.lines().rfind(|line| line.starts_with("saved "))?.rsplit('/').next().map(str::to_owned)
}

fn resumed_at(save_path: &Path) -> u64 {
    let text = std::fs::read_to_string(save_path.join("run.json")).unwrap();
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["resumed_at_step"].as_u64().unwrap()
}

fn step_of(name: &str) -> u64 {
    name.strip_prefix("step-").unwrap().parse().unwrap()
}

/// Names of incomplete directories left by kills in a save or removal.
fn half_written(save_path: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(save_path).into_iter().flatten();
    entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(".step-"))
        .collect()
}

/// State of the run that is killed repeatedly.
struct Victim<'a> {
    world: &'a World,
    /// All checkpoints of the undisturbed run.
    expected: BTreeMap<String, Vec<u8>>,
    /// The newest checkpoint after the last kill.
    newest: Option<String>,
    half_written: BTreeSet<String>,
}

impl Victim<'_> {
    fn start(&self) -> Running {
        let more = [&ARGUMENTS[..], &["--keep-last", "2", "--resume-or-start"]].concat();
        Running::start(&mut self.world.command("part", &more))
    }

    /// Checks that the links lead to a complete checkpoint, whenever the run was killed.
    fn check_links(&self, save_path: &Path, found: &BTreeMap<String, Vec<u8>>) {
        let served = |path: &Path| std::fs::read(path.join("model.safetensors"));
        if save_path.join("latest").is_symlink() {
            let own = served(save_path).expect("a directory that shows a draft");
            let newest = served(&save_path.join("latest")).expect("a link that leads somewhere");
            assert_eq!(own, newest, "nothing was validated");
            let served: Vec<_> =
                found.keys().map(|name| served(&save_path.join(name)).unwrap()).collect();
            assert!(served.contains(&newest), "it shows a checkpoint of the run");
        }
        let newest = found.keys().next_back().map(|name| save_path.join(name));
        let found = dflash_run::draft_dir(&save_path.join("latest"));
        assert_eq!(found.ok(), newest.or(Some(save_path.join("latest"))).filter(|it| it.exists()));
    }

    /// Lets it train for up to `longest`, or in every fourth turn only start, and kills it; false
    /// if it had finished.
    fn kill_once(&mut self, turn: u32, longest: Duration, random: &mut ChaCha8Rng) -> bool {
        let save_path = self.world.path("part");
        let mut run = self.start();
        if turn % 4 == 3 {
            std::thread::sleep(below(Duration::from_millis(800), random));
        } else {
            run.await_said("training ", 1);
            let expected = self.newest.as_deref().map_or(0, step_of);
            assert_eq!(resumed_at(&save_path), expected, "it resumes the newest checkpoint");
            std::thread::sleep(below(longest, random));
        }
        if run.has_ended() {
            return false;
        }
        send("-KILL", run.id());
        let said = run.end().stderr;
        self.half_written.append(&mut half_written(&save_path));
        let found = states(self.world, "part");
        for (name, state) in &found {
            assert!(self.expected[name] == *state, "{name} is not what it should be");
        }
        self.check_links(&save_path, &found);
        let newest = found.keys().next_back().cloned();
        let saved = last_saved(&said).max(self.newest.take());
        assert!(newest >= saved, "{saved:?} was saved, but {newest:?} is the newest");
        self.newest = newest;
        true
    }
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_as_if_it_never_was() {
    let world = World::new();
    let all = [&ARGUMENTS[..], &["--keep-last", "0"]].concat();
    let mut whole = Running::start(&mut world.command("whole", &all));
    // Kills come after this line, so start-up does not count.
    whole.await_said("training ", 1);
    let begun = Instant::now();
    let whole = whole.end();
    assert!(whole.success(), "{}", whole.stderr);
    let lasted = begun.elapsed();
    let kills = kills();
    // Half of the run is done between the kills, apart from repeated work.
    let longest = lasted.mul_f64(1.0 / f64::from(kills)).max(Duration::from_millis(30));
    let expected = states(&world, "whole");
    let mut victim =
        Victim { world: &world, expected, newest: None, half_written: BTreeSet::new() };
    let mut random = random();
    let killed =
        (0..kills).take_while(|&turn| victim.kill_once(turn, longest, &mut random)).count();
    let half = victim.half_written.len();
    let end = victim.start().end();
    assert!(end.success(), "{}", end.stderr);
    println!(
        "killed {killed} times, {half} half-written checkpoints, {:.0} s",
        begun.elapsed().as_secs_f64()
    );
    assert!(killed as u32 >= kills / 2, "only {killed} kills before the end");
    assert_eq!(losses(&world.path("part")), losses(&world.path("whole")));
    let last = sorted_checkpoints(&world.path("part")).pop().unwrap();
    assert_eq!(world.state("part", &last), world.state("whole", &last));
    assert!(half_written(&world.path("part")).is_empty(), "what kills left is swept");
    assert_eq!(sorted_checkpoints(&world.path("part")).len(), 2);
    let shown = std::fs::canonicalize(world.path("part").join("latest")).unwrap();
    assert!(shown.ends_with(&last), "{}", shown.display());
}

#[test]
fn ranks_that_are_killed_again_and_again_are_started_again() {
    let world = World::new();
    let two = [&ARGUMENTS[..], &["--nproc", "2"]].concat();
    let whole = world.train("whole", &two);
    assert!(whole.success(), "{}", whole.stderr);
    let deaths = u64::from(kills()).div_ceil(5).max(2);
    let steps = losses(&world.path("whole")).len() as u64;
    let limit = deaths.to_string();
    let more = [&two[..], &["--max-restarts", &limit]].concat();
    let mut run = Running::start(&mut world.command("part", &more));
    let mut random = random();
    for death in 1..=deaths {
        run.await_said("training ", death as usize);
        run.await_step(&world.path("part"), (steps * death / (deaths + 1)).max(1));
        std::thread::sleep(below(Duration::from_millis(50), &mut random));
        let ranks = run.ranks();
        send("-KILL", ranks[random.random_range(0..ranks.len())]);
        run.await_said(&format!("(restart {death} of {deaths})"), 1);
    }
    let run = run.end();
    assert!(run.success(), "{}", run.stderr);
    println!("{deaths} ranks killed under one launcher");
    assert_eq!(losses(&world.path("part")), losses(&world.path("whole")));
}
