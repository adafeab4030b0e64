//! Every numeric flag of every command with 0, negative and absurd values: an error names the flag,
//! and nothing panics or starts working. The flags come from the definitions, so new ones are
//! covered.

use std::any::TypeId;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{Arg, ArgAction};
use dflash::cli::definition;
use dflash_settings::Warmup;

/// Timeout of one process on a busy machine. Refusals take milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// A path that does not exist and cannot be created.
const NOWHERE: &str = "/proc/none/x";

const MAY_BE_ZERO: [&str; 23] = [
    "contexts",
    "decay-ratio",
    "dpace-alpha",
    "drain-timeout",
    "mask-token-id",
    "keep-last",
    "max-restarts",
    "max-wait",
    "min-lr-ratio",
    "node-rank",
    "norm-weight-decay",
    "port",
    "prefix-cache-mib",
    "seed",
    "shuffle-seed",
    "target-layer-ids",
    "temperature",
    "tie-tolerance",
    "validation-ratio",
    "wait-for-server",
    "warmup",
    "weight-decay",
    "zero",
];

/// Flags that may be any whole number.
const MAY_BE_ANYTHING: [&str; 2] = ["seed", "shuffle-seed"];

const WHOLE: [&str; 5] = ["0", "-1", "18446744073709551615", "99999999999999999999999", "nan"];
const REAL: [&str; 6] = ["0", "-1", "1e308", "inf", "-inf", "nan"];

fn is_any(arg: &Arg, types: &[TypeId]) -> bool {
    let own = arg.get_value_parser().type_id();
    arg.get_action().takes_values() && types.iter().any(|known| own == *known)
}

/// The values to try if the flag takes a number.
fn values(arg: &Arg) -> &'static [&'static str] {
    let whole = [
        TypeId::of::<usize>(),
        TypeId::of::<u64>(),
        TypeId::of::<u32>(),
        TypeId::of::<u16>(),
        TypeId::of::<u8>(),
        TypeId::of::<i64>(),
    ];
    match arg {
        _ if matches!(arg.get_action(), ArgAction::Count) => &[],
        _ if is_any(arg, &whole) => &WHOLE,
        _ if is_any(arg, &[TypeId::of::<f64>(), TypeId::of::<Warmup>()]) => &REAL,
        _ => &[],
    }
}

fn may_be_taken(flag: &str, value: &str) -> bool {
    match value {
        "0" => MAY_BE_ZERO.contains(&flag),
        "18446744073709551615" => MAY_BE_ANYTHING.contains(&flag),
        _ => false,
    }
}

/// A command's words, with its required arguments.
fn line(words: &[String], command: &clap::Command, flag: &str) -> Vec<String> {
    let required = command.get_arguments().filter(|arg| {
        let needed =
            arg.is_required_set() || ["target", "data_path"].contains(&arg.get_id().as_str());
        needed && arg.get_long() != Some(flag)
    });
    let given = required.map(|arg| match arg.get_long() {
        Some(long) => format!("--{long}={NOWHERE}"),
        None => NOWHERE.to_owned(),
    });
    words.iter().cloned().chain(given).collect()
}

fn try_all(words: &[String], command: &clap::Command, tried: &mut usize) {
    let passes_over = words[0] == "plan";
    for arg in command.get_arguments() {
        let Some(flag) = arg.get_long() else { continue };
        for value in values(arg) {
            let mut line = line(words, command, flag);
            line.push(format!("--{flag}={value}"));
            // `plan` ignores flags that only affect training.
            check(&line, flag, passes_over && arg.is_hide_set() || may_be_taken(flag, value));
            *tried += 1;
        }
    }
    for inner in command.get_subcommands() {
        try_all(&[words, &[inner.get_name().to_owned()]].concat(), inner, tried);
    }
}

fn check(line: &[String], flag: &str, may_be_taken: bool) {
    let home = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_dflash"))
        .args(line)
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HOME", home.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let code = output.status.code();
    assert!(matches!(code, Some(1 | 2)), "{line:?} ended with {code:?}: {said}");
    assert!(begun.elapsed() < PATIENCE, "{line:?} took {:?}", begun.elapsed());
    assert!(!said.contains("internal error"), "{line:?}: {said}");
    assert!(
        said.contains(&format!("--{flag}")) || may_be_taken,
        "{line:?} does not name the flag: {said}"
    );
}

#[test]
fn numbers_beyond_reason_are_refused_with_the_flag_s_name() {
    let mut tried = 0;
    for command in definition().get_subcommands() {
        try_all(&[command.get_name().to_owned()], command, &mut tried);
    }
    assert!(tried > 300, "{tried}");
}
