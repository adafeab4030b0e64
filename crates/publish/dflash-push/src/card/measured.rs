//! The card's results.

use std::fmt::Write;

use dflash_run::Evaluation;

use super::{Card, code, plain};
use crate::origin::file_name;

impl Card<'_> {
    /// What the drafter is worth, in a sentence: the first of its results.
    pub(super) fn worth(&self) -> String {
        let Some(report) = self.evidence.first() else {
            return "**Not evaluated**: whether it saves time is not known.".to_owned();
        };
        let same = match &report.lossless {
            Some(all) if all.failures.is_empty() && all.ties.is_empty() => {
                "; every text is the same"
            }
            Some(all) if all.failures.is_empty() => "; every text is the same but for ties",
            Some(_) => "; **texts differ** from those of plain decoding",
            None => "",
        };
        format!(
            "**{} times as fast as plain decoding** on {} ({}, {} answers), with {:.2} tokens per \
             verify step of at most {}{same}.{}",
            speed_up(report),
            plain(&prompts_name(report)),
            report.mode,
            report.responses,
            report.acceptance.acceptance_length,
            report.block_size,
            Evaluation::repetition(report.repetitive, report.responses)
                .filter(|_| Evaluation::is_repetitive(report.repetitive, report.responses))
                .map_or_else(String::new, |sentence| format!(" But {sentence}."))
        )
    }

    pub(super) fn measured(&self) -> String {
        let mut text = "## Measured\n\n".to_owned();
        if self.evidence.is_empty() {
            text.push_str(
                "**Nothing.** This drafter was published without an evaluation: how many of its \
                 proposals its target accepts, and whether it saves time, is not known.\n",
            );
            return text;
        }
        text.push_str(
            "With `dflash eval`: every prompt is answered with and without the drafter, in one process \
             by turns. The acceptance length is the number of tokens per verify step, the target's own \
             included, over all steps and as the mean over answers. Speeds are of the machine that \
             each row names.\n\n\
             | prompts | way | answers | tokens | acceptance length | mean over answers | plain, tokens/s | \
             speculative, tokens/s | speed-up | texts equal to plain decoding |\n\
             |---|---|---|---|---|---|---|---|---|---|\n",
        );
        self.evidence.iter().for_each(|report| text.push_str(&row(report)));
        text.push('\n');
        self.evidence.iter().for_each(|report| text.push_str(&details(report)));
        self.evidence.iter().for_each(|report| text.push_str(&repetition(report)));
        if self.drafter.gguf().next().is_some() && !self.drafter.is_gguf_alone() {
            text.push_str(
                "\nThe figures are of `model.safetensors`; the GGUF files were not measured apart.\n",
            );
        }
        text
    }
}

fn row(report: &Evaluation) -> String {
    let (acceptance, speed) = (&report.acceptance, &report.tokens_per_second);
    format!(
        "| {} | {} | {} | {} | {:.3} | {:.3} | {:.1} | {:.1} | {}x | {} |\n",
        plain(&prompts_name(report)),
        report.mode,
        report.responses,
        report.tokens,
        acceptance.acceptance_length,
        acceptance.acceptance_length_per_response,
        speed.plain,
        speed.speculative,
        speed_up(report),
        identical(report)
    )
}

/// With its standard error, if that is known.
fn speed_up(report: &Evaluation) -> String {
    let speed = &report.tokens_per_second;
    let error = speed.speed_up_error.map(|error| format!(" \u{b1} {error:.2}"));
    format!("{:.2}{}", speed.speed_up, error.unwrap_or_default())
}

fn identical(report: &Evaluation) -> String {
    let Some(lossless) = &report.lossless else { return "not compared: sampled".to_owned() };
    let mut text = format!("{} of {}", lossless.identical, lossless.responses);
    for (count, word) in [(lossless.ties.len(), "tied"), (lossless.failures.len(), "differ")] {
        if count > 0 {
            write!(text, ", {count} {word}").expect("grows");
        }
    }
    text
}

/// How a row was measured, and its acceptance by slot.
fn details(report: &Evaluation) -> String {
    let slots = report.acceptance.acceptance_by_slot.iter().enumerate();
    let slots =
        slots.filter_map(|(slot, share)| Some(format!("{slot}: {:.1}%", 100.0 * (*share)?)));
    format!(
        "- {}: {}, at most {} tokens an answer, blocks of {}; {}. Share of all steps in which each \
         slot was accepted: {}.\n",
        code(&prompts_name(report)),
        report.mode,
        report.max_new_tokens,
        report.block_size,
        plain(&report.device),
        slots.collect::<Vec<_>>().join(", ")
    )
}

/// A warning that the figures are of text that any drafter predicts.
fn repetition(report: &Evaluation) -> String {
    let name = code(&prompts_name(report));
    let sentence = Evaluation::repetition(report.repetitive, report.responses);
    sentence.map_or_else(String::new, |it| format!("\n**On {name} {it}.**\n"))
}

/// The name of the prompts' file without its directories, which belong to this machine.
pub(super) fn prompts_name(report: &Evaluation) -> String {
    file_name(&report.prompts.to_string_lossy())
}
