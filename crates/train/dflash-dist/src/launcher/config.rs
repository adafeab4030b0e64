//! Configuration of a launch.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::Error;

/// Time between asking and killing after a death or Ctrl-C. Together with the wait for other deaths
/// and for the last lines it is less than the documented five seconds.
const GRACE: Duration = Duration::from_secs(3);

/// Time between SIGTERM and killing: ranks save their state, and a small job ends within 20 s.
const SAVE_GRACE: Duration = Duration::from_millis(17_500);

/// How long the nodes wait for one another, at the start and after a death.
const JOIN_TIMEOUT: Duration = Duration::from_secs(120);

/// What to start.
#[derive(Debug, Clone)]
pub struct LaunchConfig {
    /// The worker program.
    pub program: PathBuf,
    /// Its arguments, the same for all ranks; environment variables make it a worker (see
    /// [`Role`](crate::Role)).
    pub args: Vec<OsString>,
    /// Additional variables for all ranks.
    pub env: Vec<(OsString, OsString)>,
    /// Workers to start on this machine.
    pub nproc: usize,
    /// Machines in the job; each runs a launcher with the same `nproc`.
    pub nnodes: usize,
    /// This machine among them, 0-based.
    pub node_rank: usize,
    /// `host:port` of node 0, where its launcher opens the store; only for several nodes.
    pub rdzv_endpoint: Option<String>,
    /// How often all ranks are restarted after a death.
    pub max_restarts: usize,
    /// How long the nodes wait for one another.
    pub join_timeout: Duration,
    /// How long ranks may run after SIGINT was forwarded or a rank died; then they are killed.
    pub grace: Duration,
    /// The same after SIGTERM, when ranks save.
    pub save_grace: Duration,
}

impl LaunchConfig {
    /// `nproc` copies of `program` on this machine only, without restarts.
    pub fn new(program: PathBuf, args: Vec<OsString>, nproc: usize) -> Self {
        Self {
            program,
            args,
            env: Vec::new(),
            nproc,
            nnodes: 1,
            node_rank: 0,
            rdzv_endpoint: None,
            max_restarts: 0,
            join_timeout: JOIN_TIMEOUT,
            grace: GRACE,
            save_grace: SAVE_GRACE,
        }
    }

    /// Ranks in the job.
    pub(super) fn world_size(&self) -> usize {
        self.nnodes * self.nproc
    }

    /// Refuses contradictory settings; [`launch`](crate::launch) does so as well.
    ///
    /// # Errors
    /// [`Error::BadLaunch`] and [`Error::MissingFlag`] name the flag.
    pub fn check(&self) -> Result<(), Error> {
        let bad = |flag, value: usize, expected: &str| {
            Err(Error::BadLaunch { flag, value: value.to_string(), expected: expected.to_owned() })
        };
        if self.nproc == 0 {
            return bad("--nproc", self.nproc, "at least 1");
        }
        if self.nnodes == 0 {
            return bad("--nnodes", self.nnodes, "at least 1");
        }
        if self.node_rank >= self.nnodes {
            let expected = format!("0 to {} (--nnodes is {})", self.nnodes - 1, self.nnodes);
            return bad("--node-rank", self.node_rank, &expected);
        }
        self.endpoint().map(|_| ())
    }

    /// The endpoint of a job of several nodes; `None` for one node.
    pub(super) fn endpoint(&self) -> Result<Option<(String, u16)>, Error> {
        if self.nnodes == 1 {
            return Ok(None);
        }
        let Some(value) = self.rdzv_endpoint.clone() else {
            return Err(Error::MissingFlag { flag: "--rdzv-endpoint", nnodes: self.nnodes });
        };
        let parts = value.rsplit_once(':').and_then(|(host, port)| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let port = port.parse().ok().filter(|&port: &u16| port > 0)?;
            (!host.is_empty()).then_some((host.to_owned(), port))
        });
        let expected = "HOST:PORT of node 0, the same on all nodes".to_owned();
        parts.map(Some).ok_or(Error::BadLaunch { flag: "--rdzv-endpoint", value, expected })
    }
}
