//! The communication groups of a grid's ranks.

use std::time::Duration;

use dflash_dist::{Communicator, ConnectOptions, Error, GroupSpec, WorkerEnv, connect_groups};
use dflash_settings::Backend;
use dflash_target::parallel::Grid;
use tch::Device;

/// How long ranks wait for the next prompt: practically forever. A dead rank is noticed by its
/// connections and by the launcher.
const IDLE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long they wait for each other within a pass.
const PASS: Duration = Duration::from_secs(1800);

/// How long they wait for all to start.
const JOIN: Duration = Duration::from_secs(120);

/// A rank and its groups.
pub(crate) struct Peers {
    pub(super) grid: Grid,
    pub(super) rank: usize,
    /// All ranks; the first one broadcasts jobs.
    pub(super) control: Box<dyn Communicator>,
    /// The ranks of this stage, if there are others.
    pub(super) tensor: Option<Box<dyn Communicator>>,
    /// The rank of the previous stage, and this one.
    pub(super) before: Option<Box<dyn Communicator>>,
    /// This rank, and that of the next stage.
    pub(super) behind: Option<Box<dyn Communicator>>,
    /// On rank 0, a group with the first rank of each further stage; on these ranks that group
    /// only.
    pub(super) answers: Vec<Box<dyn Communicator>>,
}

impl Peers {
    /// Joins the groups of `grid`. `device` is where the exchanged tensors are.
    ///
    /// # Errors
    /// As [`connect_groups`]; ranks with different `common`.
    pub(crate) fn connect(
        env: &WorkerEnv,
        grid: Grid,
        device: Device,
        common: Vec<(String, String)>,
    ) -> Result<Self, Error> {
        let options = ConnectOptions {
            join_timeout: JOIN,
            collective_timeout: PASS,
            device,
            backend: Backend::Auto,
            common,
        };
        let mut specs = vec![Which::Control];
        let stages = 0..grid.pipeline;
        if grid.tensor > 1 {
            specs.extend(stages.clone().map(|stage| Which::Tensor { stage }));
        }
        for stage in stages.skip(1) {
            specs.extend((0..grid.tensor).map(|part| Which::Link { stage, part }));
            specs.push(Which::Answers { stage });
        }
        let groups: Vec<GroupSpec> = specs.iter().map(|which| which.spec(grid, device)).collect();
        let mut joined = specs.iter().zip(connect_groups(env, &options, &groups)?);
        let control = joined.next().and_then(|(_, group)| group).expect("all ranks are in it");
        let (rank, own) = (env.rank, grid.stage(env.rank));
        let (tensor, before, behind, answers) = (None, None, None, Vec::new());
        let mut peers = Self { grid, rank, control, tensor, before, behind, answers };
        for (which, group) in joined {
            let Some(group) = group else { continue };
            match *which {
                Which::Control => {}
                Which::Tensor { .. } => peers.tensor = Some(group),
                Which::Link { stage, .. } if stage == own => peers.before = Some(group),
                Which::Link { .. } => peers.behind = Some(group),
                Which::Answers { .. } => peers.answers.push(group),
            }
        }
        Ok(peers)
    }
}

/// One of the grid's groups.
#[derive(Debug, Clone, Copy)]
enum Which {
    Control,
    Tensor {
        stage: usize,
    },
    /// From the previous stage to `stage`, in which the sender is the second rank.
    Link {
        stage: usize,
        part: usize,
    },
    /// From the first rank of `stage` to rank 0.
    Answers {
        stage: usize,
    },
}

impl Which {
    fn spec(self, grid: Grid, device: Device) -> GroupSpec {
        let pass = |name: String, ranks| GroupSpec { name, ranks, device, timeout: PASS };
        match self {
            Self::Control => {
                let (name, ranks) = ("control".into(), (0..grid.ranks()).collect());
                GroupSpec { name, ranks, device: Device::Cpu, timeout: IDLE }
            }
            Self::Tensor { stage } => {
                let ranks = (0..grid.tensor).map(|part| grid.rank(stage, part)).collect();
                pass(format!("tensor/{stage}"), ranks)
            }
            Self::Link { stage, part } => {
                let ranks = vec![grid.rank(stage - 1, part), grid.rank(stage, part)];
                pass(format!("link/{stage}/{part}"), ranks)
            }
            Self::Answers { stage } => {
                pass(format!("answers/{stage}"), vec![grid.rank(stage, 0), 0])
            }
        }
    }
}
