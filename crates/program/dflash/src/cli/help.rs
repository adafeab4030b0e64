//! How help looks: `-h` shows the dozen flags of a command that people set, `--help` all of them under
//! headings, and both fit a terminal of 80 columns.

use clap::Command;

use super::RUN_FILE;
use crate::name;

/// Columns of a terminal that nobody has widened.
const COLUMNS: usize = 80;

/// What people set, by command: `-h` shows these alone. The rest is for `--help`, and what is seldom changed
/// is hidden where it is defined: those are keys of run files and of `--set`.
const SET_FIRST: [(&str, &[&str]); 11] = [
    (
        "prepare",
        &[
            "target",
            "data",
            "output",
            "seq_length",
            "limit",
            "shuffle_seed",
            "workers",
            "overwrite",
            "skip_bad_rows",
        ],
    ),
    (
        "hidden-server",
        &[
            "target",
            "target_layer_ids",
            "host",
            "port",
            "device",
            "dtype",
            "max_batch_tokens",
            "max_model_len",
            "pipeline",
            "tensor_parallel_size",
        ],
    ),
    (
        "train",
        &[
            "target",
            "data_path",
            "save_path",
            "resume",
            "vllm_endpoint",
            "colocate",
            "epochs",
            "total_seq_len",
            "max_anchors",
            "num_layers",
            "lr",
            "nproc",
        ],
    ),
    (
        "plan",
        &[
            "target",
            "data_path",
            "rows",
            "mean_length",
            "suggest",
            "nproc",
            "device",
            "colocate",
            "epochs",
            "total_seq_len",
            "max_anchors",
            "num_layers",
        ],
    ),
    (
        "eval",
        &[
            "target",
            "draft",
            "prompts",
            "max_new_tokens",
            "limit",
            "temperature",
            "thinking",
            "concurrency",
            "output",
            "endpoint",
            "device",
        ],
    ),
    ("export", &["draft", "target", "format", "dtype", "output"]),
    (
        "push",
        &[
            "draft",
            "repo",
            "private",
            "dry_run",
            "gguf",
            "evaluation",
            "base_model",
            "license",
            "message",
            "token_file",
        ],
    ),
    (
        "regenerate",
        &[
            "target",
            "draft",
            "data",
            "output",
            "max_new_tokens",
            "limit",
            "batch",
            "overwrite",
            "device",
            "dtype",
        ],
    ),
    (
        "generate",
        &[
            "prompt",
            "target",
            "draft",
            "prompt_file",
            "system",
            "max_new_tokens",
            "temperature",
            "seed",
            "show_blocks",
            "device",
            "dtype",
        ],
    ),
    (
        "serve",
        &[
            "target",
            "draft",
            "host",
            "port",
            "api_key",
            "served_model_name",
            "max_model_len",
            "max_num_seqs",
            "device",
            "dtype",
        ],
    ),
    (
        "train-step",
        &[
            "target", "tokens", "anchors", "docs", "block", "layers", "steps", "device",
            "products", "json",
        ],
    ),
];

/// Headings of flags in `--help`, for commands whose settings do not come in parts.
const HEADINGS: [(&str, &str, &[&str]); 20] = [
    ("prepare", "Rows", &["seq_length", "limit", "shuffle_seed", "minimum_valid_tokens"]),
    ("prepare", "Chat template", &["chat_template_kwargs"]),
    ("prepare", "Work", &["workers", "shard_mb", "overwrite", "skip_bad_rows"]),
    ("hidden-server", "Address", &["host", "port", "port_file"]),
    ("hidden-server", "Device", &["device", "dtype", "cpu_level", "threads"]),
    (
        "hidden-server",
        "Limits",
        &["max_queue", "max_wait", "client_timeout", "max_batch_tokens", "max_model_len"],
    ),
    ("hidden-server", "Several GPUs", &["pipeline", "tensor_parallel_size"]),
    ("eval", "Questions", &["prompts", "limit", "first_turn", "thinking"]),
    (
        "eval",
        "Decoding",
        &[
            "max_new_tokens",
            "temperature",
            "concurrency",
            "seed",
            "speculate",
            "ngram_size",
            "ngram_tokens",
        ],
    ),
    ("eval", "Report", &["no_record", "json", "csv", "markdown", "html", "output", "baseline"]),
    (
        "eval",
        "A running server",
        &["endpoint", "plain_endpoint", "endpoint_model", "request_timeout"],
    ),
    ("eval", "Device", &["device", "dtype", "cpu_level", "tie_tolerance"]),
    (
        "push",
        "Model card",
        &[
            "base_model",
            "license",
            "language",
            "dataset",
            "evaluation",
            "results",
            "allow_unevaluated",
        ],
    ),
    (
        "push",
        "Repository",
        &["private", "collection", "revision", "create_pr", "message", "token_file"],
    ),
    ("regenerate", "Decoding", &["max_new_tokens", "batch", "speculate", "allow_other_target"]),
    ("regenerate", "Device", &["device", "dtype", "cpu_level"]),
    (
        "generate",
        "Decoding",
        &[
            "max_new_tokens",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "stop",
            "speculate",
            "allow_other_target",
        ],
    ),
    ("generate", "Device", &["device", "dtype", "cpu_level"]),
    (
        "serve",
        "Address and access",
        &["served_model_name", "host", "port", "port_file", "api_key", "allowed_origins"],
    ),
    (
        "serve",
        "Limits",
        &[
            "max_model_len",
            "max_num_seqs",
            "max_prefill_tokens",
            "prefix_cache_mib",
            "max_queue",
            "max_wait",
            "client_timeout",
            "drain_timeout",
            "max_body_mib",
            "threads",
        ],
    ),
];

/// Usage lines that clap would make longer than a terminal is wide.
const USAGES: [(&str, &str); 5] = [
    ("decode", "--target <DIR|REPO> --draft <DIR|REPO>\n       --prompts <FILE>"),
    ("hidden-server", "--target <DIR|REPO> [RUN_FILE]\n       [-- <VLLM_FLAGS>...]"),
    ("export", "--draft <DIR|FILE|REPO>\n       --target <DIR|REPO> --output <PATH> [RUN_FILE]"),
    (
        "regenerate",
        "--target <DIR|REPO>\n       --data <FILE|PRESET>... --output <FILE> [RUN_FILE]",
    ),
    ("train", "--target <DIR|REPO> --save-path <DIR>\n       [RUN_FILE]"),
];

/// The whole definition as help shows it.
pub(super) fn arranged(all: Command) -> Command {
    let program = name::invoked();
    let all = all.max_term_width(COLUMNS).bin_name(program);
    let all = with_name(all, program);
    all.mut_subcommands(|command| arranged_command(command, program, program))
}

/// `program` is the name that the program was called by, `before` what stands before the command's own.
fn arranged_command(command: Command, program: &str, before: &str) -> Command {
    let name = command.get_name().to_owned();
    let whole = format!("{before} {name}");
    let command = with_headings(with_name(command, program), &name);
    let command = match USAGES.iter().find(|(known, _)| *known == name) {
        Some((_, usage)) => command.override_usage(format!("{whole} [OPTIONS] {usage}")),
        None => command,
    };
    let command = with_short_help(command, &name);
    command.mut_subcommands(|inner| arranged_command(inner, program, &whole))
}

/// Examples with the name that the program was called by.
fn with_name(command: Command, program: &str) -> Command {
    let examples = command.get_after_help().map(ToString::to_string);
    match examples.filter(|_| program != name::SHORT) {
        Some(text) => command.after_help(text.replace("dflash ", &format!("{program} "))),
        None => command,
    }
}

fn with_headings(command: Command, name: &str) -> Command {
    let headings = HEADINGS.iter().filter(|(known, ..)| *known == name);
    headings.fold(command, |command, (_, heading, ids)| {
        command.mut_args(|arg| match ids.contains(&arg.get_id().as_str()) {
            true => arg.help_heading(*heading),
            false => arg,
        })
    })
}

/// Leaves to `-h` what people set first.
fn with_short_help(command: Command, name: &str) -> Command {
    let Some((_, first)) = SET_FIRST.iter().find(|(known, _)| *known == name) else {
        return command;
    };
    command.mut_args(|arg| {
        let id = arg.get_id().as_str();
        let is_first = first.contains(&id) || id == RUN_FILE;
        arg.hide_short_help(!is_first)
    })
}

#[cfg(test)]
mod tests {
    use super::super::definition;
    use super::*;

    /// Flags of a command that `-h` shows at most: twelve, `-h` and `-V`.
    const MOST_FLAGS: usize = 14;

    fn each(command: &Command, check: &mut impl FnMut(&Command)) {
        check(command);
        command.get_subcommands().for_each(|inner| each(inner, check));
    }

    fn built() -> Command {
        let mut all = definition();
        all.build();
        all
    }

    #[test]
    fn help_fits_a_terminal_and_the_short_one_is_short() {
        each(&built(), &mut |command| {
            let mut command = command.clone();
            let short = command.render_help().to_string();
            let long = command.render_long_help().to_string();
            for text in [&short, &long] {
                let wide = text.lines().find(|line| line.chars().count() > COLUMNS);
                assert_eq!(wide, None, "{}", command.get_name());
            }
            // Deeper lines go on with a text.
            let is_flag = |line: &&str| line.starts_with("  -") || line.starts_with("      --");
            let flags = short.lines().filter(is_flag).count();
            assert!(flags <= MOST_FLAGS, "{}: {flags} flags\n{short}", command.get_name());
        });
    }

    #[test]
    fn what_the_tables_name_is_there() {
        let all = built();
        let mut commands = Vec::new();
        each(&all, &mut |command| commands.push(command.clone()));
        let has = |name: &str, id: &str| {
            let command = commands.iter().find(|command| command.get_name() == name).unwrap();
            assert!(command.get_arguments().any(|arg| arg.get_id() == id), "{name} has no {id}");
        };
        for (name, ids) in SET_FIRST {
            ids.iter().for_each(|id| has(name, id));
        }
        for (name, _, ids) in HEADINGS {
            ids.iter().for_each(|id| has(name, id));
        }
    }

    /// What clap asks for is in the usage that stands in the place of its own.
    #[test]
    fn usages_name_what_is_required() {
        let mut commands = Vec::new();
        each(&built(), &mut |command| commands.push(command.clone()));
        for (name, usage) in USAGES {
            let command = commands.iter().find(|command| command.get_name() == name).unwrap();
            let required = command.get_arguments().filter(|arg| arg.is_required_set());
            for arg in required {
                let long = format!("--{}", arg.get_long().unwrap());
                assert!(usage.contains(&long), "{name}: {long}");
            }
        }
    }
}
