//! Environments as tables: variables in, place or named fault out.

use super::*;

fn env(pairs: &str) -> impl Fn(&str) -> Option<String> {
    let pairs: Vec<(String, String)> = pairs
        .split_whitespace()
        .map(|pair| pair.split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    move |name| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone())
}

fn read(pairs: &str) -> Result<Option<WorkerEnv>, Error> {
    match Role::from_lookup(None, false, &env(pairs))? {
        Role::Worker(env) => Ok(Some(env)),
        Role::Alone => Ok(None),
        Role::Launcher { nproc } => panic!("a launcher of {nproc}"),
    }
}

const TORCHRUN: &str = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=head \
    MASTER_PORT=1234 TORCHELASTIC_RUN_ID=job TORCHELASTIC_RESTART_COUNT=2 \
    TORCHELASTIC_USE_AGENT_STORE=True";

const SLURM: &str = "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 SLURM_NODEID=1 \
    SLURM_NODELIST=node[01-02] SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_ID=77";

#[test]
fn torchrun_s_variables_are_read() {
    let expected = WorkerEnv {
        rank: 3,
        local_rank: 1,
        world_size: 4,
        local_world_size: 2,
        master_addr: Some("head".to_owned()),
        master_port: 1234,
        run_id: "job".to_owned(),
        restart_count: 2,
        use_agent_store: true,
    };
    assert!(!expected.is_single_node());
    assert_eq!(read(TORCHRUN).unwrap(), Some(expected));
}

#[test]
fn the_four_usual_variables_are_enough() {
    let env = read("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=5").unwrap().unwrap();
    assert_eq!((env.local_rank, env.local_world_size), (1, 2));
    assert!(env.is_single_node() && !env.use_agent_store);
}

#[test]
fn only_python_s_true_means_an_agent_store() {
    let check = |value: &str, expected: bool| {
        let text = format!("RANK=0 WORLD_SIZE=1 TORCHELASTIC_USE_AGENT_STORE={value}");
        assert_eq!(read(&text).unwrap().unwrap().use_agent_store, expected, "{value}");
    };
    check("True", true);
    check("False", false);
    check("1", false);
}

#[test]
fn slurm_s_variables_are_read() {
    let env = read(SLURM).unwrap().unwrap();
    assert_eq!((env.rank, env.local_rank), (3, 1));
    assert_eq!((env.world_size, env.local_world_size), (4, 2));
    assert_eq!(env.master_addr.as_deref(), Some("node01"));
    assert_eq!((env.master_port, env.run_id.as_str()), (15_077, "slurm-77"));
    assert!(!env.use_agent_store);
}

#[test]
fn explicit_endpoints_and_steps_beat_slurm_s_job() {
    let text = format!("{SLURM} MASTER_ADDR=10.0.0.1 MASTER_PORT=99 SLURM_STEP_NUM_TASKS=4");
    let env = read(&text).unwrap().unwrap();
    assert_eq!((env.master_addr.as_deref(), env.master_port), (Some("10.0.0.1"), 99));
    let step = "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1 SLURM_NODELIST=n";
    assert_eq!(read(step).unwrap(), None);
}

#[test]
fn no_variables_mean_no_worker() {
    assert_eq!(read("").unwrap(), None);
    assert_eq!(read("WORLD_SIZE=2 MASTER_ADDR=head").unwrap(), None);
    assert_eq!(read("SLURM_PROCID=0 SLURM_NTASKS=1").unwrap(), None);
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
