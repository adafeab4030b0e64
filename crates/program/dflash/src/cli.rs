//! The command line of both programs. Commands take the structs of dflash-settings unchanged; the
//! arguments added here name other sources of settings.

mod help;

use clap::{Arg, ArgAction, Args, CommandFactory, Parser, Subcommand, value_parser};
use dflash_settings::{
    BenchSettings, CompletionsSettings, CpuLevel, DemoSettings, DemoTargetSettings, DoctorSettings,
    EvalSettings, ExportSettings, GenerateSettings, HiddenServerSettings, Invalid, ManSettings,
    PlanSettings, PrepareSettings, PushSettings, RecipesSettings, RegenerateSettings,
    ReportSettings, ServeSettings, TrainSettings,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

use crate::signals::OnSignal;

/// Train DFlash drafters: from conversations to a measured draft model.
#[derive(Debug, Clone, Parser, Serialize, Deserialize)]
#[command(
    name = "dflash",
    version,
    propagate_version = true,
    after_help = "The usual order: regenerate, prepare, hidden-server (left running), train, eval, serve.\n\
                  `dflash COMMAND --help` explains each flag."
)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Flags of every command.
    #[command(flatten)]
    pub global: GlobalArgs,
}

/// Flags that every command takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
pub struct GlobalArgs {
    /// Log more on stderr (twice: everything). DFLASH_LOG takes tracing's filter syntax instead.
    #[arg(short, long, action = ArgAction::Count, global = true, hide_short_help = true, conflicts_with = "quiet")]
    pub verbose: u8,
    /// Log errors only.
    #[arg(short, long, global = true, hide_short_help = true)]
    pub quiet: bool,
}

/// The commands.
#[derive(Debug, Clone, Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Turn conversations into a tokenized, masked dataset.
    Prepare(PrepareSettings),
    /// Run the target and serve hidden states of selected layers.
    #[command(
        after_help = "Example: dflash hidden-server Qwen3-8B --target-layer-ids 2 10 18 26 34\n\
                      Training then takes --vllm-endpoint http://localhost:8000/v1. Flags of \
                      vLLM may follow `--`."
    )]
    HiddenServer(HiddenServerSettings),
    /// Train a drafter on the hidden states of a server, of stored files or of the target itself.
    Train(Box<TrainSettings>),
    /// Predict a training run's memory, arithmetic, time and data rate.
    Plan(Box<PlanSettings>),
    /// Measure drafters: real speculative decoding against plain decoding.
    #[command(
        after_help = "Example: dflash eval --target Qwen3-8B --draft drafts/qwen3-8b --draft ngram \
                      --prompts all --output eval\n\
                      A running server: dflash eval --endpoint http://localhost:8000/v1 --prompts gsm8k"
    )]
    Eval(Box<EvalSettings>),
    /// Convert a drafter to the layout and type that an engine reads, and verify it.
    Export(ExportSettings),
    /// Show a training run as one page, or follow it in a browser: curves, settings, checkpoints.
    #[command(
        after_help = "Examples: dflash report drafts/qwen3-8b\n          dflash report drafts/qwen3-8b --follow"
    )]
    Report(ReportSettings),
    /// Publish a drafter on the Hugging Face Hub, with a model card.
    Push(Box<PushSettings>),
    /// Replace the answers of a dataset with the target's own.
    Regenerate(RegenerateSettings),
    /// Answer a prompt, or chat, in the terminal.
    #[command(after_help = "Example: dflash generate --target Qwen3-8B --draft drafts/qwen3-8b \
                      --show-blocks \"Why is the sky blue?\"")]
    Generate(GenerateSettings),
    /// Serve a target with its drafter behind OpenAI's HTTP interface.
    Serve(ServeSettings),
    /// Time a training step or decoding.
    Bench(BenchSettings),
    /// Run the whole pipeline on a synthetic corpus, without downloads.
    Demo(DemoSettings),
    /// Write the recipes, and a small sample of conversations, into a directory.
    Recipes(RecipesSettings),
    /// Make the demo's corpus and train its tiny target.
    DemoTarget(DemoTargetSettings),
    /// Check this machine: what is there, what is missing, how to get it.
    Doctor(DoctorSettings),
    /// Print the completions of a shell.
    Completions(CompletionsSettings),
    /// Write the man pages.
    Man(ManSettings),
    /// Print the instruction levels that this processor supports, each with the environment
    /// variables that limit libtorch and its libraries to it; for scripts.
    #[command(hide = true)]
    CpuLevels,
    /// Print what libtorch, CUDA and NCCL report about themselves, as JSON; for `dflash doctor`.
    #[command(hide = true)]
    EngineInfo,
}

impl Command {
    /// # Errors
    /// The first setting that is invalid for any target and data.
    pub fn check(&self) -> Result<(), Invalid> {
        match self {
            Self::Prepare(settings) => settings.check(),
            Self::HiddenServer(settings) => settings.check(),
            Self::Train(settings) => settings.check(),
            Self::Plan(settings) => settings.check(),
            Self::Eval(settings) => settings.check(),
            Self::Push(settings) => settings.check(),
            Self::Export(settings) => settings.check(),
            Self::Regenerate(settings) => settings.check(),
            Self::Generate(settings) => settings.check(),
            Self::Serve(settings) => settings.check(),
            Self::Bench(settings) => settings.check(),
            Self::DemoTarget(settings) => settings.check(),
            Self::Doctor(settings) => settings.check(),
            Self::Demo(settings) => settings.check(),
            Self::Report(settings) => settings.check(),
            Self::Recipes(_)
            | Self::Completions(_)
            | Self::Man(_)
            | Self::CpuLevels
            | Self::EngineInfo => Ok(()),
        }
    }

    /// The CPU instruction level that the settings request.
    pub fn cpu_level(&self) -> Option<CpuLevel> {
        let processor = match self {
            Self::HiddenServer(settings) => settings.processor,
            Self::Train(settings) => settings.processor,
            Self::Eval(settings) => settings.processor,
            Self::Regenerate(settings) => settings.processor,
            Self::Generate(settings) => settings.processor,
            Self::Serve(settings) => settings.processor,
            Self::Demo(settings) => settings.processor,
            Self::Bench(settings) => settings.processor(),
            _ => return None,
        };
        processor.cpu_level
    }

    /// How the command handles signals.
    pub fn on_signal(&self) -> OnSignal {
        match self {
            Self::HiddenServer(_) => OnSignal::Shutdown { drain: Duration::ZERO },
            Self::Report(settings) if settings.follow => {
                OnSignal::Shutdown { drain: Duration::ZERO }
            }
            Self::Serve(settings) => {
                OnSignal::Shutdown { drain: Duration::from_secs_f64(settings.drain_timeout) }
            }
            Self::Train(settings) => {
                let sigterm_is_success = settings.checkpoints.sigterm_is_success;
                OnSignal::Save { sigterm_is_success }
            }
            _ => OnSignal::Interrupt,
        }
    }
}

/// The commands that read run files, and their tables; a plan is made for a run's settings.
pub(crate) const TABLES: [(&str, &str); 8] = [
    ("prepare", "prepare"),
    ("regenerate", "regenerate"),
    ("hidden-server", "hidden_server"),
    ("train", "train"),
    ("plan", "train"),
    ("eval", "eval"),
    ("serve", "serve"),
    ("export", "export"),
];

/// The table of a command, if it reads run files.
pub(crate) fn table_of(command: &str) -> Option<&'static str> {
    TABLES.into_iter().find(|(name, _)| *name == command).map(|(_, table)| table)
}

/// Arguments that name other sources of settings.
pub(crate) const RUN_FILE: &str = "run_file";
pub(crate) const SET: &str = "set";
pub(crate) const DUMP_CONFIG: &str = "dump_config";
pub(crate) const VLLM_FLAGS: &str = "vllm_flags";

/// The whole command line, run files included.
pub fn definition() -> clap::Command {
    let all = Cli::command();
    let passed_over = only_for_training(&all);
    let all = all.mut_subcommands(|command| {
        let command = as_typed(command);
        let plans = command.get_name() == "plan";
        let command = if plans { command.args(passed_over.clone()) } else { command };
        let Some(table) = table_of(command.get_name()) else { return command };
        let command = command.args(run_file_arguments(table));
        if table == "hidden_server" { command.args(server_arguments()) } else { command }
    });
    help::arranged(all)
}

/// The flags of `train` that do not affect a plan. `plan` accepts and ignores them, so that it can
/// replace `train` in any command line.
fn only_for_training(all: &clap::Command) -> Vec<Arg> {
    let arguments = |name| all.find_subcommand(name).into_iter().flat_map(|c| c.get_arguments());
    let own: Vec<_> = arguments("plan").map(Arg::get_id).collect();
    let others = arguments("train").filter(|arg| !own.contains(&arg.get_id()));
    others.map(|arg| arg.clone().required(false).hide(true)).collect()
}

/// If a flag is repeated the last one counts, unless it collects its values. Accepts what looks
/// like a negative number as a flag's value, so that the error can name the valid range.
fn as_typed(command: clap::Command) -> clap::Command {
    command.args_override_self(true).allow_negative_numbers(true).mut_subcommands(as_typed)
}

fn run_file_arguments(table: &str) -> [Arg; 3] {
    let arguments = [
        Arg::new(RUN_FILE).value_name("RUN_FILE").value_parser(value_parser!(PathBuf)).help(format!(
            "Run file: TOML whose table `{table}` has the flags below as keys. Flags win over it, \
             and required flags may come from it"
        )),
        Arg::new(SET).long("set").value_name("KEY=VALUE").action(ArgAction::Append).help(format!(
            "Set one key, such as {table}.KEY=VALUE, over the run file and the environment. \
             Repeatable"
        )),
        Arg::new(DUMP_CONFIG)
            .long("dump-config")
            .action(ArgAction::SetTrue)
            .help("Print all settings as a run file and exit"),
    ];
    // Otherwise they would appear under the last setting's heading.
    arguments.map(|arg| arg.help_heading(None::<&str>))
}

/// The server's target may replace a run file without a flag, and vLLM's flags may follow.
fn server_arguments() -> [Arg; 1] {
    [Arg::new(VLLM_FLAGS)
        .value_name("VLLM_FLAGS")
        .action(ArgAction::Append)
        .last(true)
        .allow_hyphen_values(true)
        .help("Flags of `vllm serve`, for command lines written for it")]
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;
    use dflash_settings::ResumeMode;

    use super::*;
    use crate::command_line;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_definition_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn every_flag_has_a_help_text() {
        for command in definition().get_subcommands() {
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{} {}", command.get_name(), arg.get_id());
            }
        }
    }

    #[test]
    fn a_server_ends_by_signals_and_a_training_saves() {
        let check = |line, expected| {
            assert_eq!(parse(line).unwrap().command.on_signal(), expected, "{line}");
        };
        check("dflash prepare --target m --data d --output o", OnSignal::Interrupt);
        check(
            "dflash hidden-server --target m --target-layer-ids 1 2",
            OnSignal::Shutdown { drain: Duration::ZERO },
        );
        let drain = Duration::from_secs(9);
        check("dflash serve --target m --drain-timeout 9", OnSignal::Shutdown { drain });
        let train = "dflash train --target t --data-path d --save-path s";
        check(train, OnSignal::Save { sigterm_is_success: false });
        let succeeds = format!("{train} --sigterm-is-success");
        check(&succeeds, OnSignal::Save { sigterm_is_success: true });
    }

    #[test]
    fn global_flags_may_follow_the_command() {
        let cli = parse("dflash prepare --data d --output o -vv").unwrap();
        assert_eq!(cli.global, GlobalArgs { verbose: 2, quiet: false });
        assert!(parse("dflash prepare --data d --output o -v -q").is_err());
    }

    #[test]
    fn of_a_repeated_flag_the_last_counts() {
        let line = ["dflash", "train", "--target", "t", "--data_path=a_b", "--save-path", "s"];
        let more = ["--lr", "0.1", "--lr", "0.2", "--target-layer-ids", "1", "2", "--loss", "kl"];
        let last = ["--data-path", "c", "--target-layer-ids", "3,4", "--loss=ce,tv", "--resume"];
        let args = [&line[..], &more, &last, &["--resume"]].concat();
        let (line, _) = command_line::parse(args.into_iter().map(Into::into).collect()).unwrap();
        let Command::Train(settings) = line.cli.command else { panic!("not a training") };
        assert_eq!((settings.optimizer.lr, settings.resume), (0.2, Some(ResumeMode::Latest)));
        assert_eq!(settings.data_path, Some(PathBuf::from("c")));
        assert_eq!(settings.draft.target_layer_ids, Some(vec![3, 4]));
        let loss: Vec<String> = settings.objective.loss.iter().map(ToString::to_string).collect();
        assert_eq!(loss, ["ce", "tv"]);
    }

    /// A value that the flag takes; `None` for a switch.
    fn some_value(arg: &Arg) -> Option<String> {
        if !arg.get_action().takes_values() {
            return None;
        }
        if let Some(choice) = arg.get_possible_values().first() {
            return Some(choice.get_name().to_owned());
        }
        let default = arg.get_default_values().first().map(|value| value.to_string_lossy().into());
        let tries = ["1", "2", "0.5", "http://h:1", "x"].map(str::to_owned);
        default.into_iter().chain(tries).find(|value| {
            let long = arg.get_long().unwrap();
            let line = ["dflash", "train", "--target=t", "--data-path=d", "--save-path=s"];
            let line = line.map(str::to_owned).into_iter().chain([format!("--{long}={value}")]);
            definition().try_get_matches_from(line).is_ok()
        })
    }

    #[test]
    fn a_plan_takes_every_flag_of_a_training() {
        let mut all = definition();
        all.build();
        let train = all.find_subcommand("train").unwrap();
        let mut passed_over = 0;
        for arg in
            train.get_arguments().filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version"))
        {
            let Some(long) = arg.get_long() else { continue };
            let names = arg.get_all_aliases().unwrap_or_default().into_iter().chain([long]);
            for name in names {
                let given = match some_value(arg) {
                    Some(value) => format!("--{name}={value}"),
                    None => format!("--{name}"),
                };
                let line =
                    ["dflash", "plan", "--target=t", "--data-path=d", "--save-path=s", &given];
                let matches = definition().try_get_matches_from(line);
                let matches = matches.unwrap_or_else(|error| panic!("{given}: {error}"));
                let cli = Cli::from_arg_matches(&matches).unwrap();
                assert!(matches!(cli.command, Command::Plan(_)));
            }
            let plan = definition();
            let plan = plan.find_subcommand("plan").unwrap();
            passed_over += usize::from(
                plan.get_arguments().any(|own| own.get_id() == arg.get_id() && own.is_hide_set()),
            );
        }
        assert!(passed_over > 5, "{passed_over}");
    }

    #[test]
    fn sources_and_aliases_parse() {
        let line = "dflash prepare --data a b --data c --num-proc 3 --max-samples 7 --model m";
        let Command::Prepare(settings) = parse(line).unwrap().command else { panic!("{line}") };
        assert_eq!(settings.data, ["a", "b", "c"]);
        assert_eq!((settings.workers, settings.limit), (Some(3), Some(7)));
        assert_eq!(settings.target(), "m");
        let error = parse("dflash prepare --data a --chat-template-kwargs [1]").unwrap_err();
        assert!(error.to_string().contains("not a JSON object"), "{error}");
        assert!(parse("dflash prepare").unwrap_err().to_string().contains("--data"));
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let check = |more: &str, expect: Option<&str>| {
            let line = format!("dflash eval --target t --draft d --prompts p {more}");
            let refused = parse(&line).unwrap().command.check().err();
            assert_eq!(refused.map(|invalid| invalid.to_string()).as_deref(), expect);
        };
        check("--temperature 0.7", None);
        let range = "it must be at least 1 and at most 1000000000000";
        check("--limit 0", Some(&format!("--limit is 0, but {range}")));
        let range = "it must be at least 1 and at most 16777216";
        check("--max-new-tokens 0", Some(&format!("--max-new-tokens is 0, but {range}")));
        let range = "it must be at least 0 and at most 1000";
        check("--temperature=-1", Some(&format!("--temperature is -1, but {range}")));
        check("--temperature nan", Some(&format!("--temperature is NaN, but {range}")));
    }
}
