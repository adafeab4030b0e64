//! A worker's rank, from the environment.

mod slurm;

use std::str::FromStr;

use crate::Error;

/// torchrun's default port, for environments that name none.
const DEFAULT_PORT: u16 = 29500;

/// A worker's position among the processes of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerEnv {
    /// This process among all, 0-based.
    pub rank: usize,
    /// This process on its node, 0-based; chooses the device.
    pub local_rank: usize,
    /// Processes in the job.
    pub world_size: usize,
    /// Processes on this node.
    pub local_world_size: usize,
    /// Where the rendezvous store listens; `None` only for a job of one process.
    pub master_addr: Option<String>,
    /// The store's port.
    pub master_port: u16,
    /// The job's name; keeps jobs that share a store apart.
    pub run_id: String,
    /// How often the launcher has restarted the workers; keeps the attempts apart.
    pub restart_count: usize,
    /// Whether the launcher holds the store and every worker is a client of it. Otherwise rank 0
    /// opens it.
    pub use_agent_store: bool,
}

/// The role of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// Train alone.
    Alone,
    /// Train as one of several workers that a launcher has started.
    Worker(WorkerEnv),
    /// Start the workers.
    Launcher {
        /// How many.
        nproc: usize,
    },
}

impl Role {
    /// torchrun's variables make a worker, then the flags a launcher, then Slurm's variables a
    /// worker. The flags take precedence over Slurm, because a batch script has Slurm's variables
    /// too but is one process; with several nodes `srun` starts one launcher on each.
    ///
    /// `nproc` is the requested number of ranks on this machine. With `needs_launcher` even one
    /// rank has a launcher: there are other nodes, or it restarts the rank when it dies.
    ///
    /// # Errors
    /// [`Error::BadVariable`] and [`Error::MissingVariable`] name the variable.
    pub fn from_env(nproc: Option<usize>, needs_launcher: bool) -> Result<Self, Error> {
        let variable =
            |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self::from_lookup(nproc, needs_launcher, &variable)
    }

    fn from_lookup(
        nproc: Option<usize>,
        needs_launcher: bool,
        lookup: &Lookup<'_>,
    ) -> Result<Self, Error> {
        if let Some(env) = WorkerEnv::from_torchrun(lookup)? {
            return Ok(Self::Worker(env));
        }
        match nproc {
            nproc if needs_launcher => Ok(Self::Launcher { nproc: nproc.unwrap_or(1) }),
            Some(1) => Ok(Self::Alone),
            Some(nproc) => Ok(Self::Launcher { nproc }),
            None => Ok(slurm::worker_env(lookup)?.map_or(Self::Alone, Self::Worker)),
        }
    }
}

impl WorkerEnv {
    /// A job of this process only.
    pub fn alone() -> Self {
        Self {
            rank: 0,
            local_rank: 0,
            world_size: 1,
            local_world_size: 1,
            master_addr: None,
            master_port: DEFAULT_PORT,
            run_id: "none".to_owned(),
            restart_count: 0,
            use_agent_store: false,
        }
    }

    /// Whether all processes of the job are on this machine.
    pub fn is_single_node(&self) -> bool {
        self.local_world_size == self.world_size
    }

    fn from_torchrun(lookup: &Lookup<'_>) -> Result<Option<Self>, Error> {
        let Some(rank) = parsed(lookup, "RANK")? else { return Ok(None) };
        let world_size = parsed(lookup, "WORLD_SIZE")?;
        let world_size =
            world_size.ok_or(Error::MissingVariable { present: "RANK", missing: "WORLD_SIZE" })?;
        let env = Self {
            rank,
            world_size,
            local_rank: parsed(lookup, "LOCAL_RANK")?.unwrap_or(rank),
            local_world_size: parsed(lookup, "LOCAL_WORLD_SIZE")?.unwrap_or(world_size),
            master_addr: non_empty(lookup, "MASTER_ADDR"),
            master_port: parsed(lookup, "MASTER_PORT")?.unwrap_or(DEFAULT_PORT),
            run_id: non_empty(lookup, "TORCHELASTIC_RUN_ID").unwrap_or_else(|| "none".to_owned()),
            restart_count: parsed(lookup, "TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0),
            // torch compares with Python's str(True) and treats everything else as false.
            use_agent_store: lookup("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True"),
        };
        env.check("RANK", "LOCAL_RANK").map(Some)
    }

    /// Refuses a rank outside its world, and a job of several processes without an address to meet
    /// at.
    fn check(self, rank: &'static str, local_rank: &'static str) -> Result<Self, Error> {
        check_below(rank, self.rank, self.world_size, "world")?;
        check_below(local_rank, self.local_rank, self.local_world_size, "local world")?;
        if self.world_size > 1 && self.master_addr.is_none() {
            return Err(Error::MissingVariable { present: rank, missing: "MASTER_ADDR" });
        }
        Ok(self)
    }
}

/// Reads a variable; a parameter so that tests need not change the process's own.
type Lookup<'a> = dyn Fn(&str) -> Option<String> + 'a;

fn non_empty(lookup: &Lookup<'_>, name: &str) -> Option<String> {
    lookup(name).filter(|value| !value.is_empty())
}

fn parsed<T: FromStr>(lookup: &Lookup<'_>, name: &'static str) -> Result<Option<T>, Error> {
    let Some(value) = lookup(name) else { return Ok(None) };
    let expected = if name == "MASTER_PORT" { "a port" } else { "a number from 0" };
    let number = value.trim().parse().map_err(|_| expected.to_owned());
    number.map(Some).map_err(|expected| Error::BadVariable { name, value, expected })
}

fn check_below(name: &'static str, rank: usize, size: usize, world: &str) -> Result<(), Error> {
    if rank < size {
        return Ok(());
    }
    let expected = format!("a number below the {world} size {size}");
    Err(Error::BadVariable { name, value: rank.to_string(), expected })
}

#[cfg(test)]
mod tests;
