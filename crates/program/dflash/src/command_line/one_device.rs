//! Explains, for commands that run a target on one device, what to use instead of `--pipeline` and
//! `--tensor-parallel-size`.

use std::ffi::OsString;

use clap::error::{ContextKind, ErrorKind};

use super::numbers::{command, text};
use super::{Refusal, usage_error};

const PARALLEL_FLAGS: [&str; 3] =
    ["--pipeline", "--pipeline-parallel-size", "--tensor-parallel-size"];

/// Adds the alternative to `refusal` of `args` if it is about one of these flags.
pub(super) fn explain(args: &[OsString], refusal: Refusal) -> Refusal {
    let Refusal::Usage(error) = &refusal else { return refusal };
    let flag = text(error, ContextKind::InvalidArg).filter(|flag| PARALLEL_FLAGS.contains(flag));
    let (Some(flag), ErrorKind::UnknownArgument) = (flag, error.kind()) else { return refusal };
    let name = command(args);
    let instead = match name {
        "eval" => "to evaluate an engine that serves a larger one, use --endpoint",
        "train" => "for a larger one use `dflash hidden-server` and --vllm-endpoint",
        "regenerate" | "generate" | "serve" => {
            "serve a larger one in an engine such as vLLM, with the drafter that `dflash export` writes"
        }
        _ => return refusal,
    };
    let message = format!(
        "{flag}: `dflash {name}` runs the target on one device, only `dflash hidden-server` splits it; {instead}"
    );
    usage_error(name, ErrorKind::UnknownArgument, &message)
}

#[cfg(test)]
mod tests {
    use crate::command_line::{Refusal, parse};

    #[test]
    fn commands_on_one_device_say_what_is_possible() {
        let check = |line: &str, expected: &str| {
            let error = match parse(line.split_whitespace().map(Into::into).collect()) {
                Err(Refusal::Usage(error)) => error.to_string(),
                other => panic!("{line}: {other:?}"),
            };
            assert!(error.contains(expected), "{line}: {error}");
        };
        let eval = "dflash eval --target t --draft d --prompts gsm8k";
        let one = "--tensor-parallel-size: `dflash eval` runs the target on one device";
        check(&format!("{eval} --tensor-parallel-size 2"), one);
        check(&format!("{eval} --tensor_parallel_size=2"), "--endpoint");
        let train = "dflash train --target t --data-path d --save-path s --colocate --pipeline 2";
        check(train, "for a larger one use `dflash hidden-server`");
        check("dflash serve --target t --pipeline 2", "`dflash export` writes");
        check("dflash prepare --pipeline 2", "unexpected argument");
    }
}
