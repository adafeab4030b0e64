//! The ways to use a machine for a run, compared: each is planned with the settings as given, and where these
//! take too long or do not fit, with smaller ones. The best comes first, with its command lines.

mod commands;
mod show;

use std::path::Path;

use dflash_settings::{DraftSettings, PlanDevice, PlanSettings};
use dflash_target::TargetFacts;
use serde::Serialize;

use super::{Plan, PlannedDevice, plan};
use crate::config::DraftShape;
use crate::machine::memory_bytes;
use crate::{Error, setup};

pub use commands::Typed;

/// A run of more hours than this on a CPU is not what anyone waits for.
const PATIENCE_HOURS: f64 = 24.0;
/// Hours that --max-steps is chosen for, if even the smallest values take longer than a day.
const SHORT_HOURS: f64 = 12.0;
/// Share of a GPU's memory that a plan may fill: the rest is fragments, and the libraries' own buffers.
const FULL: f64 = 0.95;
/// Values for CPUs, from the largest: layers, slots of a block, anchors and tokens of a row, epochs.
const CPU_VALUES: [Values; 3] = [
    Values { layers: 5, block: 8, anchors: 256, tokens: 4096, epochs: 1 },
    Values { layers: 3, block: 8, anchors: 256, tokens: 1024, epochs: 1 },
    Values { layers: 2, block: 8, anchors: 128, tokens: 1024, epochs: 1 },
];
/// Anchors of a row to try on GPUs where there are more: the blocks that a row trains, and most of its work.
const FEWER_ANCHORS: usize = 1024;
/// Rows and anchors where nothing else fits: a 4B target and its draft in 24 GB.
const SHORT_ROWS: usize = 2048;
const FEWEST_ANCHORS: usize = 128;

struct Values {
    layers: usize,
    block: usize,
    anchors: usize,
    tokens: usize,
    epochs: u64,
}

/// A way to run.
#[derive(Clone, Debug, Serialize)]
pub struct Way {
    /// What runs where.
    pub name: String,
    /// Flags of `dflash train` that it sets.
    pub flags: Vec<String>,
    /// Whether it trains with other values than those given, so that the drafter will be another.
    pub changes_training: bool,
    /// Ranks that train.
    pub trainers: usize,
    /// GPUs that run the target beside them.
    pub servers: usize,
    /// Such GPUs that would keep the trainers busy, at the best and at the worst that is taken for possible.
    pub servers_needed: Option<[f64; 2]>,
    /// Hidden states that the servers must deliver for that, bytes a second.
    pub bytes_per_second: Option<f64>,
    /// Hours of the run, at the best and at the worst; `None` where the device's speed is not known.
    pub hours: Option<[f64; 2]>,
    /// Memory of a trainer, bytes.
    pub trainer_bytes: f64,
    /// The target's weights on a server, bytes.
    pub server_bytes: Option<f64>,
    /// Why it does not fit.
    pub reason: Option<String>,
    /// Its command lines, one after the other.
    pub commands: Vec<String>,
}

/// All ways, the best first.
#[derive(Clone, Debug, Serialize)]
pub struct Suggestion {
    /// What computes, and how many of it.
    pub machine: String,
    /// The ways.
    pub ways: Vec<Way>,
}

/// Makes the shape of the draft that settings ask for.
pub type Shape<'a> = &'a dyn Fn(&DraftSettings) -> DraftShape;

/// Whether `device` is a CPU: this machine's, where it has no GPU.
pub fn is_on_a_cpu(device: &PlanDevice) -> bool {
    PlannedDevice::new(device).is_ok_and(|place| !place.is_gpu())
}

/// Compares the ways to run `settings` on the machine that they describe.
///
/// # Errors
/// As [`plan`].
pub fn suggest(
    settings: &PlanSettings,
    (target_dir, target): (&Path, &TargetFacts),
    shape: Shape<'_>,
    typed: &Typed,
) -> Result<Suggestion, Error> {
    let place = PlannedDevice::new(&settings.device)?;
    let compared = Compared { settings, target_dir, target, shape, place, typed };
    let mut ways = match compared.place.is_gpu() {
        true => compared.on_gpus()?,
        false => compared.on_a_cpu()?,
    };
    ways.sort_by(|a, b| a.rank().partial_cmp(&b.rank()).expect("hours are numbers"));
    let machine = match compared.place.is_gpu() {
        true => format!("{} GPU(s), {}", settings.ranks(), compared.device()),
        false => compared.device(),
    };
    Ok(Suggestion { machine, ways })
}

impl Way {
    /// What fits comes first, then what trains as asked unless that takes too long, then the fastest.
    fn rank(&self) -> (bool, bool, f64) {
        let hours = self.hours.map_or(f64::MAX, |hours| hours[1]);
        (self.reason.is_some(), self.changes_training, hours)
    }
}

struct Compared<'a> {
    settings: &'a PlanSettings,
    target_dir: &'a Path,
    target: &'a TargetFacts,
    shape: Shape<'a>,
    place: PlannedDevice,
    typed: &'a Typed,
}

impl Compared<'_> {
    fn device(&self) -> String {
        match &self.place {
            PlannedDevice::Gpu(name, gpu) => format!("{name} with {:.0} GB each", gpu.memory),
            PlannedDevice::UnknownGpu(name) => {
                name.clone().unwrap_or_else(|| "of unknown name".into())
            }
            PlannedDevice::Cpu => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                format!("CPU with {cores} cores")
            }
        }
    }

    fn plan(&self, settings: &PlanSettings) -> Result<Plan, Error> {
        plan(settings, self.target_dir, self.target, &(self.shape)(&settings.draft))
    }

    /// The trainers run the target, on every GPU; and each number of GPUs that serve beside those that train.
    fn on_gpus(&self) -> Result<Vec<Way>, Error> {
        let mut ways = self.colocated()?;
        let gpus = self.settings.nproc;
        let splits = if self.settings.nnodes == 1 { 1..gpus } else { 1..1 };
        for servers in splits {
            let settings = PlanSettings { nproc: gpus - servers, ..self.served() };
            ways.push(self.split(servers, &self.plan(&settings)?));
        }
        Ok(ways)
    }

    fn served(&self) -> PlanSettings {
        let mut settings = self.settings.clone();
        settings.hidden_states.colocate = false;
        settings
    }

    /// With the values as given, and with fewer anchors where there are many or memory is short.
    fn colocated(&self) -> Result<Vec<Way>, Error> {
        let mut settings = self.settings.clone();
        settings.hidden_states.colocate = true;
        let own = match self.plan(&settings) {
            Ok(plan) => self.together(&settings, &plan, &[]),
            // Its family runs in another engine alone.
            Err(error) if self.plan(&self.served()).is_ok() => {
                return Ok(vec![self.impossible(error.to_string())]);
            }
            Err(error) => return Err(error),
        };
        let mut ways = vec![own];
        let anchors = settings.rows.max_anchors();
        if ways[0].reason.is_some() && !settings.compute.recompute {
            let mut slower = settings.clone();
            slower.compute.recompute = true;
            let flags = [("--recompute", None)];
            ways.push(self.together(&slower, &self.plan(&slower)?, &flags));
        }
        if anchors > FEWER_ANCHORS {
            settings.rows.max_anchors = Some(FEWER_ANCHORS);
            let flags = [("--max-anchors", Some(FEWER_ANCHORS.to_string()))];
            let fewer = self.together(&settings, &self.plan(&settings)?, &flags);
            ways.push(Way { changes_training: true, ..fewer });
        }
        if ways.iter().all(|way| way.reason.is_some()) {
            settings.rows.max_anchors = Some(FEWEST_ANCHORS);
            settings.rows.total_seq_len = Some(SHORT_ROWS);
            let flags = [
                ("--total-seq-len", Some(SHORT_ROWS.to_string())),
                ("--max-anchors", Some(FEWEST_ANCHORS.to_string())),
            ];
            let shorter = self.together(&settings, &self.plan(&settings)?, &flags);
            ways.push(Way { changes_training: true, ..shorter });
        }
        Ok(ways)
    }

    fn on_a_cpu(&self) -> Result<Vec<Way>, Error> {
        let mut settings = self.settings.clone();
        settings.hidden_states.colocate = true;
        let mut way = match self.plan(&settings) {
            Ok(plan) => self.together(&settings, &plan, &[]),
            Err(error) if self.plan(&self.served()).is_ok() => {
                return Ok(vec![self.impossible(error.to_string())]);
            }
            Err(error) => return Err(error),
        };
        let mut ways = Vec::new();
        for values in &CPU_VALUES {
            let is_short = way.hours.is_some_and(|hours| hours[1] <= PATIENCE_HOURS);
            if is_short && way.reason.is_none() {
                break;
            }
            way.reason.get_or_insert(format!("takes longer than {PATIENCE_HOURS:.0} hours"));
            let (smaller, flags) = values.applied(&settings);
            let plan = self.plan(&smaller)?;
            let less = self.together(&smaller, &plan, &flags);
            let less = Way { changes_training: true, ..less };
            ways.push(std::mem::replace(&mut way, less));
        }
        if way.changes_training && way.hours.is_some_and(|hours| hours[1] > PATIENCE_HOURS) {
            way = self.shortened(&settings)?;
        }
        ways.push(way);
        Ok(ways)
    }

    /// The smallest values, stopped early.
    fn shortened(&self, settings: &PlanSettings) -> Result<Way, Error> {
        let [.., smallest] = &CPU_VALUES;
        let (mut smaller, mut flags) = smallest.applied(settings);
        let step = self.plan(&smaller)?.step_seconds.unwrap_or(f64::MAX);
        let steps = ((SHORT_HOURS * 3600.0 / step) as u64).max(1);
        smaller.rows.max_steps = Some(steps);
        flags.push(("--max-steps", Some(steps.to_string())));
        let way = self.together(&smaller, &self.plan(&smaller)?, &flags);
        Ok(Way { changes_training: true, ..way })
    }

    /// The trainers run the target themselves.
    fn together(
        &self,
        settings: &PlanSettings,
        plan: &Plan,
        values: &[(&str, Option<String>)],
    ) -> Way {
        let mut flags = vec!["--colocate".to_owned()];
        flags.extend(["--nproc".to_owned(), settings.nproc.to_string()]);
        if settings.nnodes > 1 {
            flags.extend(["--nnodes".to_owned(), settings.nnodes.to_string()]);
            // On the first machine; the others have their own number.
            let meeting = ["--node-rank", "0", "--rdzv-endpoint", "MACHINE_0:29500"];
            flags.extend(meeting.map(str::to_owned));
        }
        let mut with = String::new();
        for (flag, value) in values {
            flags.push((*flag).to_owned());
            flags.extend(value.clone());
            with +=
                &format!(" {flag}{}", value.as_ref().map_or(String::new(), |it| format!(" {it}")));
        }
        let ranks = settings.ranks();
        let who = match (self.place.is_gpu(), ranks) {
            (true, 1) => "1 GPU runs the target and trains".to_owned(),
            (true, _) => format!("{ranks} GPUs run the target and train"),
            (false, 1) => "one process runs the target and trains".to_owned(),
            (false, _) => format!("{ranks} processes run the target and train"),
        };
        let with = match values.len() {
            0 => with,
            1 => format!(", with{with}"),
            // The table names them below.
            _ => ", with smaller values".to_owned(),
        };
        let way = Way {
            name: format!("{who}{with}"),
            flags,
            changes_training: false,
            trainers: ranks,
            servers: 0,
            servers_needed: None,
            bytes_per_second: None,
            hours: hours(plan, [1.0; 2]),
            trainer_bytes: plan.total_bytes,
            server_bytes: None,
            reason: self.too_large(plan.total_bytes, "a trainer"),
            commands: Vec::new(),
        };
        Way { commands: self.typed.together(&way, settings.rows.total_seq_len()), ..way }
    }

    /// So many GPUs serve those that train; whoever is slower decides.
    fn split(&self, servers: usize, plan: &Plan) -> Way {
        let needed =
            plan.servers.as_ref().map(|it| it.per_trainer.map(|one| one * plan.ranks as f64));
        let stretch =
            needed.map_or([1.0; 2], |needed| needed.map(|it| (it / servers as f64).max(1.0)));
        let server_bytes = plan.server_bytes.first().copied();
        let serves = |bytes: f64| {
            let too_large = self.too_large(bytes, "a server")?;
            Some(format!(
                "{too_large}; split it (hidden-server --tensor-parallel-size), or let a vLLM serve it as it \
                 is stored (--vllm-endpoint)"
            ))
        };
        let reason = self.too_large(plan.total_bytes, "a trainer");
        let endpoints = (0..servers).map(|at| format!("http://127.0.0.1:{}/v1", 8000 + at));
        let endpoints: Vec<String> = endpoints.collect();
        let engine = if server_bytes.is_some() { "" } else { " with vLLM" };
        let verbs = [(servers, "serve"), (plan.ranks, "train")].map(|(count, verb)| match count {
            1 => format!("1 GPU {verb}s"),
            _ => format!("{count} GPUs {verb}"),
        });
        let ids = self.layer_ids();
        let way = Way {
            name: format!("{}{engine}, {}", verbs[0], verbs[1]),
            flags: vec![
                "--nproc".into(),
                plan.ranks.to_string(),
                "--vllm-endpoint".into(),
                endpoints.join(","),
            ],
            changes_training: false,
            trainers: plan.ranks,
            servers,
            servers_needed: needed,
            bytes_per_second: plan.hidden_bytes_per_second,
            hours: hours(plan, stretch),
            trainer_bytes: plan.total_bytes,
            server_bytes,
            reason: reason.or_else(|| server_bytes.and_then(serves)),
            commands: Vec::new(),
        };
        let tokens = self.settings.rows.total_seq_len();
        Way { commands: self.typed.split(&way, &ids, tokens), ..way }
    }

    fn layer_ids(&self) -> Vec<u32> {
        let shape = (self.shape)(&self.settings.draft);
        setup::draft_config(self.target, &shape)
            .map_or_else(|_| shape.target_layer_ids.clone(), |draft| draft.target_layer_ids)
    }

    fn impossible(&self, reason: String) -> Way {
        Way {
            name: "the trainers run the target".into(),
            flags: Vec::new(),
            changes_training: false,
            trainers: self.settings.ranks(),
            servers: 0,
            servers_needed: None,
            bytes_per_second: None,
            hours: None,
            trainer_bytes: 0.0,
            server_bytes: None,
            reason: Some(reason),
            commands: Vec::new(),
        }
    }

    /// Why a process of so many bytes does not fit on the GPU, or with the others in this machine's memory.
    fn too_large(&self, bytes: f64, who: &str) -> Option<String> {
        let memory = match &self.place {
            PlannedDevice::Gpu(_, gpu) => gpu.memory * 1e9,
            PlannedDevice::UnknownGpu(_) => return None,
            PlannedDevice::Cpu => memory_bytes()? / self.settings.nproc as f64,
        };
        (bytes > FULL * memory)
            .then(|| format!("{who} needs {:.1} of {:.0} GB", bytes / 1e9, memory / 1e9))
    }
}

impl Values {
    /// `settings` with these values, and their flags.
    fn applied(
        &self,
        settings: &PlanSettings,
    ) -> (PlanSettings, Vec<(&'static str, Option<String>)>) {
        let mut settings = settings.clone();
        settings.draft.num_layers = Some(self.layers);
        settings.draft.block_size = Some(self.block);
        settings.rows.max_anchors = Some(self.anchors);
        settings.rows.total_seq_len = Some(self.tokens);
        settings.rows.epochs = Some(self.epochs);
        let flag = |name, value: usize| (name, Some(value.to_string()));
        let flags = vec![
            flag("--num-layers", self.layers),
            flag("--block-size", self.block),
            flag("--max-anchors", self.anchors),
            flag("--total-seq-len", self.tokens),
            ("--epochs", Some(self.epochs.to_string())),
        ];
        (settings, flags)
    }
}

/// Hours of a run whose steps wait for servers by these factors.
fn hours(plan: &Plan, stretch: [f64; 2]) -> Option<[f64; 2]> {
    let best = plan.run_seconds? / 3600.0;
    let slow = plan.slow_run_seconds.map_or(best, |seconds| seconds / 3600.0);
    Some([best * stretch[0], slow * stretch[1]])
}
