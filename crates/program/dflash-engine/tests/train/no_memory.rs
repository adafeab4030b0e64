//! Runs out of memory: whose fault it is, what they report and leave behind.
//!
//! Limits apply to address space and are derived from measurements of the test's own processes.
//! Other load on the machine must not affect them: sizes are measured over the process's own CPU
//! time, the allocator has one arena, because contending threads would create others of 64 MiB
//! each, and stored states are read one at a time.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::running::Running;
use crate::world::{Run, World, losses, sorted_checkpoints};

/// Rows with more than a hundred MB of logits, if taken at once.
const HUNGRY: [&str; 12] = [
    "--total-seq-len",
    "128",
    "--anchors-per-sequence",
    "16",
    "--block-size",
    "8",
    "--epochs",
    "12",
    "--loss-chunk-mib",
    "512",
    // Each pending read has a thread, and each thread a stack.
    "--max-in-flight",
    "1",
];

/// Memory allowed beyond the minimum: less than the logits of a row.
const SPARE: u64 = 48 << 20;

/// CPU time after which the minimum size is known, and the time limit for that.
const WATCHED: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// A size of the process by its kernel `name`, bytes; `None` once it has ended.
fn size(process: u32, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// CPU time of the process.
fn worked(process: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The name, which may contain anything, is in parentheses; the times are the 12th and 13th
    // fields after it, in hundredths of a second.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks = [11, 12].map(|field| fields[field].parse::<u64>().unwrap());
    Duration::from_millis(10 * (ticks[0] + ticks[1]))
}

/// Minimum address space of the process within a second of its CPU time, bytes.
fn least_size(process: u32) -> u64 {
    let (begun, before, mut least) = (Instant::now(), worked(process), u64::MAX);
    while worked(process) < before + WATCHED.0 && begun.elapsed() < WATCHED.1 {
        least = least.min(size(process, "VmSize").unwrap());
        std::thread::sleep(Duration::from_millis(1));
    }
    least
}

/// `command` with an allocator whose size depends only on the requests.
fn steady(mut command: Command) -> Command {
    command.env("MALLOC_ARENA_MAX", "1");
    command
}

/// Maximum address space of a run, bytes.
fn most_size(command: Command) -> u64 {
    let mut run = Running::start(&mut steady(command));
    let mut most = 0;
    while !run.has_ended() {
        most = size(run.id(), "VmPeak").unwrap_or(0).max(most);
        std::thread::sleep(Duration::from_millis(1));
    }
    let run = run.end();
    assert!(run.success(), "{}", run.stderr);
    most
}

/// Limits the process to its minimum plus [`SPARE`]; returns the limit.
pub(crate) fn starve(process: u32) -> u64 {
    let limit = least_size(process) + SPARE;
    let pid = Pid::from_raw(process.try_into().unwrap());
    prlimit(pid, Resource::As, Rlimit { current: Some(limit), maximum: None }).unwrap();
    limit
}

/// The step in which a run reports having run out of memory.
fn check_ended(run: &Run, rank: usize) -> u64 {
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let begins = format!("error: rank {rank} ran out of memory in step ");
    let said = run.stderr.split_once(&begins).unwrap_or_else(|| panic!("{}", run.stderr)).1;
    let line = said.lines().next().unwrap();
    for words in [
        "can't allocate memory: you tried to allocate ",
        "; lower --max-anchors (now 512), --total-seq-len (now 128), --loss-chunk-mib (now 512) or \
         --num-layers (now 2), or pass --recompute; `dflash plan` with the same flags",
    ] {
        assert!(line.contains(words), "{words:?} is not in {line}");
    }
    for words in ["internal error", "bug", "restart 1 of"] {
        assert!(!run.stderr.contains(words), "{}", run.stderr);
    }
    line.split(':').next().unwrap().parse().unwrap()
}

#[test]
fn a_run_without_memory_says_what_to_lower_and_goes_on_with_that() {
    let world = World::of_many_tokens();
    let mut run = Running::start(&mut steady(world.command("out", &HUNGRY)));
    run.await_step(&world.path("out"), 2);
    let hungry = size(run.id(), "VmPeak").unwrap();
    starve(run.id());
    let step = check_ended(&run.end(), 0);
    // The step is void, and earlier training is saved.
    assert_eq!(
        sorted_checkpoints(&world.path("out")).pop().unwrap(),
        format!("step-{:06}", step - 1)
    );
    let mut less = HUNGRY;
    less[9] = "8";
    let more = [&less[..], &["--resume"]].concat();
    let copied =
        Command::new("cp").arg("-r").args([world.path("out"), world.path("copy")]).status();
    assert!(copied.unwrap().success());
    // Between what the run needs and what all rows needed at once: fragmentation differs between
    // runs by some dozens of MiB, depending on when rows arrive.
    let enough = most_size(world.command("copy", &more));
    assert!(enough + SPARE < hungry, "{enough} and {hungry}");
    let limit = enough.midpoint(hungry);
    println!("{} MiB, {} at once", enough >> 20, hungry >> 20);
    let command = world.command("out", &more);
    let mut limited = Command::new("prlimit");
    limited.arg(format!("--as={limit}")).arg(command.get_program()).args(command.get_args());
    let resumed = Run::of(steady(limited).env("OMP_NUM_THREADS", "1"));
    assert!(resumed.success(), "{}", resumed.stderr);
}

#[test]
fn a_rank_without_memory_ends_all_without_a_restart_and_nothing_is_lost() {
    let world = World::of_many_tokens();
    let ranks = [&HUNGRY[..], &["--nproc", "2", "--max-restarts", "2"]].concat();
    let mut run = Running::start(&mut steady(world.command("out", &ranks)));
    run.await_step(&world.path("out"), 2);
    starve(run.ranks()[1]);
    let run = run.end();
    let step = check_ended(&run, 1);
    let told =
        "error: another rank failed, and the run ends with it: rank 1 ran out of memory in step";
    assert!(run.stderr.contains(told), "{}", run.stderr);
    assert!(run.stderr.contains("error: rank 1 (node 0, "), "{}", run.stderr);
    assert_eq!(
        sorted_checkpoints(&world.path("out")).pop().unwrap(),
        format!("step-{:06}", step - 1)
    );
    let resumed = world.train("out", &[&ranks[..], &["--resume"]].concat());
    assert!(resumed.success(), "{}", resumed.stderr);
    let whole = world.train("whole", &ranks);
    assert!(whole.success(), "{}", whole.stderr);
    assert_eq!(losses(&world.path("out")), losses(&world.path("whole")));
    let last = sorted_checkpoints(&world.path("whole")).pop().unwrap();
    assert_eq!(world.state("out", &last), world.state("whole", &last));
}

#[test]
fn any_command_without_memory_ends_as_one_that_was_asked_for_too_much() {
    let world = World::large();
    let target = world.path("target").to_string_lossy().into_owned();
    let bench = |shape: [&str; 4], steps: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        command.args([
            "bench",
            "train-step",
            "--target",
            &target,
            "--device",
            "cpu",
            "--docs",
            "1",
        ]);
        command.args(["--layers", "1", "--aux-layers", "2", "--block", "16", "--steps", steps]);
        command.args(shape).env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
        command
    };
    let mut small =
        Running::start(&mut steady(bench(["--tokens", "64", "--anchors", "2"], "100000")));
    // It has finished loading, however slow the machine.
    while worked(small.id()) < Duration::from_secs(2) {
        assert!(!small.has_ended(), "{}", small.said());
        std::thread::sleep(Duration::from_millis(10));
    }
    let limit = least_size(small.id()) + SPARE;
    assert!(!small.has_ended(), "{}", small.said());
    drop(small);
    let large = bench(["--tokens", "16384", "--anchors", "2048"], "1");
    let mut limited = Command::new("prlimit");
    limited.arg(format!("--as={limit}")).arg(large.get_program()).args(large.get_args());
    let run = Run::of(steady(limited).env("OMP_NUM_THREADS", "1"));
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let told = "error: there is not enough memory: [enforce fail at alloc_cpu.cpp";
    assert!(run.stderr.contains(told), "{}", run.stderr);
    assert!(!run.stderr.contains("bug"), "{}", run.stderr);
}
