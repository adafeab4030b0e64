//! Runs collectives between real processes and reports the result: for the tests of this crate, and
//! to try a cluster's network before a long job.
//!
//! `torchrun --no-python --nproc-per-node 2 dist-probe check` compares every collective with its
//! expected result; `dist-probe bench` times all-reduce. `dist-probe launch N TASK` starts the task
//! in N processes with our own launcher, and `dist-probe node I OF HOST:PORT N TASK` those of one
//! of several machines; `dist-probe nccl TASK` carries CPU tensors over an NCCL that accepts them;
//! `dist-probe restarts K launch ..` lets the launcher restart all ranks after a death.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use dflash_dist::{
    Communicator, ConnectOptions, Error, LaunchConfig, Role, WorkerEnv, connect, launch,
};
use dflash_settings::Backend;
use tch::{Device, Kind, Tensor};

const USAGE: &str = "usage: dist-probe [nccl] check | bench | linger | stall RANK | sum | differ
       | lose RANK CODE|abort|kill | lose-first RANK CODE|abort|kill | refuse RANK | hopeless RANK
       | [restarts K] launch N TASK.. | [restarts K] node I OF HOST:PORT N TASK..";

/// Timeout for waiting on a peer in tests.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (backend, words) = match words.as_slice() {
        ["nccl", task @ ..] => (Backend::Nccl, task),
        words => (Backend::Auto, words),
    };
    let join = || join(backend, PATIENCE);
    let outcome = match words {
        ["check"] => join().and_then(|group| check(&*group)),
        ["bench"] => join().and_then(|group| bench(&*group)),
        ["linger"] => join().and_then(|group| linger(&*group)),
        ["sum"] => join().and_then(|group| sum_on(&*group)),
        ["differ"] => join().and_then(|group| differ(&*group)),
        ["lose", rank, how] => join().and_then(|group| lose(&*group, rank, how)),
        ["lose-first", rank, how] => join().and_then(|group| lose_first(&*group, rank, how)),
        ["refuse", rank] => join().and_then(|group| refuse(&*group, rank)),
        ["hopeless", rank] => join().and_then(|group| hopeless(&*group, rank)),
        ["stall", rank] => stall(rank, backend),
        ["restarts", restarts, words @ ..] => start(words, number(restarts)),
        words => start(words, 0),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(inner) = cause {
                eprintln!("  caused by: {inner}");
                cause = inner.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn join(backend: Backend, collective_timeout: Duration) -> Result<Box<dyn Communicator>, Error> {
    let options = ConnectOptions { backend, collective_timeout, ..ConnectOptions::cpu(PATIENCE) };
    connect(&place()?, &options)
}

fn place() -> Result<WorkerEnv, Error> {
    match Role::from_env(None, false)? {
        Role::Worker(env) => Ok(env),
        _ => Ok(WorkerEnv::alone()),
    }
}

fn config(nproc: &str, task: &[&str]) -> LaunchConfig {
    let program = std::env::current_exe().expect("this program's own path");
    let args = task.iter().map(OsString::from).collect();
    LaunchConfig::new(program, args, number(nproc))
}

fn on_node(config: LaunchConfig, node: &str, of: &str, endpoint: &str) -> LaunchConfig {
    let rdzv_endpoint = Some(endpoint.to_owned());
    LaunchConfig { node_rank: number(node), nnodes: number(of), rdzv_endpoint, ..config }
}

fn number(text: &str) -> usize {
    text.parse().expect(USAGE)
}

/// Starts workers with our own launcher.
fn start(words: &[&str], max_restarts: usize) -> Result<(), Error> {
    let config = match words {
        ["launch", nproc, task @ ..] => config(nproc, task),
        ["node", node, of, endpoint, nproc, task @ ..] => {
            on_node(config(nproc, task), node, of, endpoint)
        }
        _ => {
            eprintln!("{USAGE}");
            std::process::exit(2);
        }
    };
    launched(LaunchConfig { max_restarts, join_timeout: PATIENCE, ..config })
}

fn launched(config: LaunchConfig) -> Result<(), Error> {
    let finished = launch(&config, &AtomicBool::new(false))?;
    eprintln!("finished: {finished:?}");
    Ok(())
}

/// Compares every collective exactly with its expected result.
fn check(group: &dyn Communicator) -> Result<(), Error> {
    check_sums(group)?;
    check_copies(group)?;
    check_gathers(group)?;
    check_bytes(group)?;
    check_agreement(group)?;
    group.barrier()?;
    println!("rank {} of {}: all collectives agree", group.rank(), group.world_size());
    Ok(())
}

/// Rank r contributes r + 1, r + 2, .. in every type that can be summed; all represent small
/// integers exactly.
fn check_sums(group: &dyn Communicator) -> Result<(), Error> {
    let (rank, size) = (to_i64(group.rank()), to_i64(group.world_size()));
    let sum_of_ranks = size * (size - 1) / 2;
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Int64] {
        let own = Tensor::arange(5, (Kind::Int64, Device::Cpu)) + rank + 1;
        let mut sum = own.to_kind(kind);
        group.all_reduce_sum(&mut sum)?;
        assert_values(&sum, |index| size * (index + 1) + sum_of_ranks);
    }
    let tensors: Vec<Tensor> = (0..4).map(|step| filled(3, step + rank)).collect();
    let pending =
        tensors.iter().map(|tensor| group.start_all_reduce_sum(tensor)).collect::<Vec<_>>();
    for (step, (work, tensor)) in pending.into_iter().zip(&tensors).enumerate() {
        work?.wait()?;
        assert_values(tensor, |_| size * to_i64(step) + sum_of_ranks);
    }
    Ok(())
}

fn check_copies(group: &dyn Communicator) -> Result<(), Error> {
    for root in 0..group.world_size() {
        let mut tensor = filled(7, 100 + to_i64(group.rank()));
        group.broadcast(&mut tensor, root)?;
        assert_values(&tensor, |_| 100 + to_i64(root));
    }
    Ok(())
}

fn check_gathers(group: &dyn Communicator) -> Result<(), Error> {
    let (rank, size) = (to_i64(group.rank()), to_i64(group.world_size()));
    let mut all = filled(3 * size, 0);
    group.all_gather(&mut all, &filled(3, rank))?;
    assert_values(&all, |index| index / 3);
    Ok(())
}

fn check_bytes(group: &dyn Communicator) -> Result<(), Error> {
    let of = |rank: usize| vec![u8::try_from(rank).expect("few ranks") + 7; rank * 3];
    let all = group.all_gather_bytes(&of(group.rank()))?;
    assert_eq!(all, (0..group.world_size()).map(of).collect::<Vec<_>>());
    Ok(())
}

/// Sums that round must have the same bytes on every rank, or ranks drift apart.
fn check_agreement(group: &dyn Communicator) -> Result<(), Error> {
    tch::manual_seed(to_i64(group.rank()));
    let mut tensor = Tensor::randn([100_003], (Kind::Float, Device::Cpu));
    group.all_reduce_sum(&mut tensor)?;
    let values = Vec::<f32>::try_from(&tensor).expect("a vector of f32");
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let all = group.all_gather_bytes(&bytes)?;
    assert!(all.iter().all(|other| *other == bytes), "ranks hold different sums");
    Ok(())
}

/// Median time of an all-reduce of 4 MB in f32.
fn bench(group: &dyn Communicator) -> Result<(), Error> {
    let mut tensor = filled(1 << 20, 0);
    let mut times = Vec::new();
    for _ in 0..60 {
        group.barrier()?;
        let start = Instant::now();
        group.all_reduce_sum(&mut tensor)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    if group.rank() == 0 {
        println!("all-reduce of 4 MB: {:.2} ms", times[times.len() / 2]);
    }
    Ok(())
}

/// Writes the process ids of all ranks, then waits to be killed.
fn linger(group: &dyn Communicator) -> Result<(), Error> {
    let ids = group.all_gather_bytes(std::process::id().to_string().as_bytes())?;
    if group.rank() == 0 {
        let ids: Vec<_> = ids.iter().map(|id| String::from_utf8_lossy(id)).collect();
        println!("pids {}", ids.join(" "));
    }
    linger_alone()
}

/// One rank skips a collective, behind which a second one waits.
fn stall(rank: &str, backend: Backend) -> Result<(), Error> {
    let group = join(backend, Duration::from_secs(1))?;
    if group.rank() == number(rank) {
        linger_alone()
    }
    let (first, second) = (filled(8, 1), filled(8, 1));
    let pending = [group.start_all_reduce_sum(&first)?, group.start_all_reduce_sum(&second)?];
    pending.into_iter().try_for_each(|work| work.wait())
}

/// Sums until something goes wrong.
fn sum_on(group: &dyn Communicator) -> Result<(), Error> {
    let mut tensor = filled(8, 1);
    loop {
        group.all_reduce_sum(&mut tensor)?;
        group.check()?;
    }
}

/// Ranks that call different collectives.
fn differ(group: &dyn Communicator) -> Result<(), Error> {
    group.all_reduce_sum(&mut filled(8 + to_i64(group.rank()), 1))
}

/// One rank fails in a way that a restart cannot fix, and announces that.
fn hopeless(group: &dyn Communicator, rank: &str) -> Result<(), Error> {
    group.announce_work();
    if group.rank() == number(rank) {
        group.announce_permanent_failure();
        return refuse(group, rank);
    }
    group.barrier()
}

/// Waits to be killed.
fn linger_alone() -> ! {
    loop {
        std::thread::sleep(PATIENCE);
    }
}

/// One rank exits as `how` says while the others wait for it.
fn lose(group: &dyn Communicator, rank: &str, how: &str) -> Result<(), Error> {
    group.barrier()?;
    let mut tensor = filled(8, 1);
    while group.rank() != number(rank) {
        group.all_reduce_sum(&mut tensor)?;
    }
    eprintln!("about to end");
    match how {
        "abort" => std::process::abort(),
        "kill" => kill_self(),
        code => std::process::exit(code.parse().expect(USAGE)),
    }
}

/// The first attempt loses a rank; a later one checks the collectives.
fn lose_first(group: &dyn Communicator, rank: &str, how: &str) -> Result<(), Error> {
    let env = place()?;
    group.announce_work();
    if env.restart_count == 0 { lose(group, rank, how) } else { check(group) }
}

/// One rank rejects its settings.
fn refuse(group: &dyn Communicator, rank: &str) -> Result<(), Error> {
    if group.rank() == number(rank) {
        let (flag, value) = ("--setting", "wrong".to_owned());
        return Err(Error::BadLaunch { flag, value, expected: "right".to_owned() });
    }
    group.barrier()
}

fn kill_self() -> ! {
    let own_id = std::process::id().to_string();
    let _ = std::process::Command::new("kill").args(["-9", &own_id]).status();
    linger_alone()
}

fn filled(length: i64, value: i64) -> Tensor {
    Tensor::full([length], value, (Kind::Float, Device::Cpu))
}

fn assert_values(tensor: &Tensor, expected: impl Fn(i64) -> i64) {
    let values = Vec::<f64>::try_from(tensor.to_kind(Kind::Double)).expect("a vector");
    for (index, value) in values.iter().enumerate() {
        let expected = expected(to_i64(index));
        assert!(*value == expected as f64, "{:?}[{index}]: {value}, not {expected}", tensor.kind());
    }
}

fn to_i64(number: usize) -> i64 {
    i64::try_from(number).expect("small numbers")
}
