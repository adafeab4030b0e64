//! Parses environments given as tables: into a position or a named error.

use super::*;

fn env(pairs: &str) -> impl Fn(&str) -> Option<String> {
    let pairs: Vec<(String, String)> = pairs
        .split_whitespace()
        .map(|pair| pair.split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    move |name| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone())
}

/// The role for these variables.
fn read(pairs: &str) -> Result<Role, Error> {
    Role::from_lookup(None, false, &env(pairs))
}

const TORCHRUN: &str = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=head \
    MASTER_PORT=1234 TORCHELASTIC_RUN_ID=job TORCHELASTIC_RESTART_COUNT=2 \
    TORCHELASTIC_USE_AGENT_STORE=True";

const SLURM: &str = "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 SLURM_NODEID=1 \
    SLURM_NODELIST=node[01-02] SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_ID=77";

#[test]
fn variables_give_a_worker_its_place() {
    let check = |pairs: &str, expected: &str| {
        let Role::Worker(env) = read(pairs).unwrap() else { panic!("{pairs}: not a worker") };
        let WorkerEnv { rank, world_size, local_rank, local_world_size, .. } = env;
        let host = env.master_addr.as_deref().unwrap_or("nowhere");
        let store = if env.use_agent_store { "the agent's" } else { "our own" };
        let found = format!(
            "{rank} of {world_size}, {local_rank} of {local_world_size} here, {host}:{}, {} {}, \
             {store}",
            env.master_port, env.run_id, env.restart_count
        );
        assert_eq!(found, expected, "{pairs}");
    };
    check(TORCHRUN, "3 of 4, 1 of 2 here, head:1234, job 2, the agent's");
    let four = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=5";
    check(four, "1 of 2, 1 of 2 here, localhost:5, none 0, our own");
    // Only Python's `True` selects the agent's store.
    let one = "0 of 1, 0 of 1 here, nowhere:29500, none 0";
    for (value, store) in [("True", "the agent's"), ("False", "our own"), ("1", "our own")] {
        let pairs = format!("RANK=0 WORLD_SIZE=1 TORCHELASTIC_USE_AGENT_STORE={value}");
        check(&pairs, &format!("{one}, {store}"));
    }
    check(SLURM, "3 of 4, 1 of 2 here, node01:15077, slurm-77 0, our own");
    let explicit = format!("{SLURM} MASTER_ADDR=10.0.0.1 MASTER_PORT=99 SLURM_STEP_NUM_TASKS=4");
    check(&explicit, "3 of 4, 1 of 2 here, 10.0.0.1:99, slurm-77 0, our own");
}

#[test]
fn a_worker_knows_whether_all_are_on_its_machine() {
    for (local_world_size, expected) in [(2, false), (4, true)] {
        let env = WorkerEnv { world_size: 4, local_world_size, ..WorkerEnv::alone() };
        assert_eq!(env.is_single_node(), expected);
    }
}

#[test]
fn faults_name_the_variable() {
    let check = |pairs: &str, expected: &str| {
        let message = read(pairs).unwrap_err().to_string();
        assert!(message.contains(expected), "{pairs}: {message}");
    };
    check("RANK=x WORLD_SIZE=2", "RANK is \"x\", expected a number from 0");
    check("RANK=-1 WORLD_SIZE=2", "RANK is \"-1\"");
    check("RANK=0", "RANK is set but WORLD_SIZE is not");
    check("RANK=2 WORLD_SIZE=2 MASTER_ADDR=h", "RANK is \"2\", expected a number below");
    check("RANK=0 WORLD_SIZE=2", "RANK is set but MASTER_ADDR is not");
    check("RANK=0 WORLD_SIZE=2 MASTER_ADDR=", "RANK is set but MASTER_ADDR is not");
    check("RANK=0 WORLD_SIZE=1 MASTER_PORT=70000", "MASTER_PORT is \"70000\", expected a port");
    check("RANK=1 WORLD_SIZE=2 LOCAL_RANK=2 MASTER_ADDR=h", "LOCAL_RANK is \"2\"");
    check("SLURM_PROCID=1 SLURM_NTASKS=2", "SLURM_PROCID is set but MASTER_ADDR is not");
    check("SLURM_PROCID=1 SLURM_NTASKS=two", "SLURM_NTASKS is \"two\"");
}

#[test]
fn roles_by_precedence() {
    let check_role = |nproc, needs_launcher, pairs: &str, expected: &str| {
        let name = match Role::from_lookup(nproc, needs_launcher, &env(pairs)).unwrap() {
            Role::Alone => "alone".to_owned(),
            Role::Worker(env) => format!("worker {}", env.rank),
            Role::Launcher { nproc } => format!("launcher of {nproc}"),
        };
        assert_eq!(name, expected, "{nproc:?} {needs_launcher} {pairs}");
    };
    let check = |nproc, pairs: &str, expected: &str| check_role(nproc, false, pairs, expected);
    let check_needed =
        |nproc, pairs: &str, expected: &str| check_role(nproc, true, pairs, expected);
    check(None, "", "alone");
    check(None, "WORLD_SIZE=2 MASTER_ADDR=head", "alone");
    check(None, "SLURM_PROCID=0 SLURM_NTASKS=1", "alone");
    // A step may have fewer tasks than its job.
    let step = "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1 SLURM_NODELIST=n";
    check(None, step, "alone");
    check(Some(1), "", "alone");
    check(Some(2), "", "launcher of 2");
    check(Some(2), TORCHRUN, "worker 3");
    check(None, TORCHRUN, "worker 3");
    check(None, SLURM, "worker 3");
    check(Some(2), SLURM, "launcher of 2");
    check(Some(1), SLURM, "alone");
    check_needed(None, "", "launcher of 1");
    check_needed(Some(1), "", "launcher of 1");
    check_needed(Some(4), SLURM, "launcher of 4");
    check_needed(Some(4), TORCHRUN, "worker 3");
}
