//! Tips for mistaken command lines: clap's own where they help, and ours where it knows none.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use dflash_settings::nearest;

use super::numbers::{command, text};
use super::{Refusal, usage_error};

/// Types of weights that people know from other programs and that nothing here computes in.
const SMALL_TYPES: [&str; 10] =
    ["int8", "int4", "fp8", "fp4", "nf4", "q4_0", "q4_k_m", "q8_0", "awq", "gptq"];

/// `refusal` of `args` with tips that lead somewhere.
pub(super) fn correct(args: &[OsString], refusal: Refusal) -> Refusal {
    let Refusal::Usage(mut error) = refusal else { return refusal };
    match error.kind() {
        ErrorKind::InvalidValue => {
            if let Some(refusal) = way_out(args, &error) {
                return refusal;
            }
            suggest_nearest_value(&mut error);
        }
        ErrorKind::InvalidSubcommand
            if text(&error, ContextKind::InvalidSubcommand) == Some("benchmark") =>
        {
            let message = "`benchmark` is a command of z-lab's Python package, whose program has this \
                           name too; drafters are measured with `dflash eval` here";
            return usage_error("", ErrorKind::InvalidSubcommand, message);
        }
        ErrorKind::UnknownArgument => drop_advice_to_escape(args, &mut error),
        _ => {}
    }
    Refusal::Usage(error)
}

/// What to do instead of computing in a type that is only for stored weights.
fn way_out(args: &[OsString], error: &clap::Error) -> Option<Refusal> {
    let (flag, value) =
        (text(error, ContextKind::InvalidArg)?, text(error, ContextKind::InvalidValue)?);
    let name = command(args);
    let is_small = SMALL_TYPES.contains(&value.to_lowercase().as_str());
    if !flag.contains("dtype") || !is_small {
        return None;
    }
    let known = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) => values.join(", "),
        _ => return None,
    };
    let instead = match name {
        "export" => "of 8-bit types llama.cpp reads q8_0, with --format gguf",
        "hidden-server" | "train" | "plan" => {
            "a quantized target runs in vLLM, whose hidden states `dflash train --vllm-endpoint` takes"
        }
        _ => {
            "a quantized target runs in vLLM or llama.cpp, with the drafter that `dflash export` writes, and \
             `dflash eval --endpoint` measures it there"
        }
    };
    let flag = flag.split(' ').next().unwrap_or(flag);
    let message = format!("{flag} is {value}, and the types are {known}; {instead}");
    Some(usage_error(name, ErrorKind::InvalidValue, &message))
}

/// clap takes any word that shares letters for a similar one, such as zsh for tcsh, and no short word with two
/// letters exchanged: the nearest value is suggested in its place, if one is near.
fn suggest_nearest_value(error: &mut clap::Error) {
    let Some(given) = text(error, ContextKind::InvalidValue) else { return };
    let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue) else { return };
    let near = nearest(given, known.iter().map(String::as_str)).map(str::to_owned);
    match near {
        Some(near) => error.insert(ContextKind::SuggestedValue, ContextValue::String(near)),
        None => error.remove(ContextKind::SuggestedValue),
    };
}

/// `use '-- --flag'` is for words that begin with dashes; only a prompt is such a word.
fn drop_advice_to_escape(args: &[OsString], error: &mut clap::Error) {
    if command(args) == "generate" {
        return;
    }
    let is_escape = match error.get(ContextKind::Suggested) {
        Some(ContextValue::StyledStrs(tips)) => {
            tips.iter().all(|tip| tip.to_string().contains("as a value, use"))
        }
        _ => false,
    };
    if is_escape {
        error.remove(ContextKind::Suggested);
    }
}

#[cfg(test)]
mod tests {
    use crate::command_line::{Refusal, parse};

    fn refusal(line: &str) -> String {
        match parse(line.split_whitespace().map(Into::into).collect()) {
            Err(Refusal::Usage(error)) => error.to_string(),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn tips_that_lead_nowhere_are_left_out() {
        let shell = refusal("dflash completions tcsh");
        assert!(shell.contains("bash, zsh, fish") && !shell.contains("similar"), "{shell}");
        assert!(refusal("dflash completions zhs").contains("similar value exists: 'zsh'"));
        let train = "dflash train --target t --data-path d --save-path s";
        let unknown = refusal(&format!("{train} --thinking"));
        assert!(unknown.contains("--thinking") && !unknown.contains("-- --"), "{unknown}");
        assert!(refusal(&format!("{train} --max-step 3")).contains("--max-steps"));
        assert!(refusal("dflash benchmark").contains("with `dflash eval` here"));
        assert!(refusal("dflash generate --target t --why").contains("-- --why"));
    }

    #[test]
    fn types_of_stored_weights_come_with_what_reads_them() {
        let said = refusal("dflash export --draft d --output o --dtype int8");
        assert!(said.contains("--dtype is int8") && said.contains("q8_0"), "{said}");
        let said = refusal("dflash eval --target t --draft d --prompts p --dtype fp8");
        assert!(said.contains("dflash eval --endpoint"), "{said}");
    }
}
