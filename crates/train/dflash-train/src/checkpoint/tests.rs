//! Saved state is restored exactly, with little memory, and a full disk blocks no rank.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::Command;
use std::time::{Duration, Instant};

use dflash_data::AnchorOptions;
use dflash_dist::Single;
use dflash_draft::objective::{Denominator, ElementLoss, LabelSource, Objective, Weighting};
use dflash_draft::{HeadStart, fresh_head};
use dflash_kernels::kernels::Kernels;
use dflash_settings::{Classed, Resume, SpeculatorType};
use dflash_target::TargetIo;
use tch::{Device, Kind, Tensor};

use super::*;
use crate::batch::BatchMaker;
use crate::fake::{Beside, draft_config};
use crate::master_weights::MasterWeights;
use crate::optimizer::OptimizerConfig;
use crate::shards::{Rank, Shards};
use crate::world::World;

/// Memory allowed in addition to the tensors.
const ROOM_MIB: f64 = 64.0;

/// Variable set in the measuring process: number of layers of its draft.
const LAYERS: &str = "DFLASH_TEST_STATE_LAYERS";

/// With this many layers the state has 1.3 GB, and the time is compared with a plain copy.
const LARGE: usize = 7;

/// Maximum ratio of the time to save to that of a plain copy of the same bytes.
const SLOWER_THAN_A_COPY: f64 = 1.5;

const ALONE: Rank = Rank { rank: 0, world_size: 1 };

/// A trainer with random state, at `place` (rank, world size).
fn trainer(config: DraftConfig, rank: Rank) -> Trainer {
    let cpu = |shape: [i64; 2]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let hidden = config.hidden_size;
    let fresh = Draft::zeros(config, Device::Cpu);
    let shards = Shards::even(fresh.layout().elements(), rank);
    let optimizer = OptimizerConfig::default();
    let (draft, master_weights) = MasterWeights::new(fresh, Kind::BFloat16, &optimizer, shards);
    master_weights.stream(&Single, &mut |part| drop(part.shallow_clone().uniform_(-1.0, 1.0))).ok();
    let _ = draft.flat().shallow_clone().uniform_(-1.0, 1.0);
    let objective = Objective {
        terms: vec![(ElementLoss::CrossEntropy, 1.0)],
        weighting: Weighting::Decay { gamma: 4.0 },
        denominator: Denominator::Weights,
        labels: LabelSource::Data,
        chunk_bytes: 1 << 20,
        kernels: Kernels::Fast,
    };
    let norm_h = cpu([1, hidden]).squeeze();
    let head = TargetIo::plain(cpu([96, hidden]), cpu([96, hidden]), &norm_h, 1e-6);
    let anchors = AnchorOptions { per_document: 1, per_row: 1, seed: 0, epoch: 0 };
    let batches = BatchMaker::new(head, anchors, None, None);
    Trainer::new(draft, master_weights, objective, batches)
}

fn position(step: u64) -> Position {
    let text = format!(
        r#"{{"step": {step}, "rows": 1, "bad_steps": 0, "skipped": 0, "tokens": 9, "dataset": "d",
            "seed": 1, "total_seq_len": 64}}"#
    );
    serde_json::from_str(&text).unwrap()
}

/// A value from /proc/self/status, MiB.
fn resident(figure: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(figure)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
}

/// Runs `work`; returns its peak memory above the starting level, MiB.
fn peak_of(work: impl FnOnce()) -> f64 {
    // Reset the kernel's high-water mark.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = resident("VmRSS:");
    work();
    resident("VmHWM:") - before
}

#[test]
fn saving_and_resuming_take_little_memory_beside_the_tensors() {
    if let Ok(layers) = std::env::var(LAYERS) {
        return tch::no_grad(|| measure(layers.parse().unwrap()));
    }
    // Resident memory is per process, so nothing else may run in this one.
    let name = "checkpoint::tests::saving_and_resuming_take_little_memory_beside_the_tensors";
    let mut alone = Command::new(std::env::current_exe().unwrap());
    let output = alone.args([name, "--exact", "--nocapture"]).env(LAYERS, "2").output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && said.contains("MiB at save"), "{said}");
}

fn measure(layers: usize) {
    let dir = tempfile::tempdir().unwrap();
    // The first run also loads code pages.
    there_and_back(&mut trainer(draft_config(32, 1), ALONE), &dir.path().join("small"));
    let mut trainer = trainer(draft_config(1024, layers), ALONE);
    let [saving, resuming] = there_and_back(&mut trainer, &dir.path().join("large"));
    let bytes =
        trainer.master_weights.entries().iter().map(|entry| 4 * entry.shape[0]).sum::<i64>();
    let mb = bytes as f64 / 1e6;
    let expected = super::bytes(trainer.draft.config(), &OptimizerConfig::default());
    assert_eq!(expected, bytes / 12 * 14, "what the time to save is computed from");
    println!("state of {mb:.0} MB: {saving:.1} MiB at save, {resuming:.1} MiB at resume");
    assert!(saving <= ROOM_MIB && resuming <= ROOM_MIB, "{saving} and {resuming} MiB");
    if layers >= LARGE {
        compare_times(&trainer, dir.path());
    }
}

/// Saves `trainer`, clears and restores its state, and checks that it is identical; returns the
/// memory peaks of both.
fn there_and_back(trainer: &mut Trainer, path: &Path) -> [f64; 2] {
    let mut saved = PathBuf::new();
    let saving = peak_of(|| saved = save(trainer, &position(3), path, &Single).unwrap());
    trainer.master_weights.stream(&Single, &mut |part| drop(part.shallow_clone().zero_())).unwrap();
    let _ = trainer.draft.flat().shallow_clone().zero_();
    let resuming = peak_of(|| {
        let resuming = Resuming { current: &position(0), allowed: &[] };
        resume(trainer, &Checkpoint::at(path, 3), resuming).unwrap();
    });
    let stored = TensorFile::open(&saved.join(Checkpoint::TENSORS)).unwrap();
    let mut entries = trainer.master_weights.entries().into_iter();
    trainer
        .master_weights
        .stream(&Single, &mut |part| {
            let name = entries.next().unwrap().name;
            assert!(stored.any_tensor(&name).unwrap().equal(part), "{name}");
            assert!(part.abs().max().double_value(&[]) > 0.9, "{name} came back as nothing");
        })
        .unwrap();
    let served = Draft::load(&saved, Device::Cpu, Kind::BFloat16).unwrap();
    assert!(served.layout().parameters().iter().all(|parameter| {
        parameter.view(served.flat()).equal(&parameter.view(trainer.draft.flat()))
    }));
    [saving, resuming]
}

/// Compares the time to save with that of a plain copy: the best of three each, alternating.
fn compare_times(trainer: &Trainer, dir: &Path) {
    let best = |time: &mut Duration, work: &dyn Fn()| {
        let begun = Instant::now();
        work();
        *time = begun.elapsed().min(*time);
    };
    let (mut saving, mut copying) = (Duration::MAX, Duration::MAX);
    for round in 0..3 {
        let path = dir.join(format!("round-{round}"));
        best(&mut saving, &|| drop(save(trainer, &position(1), &path, &Single).unwrap()));
        let copy = dir.join("copy");
        fs::create_dir(&copy).unwrap();
        let step = Checkpoint::at(&path, 1).dir;
        best(&mut copying, &|| {
            for (number, file) in [Checkpoint::TENSORS, "model.safetensors"].into_iter().enumerate()
            {
                plain_copy(&step.join(file), &copy.join(number.to_string()));
            }
        });
        fs::remove_dir_all(&copy).unwrap();
        fs::remove_dir_all(&path).unwrap();
    }
    let ratio = saving.as_secs_f64() / copying.as_secs_f64();
    println!("saved in {saving:.2?}, a plain copy took {copying:.2?}: {ratio:.2} times");
    assert!(ratio <= SLOWER_THAN_A_COPY, "{ratio}");
}

fn plain_copy(from: &Path, to: &Path) {
    let (mut from, mut to) = (File::open(from).unwrap(), File::create(to).unwrap());
    let mut part = vec![0; 8 << 20];
    loop {
        let read = from.read(&mut part).unwrap();
        if read == 0 {
            return to.sync_all().unwrap();
        }
        to.write_all(&part[..read]).unwrap();
    }
}

#[test]
fn a_rank_that_cannot_write_takes_part_to_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let trainer = trainer(draft_config(32, 1), Rank { rank: 0, world_size: 2 });
    let exchanged = |save_path: &Path| {
        let peers = Beside { alike: 1, ..Beside::default() };
        let saved = save(&trainer, &position(2), save_path, &peers);
        (saved, peers.broadcasts.into_inner())
    };
    let (saved, expected) = exchanged(&dir.path().join("good"));
    let state = TensorFile::open(&saved.unwrap().join(Checkpoint::TENSORS)).unwrap();
    let master_weights = state.any_tensor(MASTER_WEIGHTS).unwrap();
    let half = master_weights.numel() as i64 / 2;
    let own = trainer.master_weights.weights.numel() as i64;
    assert!((half - own).abs() <= 16, "{half} and {own}");
    assert!(master_weights.narrow(0, 0, own).equal(&trainer.master_weights.weights));
    assert!(
        bool::try_from(master_weights.narrow(0, own, own).eq(1.0).all()).unwrap(),
        "the peer's"
    );
    assert_eq!(expected, 2 * 3);
    // a file in place of the directory
    fs::write(dir.path().join("bad"), "").unwrap();
    let (refused, count) = exchanged(&dir.path().join("bad"));
    assert!(refused.unwrap_err().to_string().contains("bad"));
    assert_eq!(count, expected);
    // the checkpoint that already exists
    let (kept, count) = exchanged(&dir.path().join("good"));
    assert_eq!((kept.unwrap(), count), (Checkpoint::at(&dir.path().join("good"), 2).dir, expected));
}

/// Settings that no resumed run may change and that [`lasting`] does not name by their flags.
const BY_CONTENT: [(&str, &str); 1] = [
    // Another way to hold out the same number of samples trains on the same ones.
    ("validation_ratio", "--validation-ratio leaving so many samples:"),
];

#[test]
fn every_lasting_setting_is_compared_with_the_checkpoint() {
    let mut settings = World::new().config("out").settings;
    let start = HeadStart { vocabulary: 96, draft_vocabulary: 96, stored: None };
    let mut compared = Vec::new();
    for &kind in SpeculatorType::ALL {
        settings.draft.speculator_type = Some(kind);
        let head = fresh_head(&settings.draft, start);
        let draft = DraftConfig { head, ..draft_config(32, 1) };
        compared.extend(lasting(&position(0), &draft, None).into_iter().map(|(name, _)| name));
    }
    let is_compared = |key: &str| {
        let by_content = BY_CONTENT.iter().find(|(other, _)| *other == key);
        let name = by_content.map_or_else(|| flag(key), |(_, name)| (*name).to_owned());
        compared.contains(&name)
    };
    let lasting = TrainSettings::settings().into_iter().filter(|it| it.resume == Resume::Lasting);
    let missed: Vec<&str> = lasting.map(|it| it.key).filter(|key| !is_compared(key)).collect();
    assert!(missed.is_empty(), "a resumed run may change {missed:?}: compare them in lasting()");
}

#[test]
fn a_key_of_a_head_that_differs_is_named_by_its_flag() {
    let mut settings = World::new().config("out").settings;
    settings.draft.speculator_type = Some(SpeculatorType::Markov);
    let dir = tempfile::tempdir().unwrap();
    let mut draft = |rank: usize| {
        settings.draft.markov.markov_rank = Some(rank);
        let start = HeadStart { vocabulary: 96, draft_vocabulary: 96, stored: None };
        DraftConfig { head: fresh_head(&settings.draft, start), ..draft_config(32, 1) }
    };
    Draft::zeros(draft(3), Device::Cpu).save(dir.path()).unwrap();
    let mut compared = |rank| {
        let at = position(0);
        let resuming = Resuming { current: &at, allowed: &[] };
        let outcome = compare(dir.path(), &at, None, resuming, &draft(rank), None);
        outcome.map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(compared(3), Ok(()));
    let refused = compared(5).unwrap_err();
    assert!(refused.ends_with("trained with --markov-rank 3, this run asks for 5"), "{refused}");
}
