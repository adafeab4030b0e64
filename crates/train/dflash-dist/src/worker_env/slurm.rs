//! Slurm's variables: `srun` starts the workers, and nobody holds a store for them.

use super::{Lookup, WorkerEnv, non_empty, parsed};
use crate::Error;

/// Derived ports are above the well-known ones and below the ephemeral range.
const FIRST_PORT: u64 = 15_000;
const PORTS: u64 = 15_000;

/// The position that srun gives this process; `None` outside Slurm and for a single task.
pub(super) fn worker_env(lookup: &Lookup<'_>) -> Result<Option<WorkerEnv>, Error> {
    let Some(rank) = parsed(lookup, "SLURM_PROCID")? else { return Ok(None) };
    // A step may have fewer tasks than the job that it runs in.
    let world_size = match parsed(lookup, "SLURM_STEP_NUM_TASKS")? {
        Some(tasks) => tasks,
        None => parsed(lookup, "SLURM_NTASKS")?.unwrap_or(1),
    };
    if world_size == 1 {
        return Ok(None);
    }
    let hosts = non_empty(lookup, "SLURM_STEP_NODELIST")
        .or_else(|| non_empty(lookup, "SLURM_NODELIST"))
        .or_else(|| non_empty(lookup, "SLURM_JOB_NODELIST"));
    let job = parsed::<u64>(lookup, "SLURM_JOB_ID")?;
    let env = WorkerEnv {
        rank,
        world_size,
        local_rank: parsed(lookup, "SLURM_LOCALID")?.unwrap_or(rank),
        local_world_size: tasks_here(lookup)?.unwrap_or(world_size),
        master_addr: non_empty(lookup, "MASTER_ADDR")
            .or_else(|| hosts.as_deref().and_then(first_host)),
        master_port: parsed(lookup, "MASTER_PORT")?.unwrap_or(port_of(job)),
        run_id: job.map_or_else(|| "slurm".to_owned(), |job| format!("slurm-{job}")),
        restart_count: parsed(lookup, "SLURM_RESTART_COUNT")?.unwrap_or(0),
        use_agent_store: false,
    };
    env.check("SLURM_PROCID", "SLURM_LOCALID").map(Some)
}

/// Jobs that share a node get different ports; all tasks of a job get the same.
fn port_of(job: Option<u64>) -> u16 {
    let offset = job.map_or(0, |job| job % PORTS);
    u16::try_from(FIRST_PORT + offset).expect("the range fits in 16 bits")
}

/// Tasks on this node, from `SLURM_STEP_TASKS_PER_NODE` such as `4(x2),3` and
/// `SLURM_NODEID`.
fn tasks_here(lookup: &Lookup<'_>) -> Result<Option<usize>, Error> {
    let node = parsed(lookup, "SLURM_NODEID")?.unwrap_or(0);
    let counts = non_empty(lookup, "SLURM_STEP_TASKS_PER_NODE")
        .or_else(|| non_empty(lookup, "SLURM_TASKS_PER_NODE"));
    Ok(counts.and_then(|counts| expand_counts(&counts).nth(node)))
}

/// `4(x2),3` is 4, 4, 3. What does not parse counts as one node with no tasks, which
/// the check of the local rank then refuses.
fn expand_counts(counts: &str) -> impl Iterator<Item = usize> {
    counts.split(',').flat_map(|part| {
        let (tasks, repeat) = match part.split_once("(x") {
            Some((tasks, repeat)) => (tasks, repeat.trim_end_matches(')').parse().unwrap_or(1)),
            None => (part, 1),
        };
        std::iter::repeat_n(tasks.trim().parse().unwrap_or(0), repeat)
    })
}

/// The first host of Slurm's list notation: `gpu[07-09,12]-ib,login` gives `gpu07-ib`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let stop = rest.find([',', '[']).unwrap_or(rest.len());
        host.push_str(&rest[..stop]);
        if !rest[stop..].starts_with('[') {
            return (!host.is_empty()).then_some(host);
        }
        let (range, after) = rest[stop + 1..].split_once(']')?;
        host.push_str(range.split([',', '-']).next()?);
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        let check = |list: &str, expected: Option<&str>| {
            assert_eq!(first_host(list).as_deref(), expected, "{list}");
        };
        check("node7", Some("node7"));
        check("node7,node9", Some("node7"));
        check("node[01-03,07],gpu1", Some("node01"));
        check("gpu[07-09,12]-ib,login", Some("gpu07-ib"));
        check("rack[2,4]n[10-12]", Some("rack2n10"));
        check("a[1", None);
        check("", None);
    }

    #[test]
    fn tasks_per_node_are_expanded() {
        let check = |counts: &str, expected: &[usize]| {
            assert_eq!(expand_counts(counts).collect::<Vec<_>>(), expected, "{counts}");
        };
        check("4", &[4]);
        check("4(x2),3", &[4, 4, 3]);
        check("1,2(x2)", &[1, 2, 2]);
        check("x", &[0]);
    }

    #[test]
    fn ports_depend_on_the_job_only() {
        assert_eq!(port_of(None), 15_000);
        assert_eq!(port_of(Some(123_456)), port_of(Some(123_456)));
        assert_ne!(port_of(Some(1)), port_of(Some(2)));
        assert!(port_of(Some(u64::MAX)) < 32_768);
    }
}
