//! Dispatches a parsed command to the library that implements it.

use dflash::{Command, Ending, Signals};
use dflash_settings::Invalid;

mod bench;
mod demo_target;
mod described;
mod draft;
mod engine_info;
mod eval;
mod export;
mod generate;
mod hidden_server;
mod launch;
mod plan;
mod regenerate;
mod serve;
mod train;

/// Runs `command` until it finishes or a signal stops it.
///
/// # Errors
/// Any error of the command's library.
pub(crate) fn run(command: Command, signals: &Signals) -> anyhow::Result<Ending> {
    let stop = signals.stop();
    let returned = match command {
        Command::Train(settings) => return train::run(*settings, signals),
        Command::HiddenServer(settings) => hidden_server::run(&settings, stop),
        Command::Plan(settings) => plan::run(&settings, stop),
        Command::Eval(settings) => eval::run(&settings, stop),
        Command::Export(settings) => export::run(&settings, stop),
        Command::Regenerate(settings) => regenerate::run(&settings, stop),
        Command::Generate(settings) => generate::run(&settings, stop),
        Command::Serve(settings) => serve::run(&settings, stop),
        Command::Bench(settings) => bench::run(&settings, stop),
        Command::DemoTarget(settings) => demo_target::run(&settings, stop),
        Command::EngineInfo => engine_info::run(),
        Command::Prepare(_)
        | Command::Push(_)
        | Command::Report(_)
        | Command::Demo(_)
        | Command::Doctor(_)
        | Command::Recipes(_)
        | Command::Completions(_)
        | Command::Man(_)
        | Command::CpuLevels => {
            anyhow::bail!("run `dflash`; its engine does not have this command")
        }
    };
    returned.map(|()| Ending::Returned)
}

/// The key of the setting that an error concerns, if any.
pub(crate) fn about(error: &anyhow::Error) -> Option<String> {
    use dflash_train::Error as Train;
    let key = match error.downcast_ref() {
        Some(Train::Setting(invalid)) => invalid.key,
        Some(Train::OtherTarget { .. }) => "target",
        Some(Train::OtherTokenizer { .. }) => "data_path",
        Some(Train::ForeignDraft { .. } | Train::BadWeights { .. }) => "from_pretrained",
        _ => match error.downcast_ref() {
            Some(dflash_dist::Error::BadLaunch { flag, .. }) => flag,
            _ => error.downcast_ref::<Invalid>()?.key,
        },
    };
    Some(key.trim_start_matches('-').replace('-', "_"))
}
