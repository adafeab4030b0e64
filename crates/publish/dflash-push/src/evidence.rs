//! Reports of `dflash eval`, checked against the drafter.

use std::path::{Path, PathBuf};

use dflash_io::say;
use dflash_run::Evaluation;

use crate::Error;
use crate::drafter::Drafter;

/// The reports stored with the drafter and those in `files`, all for its weights.
///
/// # Errors
/// A report for other weights or another target; no report if one is `needed`.
pub(crate) fn gather(
    drafter: &Drafter,
    files: &[PathBuf],
    needed: bool,
) -> Result<Vec<Evaluation>, Error> {
    let mut reports = drafter.evaluations.clone();
    for file in files {
        let named = of_weights(Evaluation::read(file)?, drafter.digest.as_ref());
        if named.is_empty() {
            return Err(Error::UnknownWeights { report: file.clone() });
        }
        reports.extend(named.into_iter().map(|report| (file.clone(), report)));
    }
    let mut evidence = Vec::new();
    for (path, report) in reports {
        check(drafter, &path, &report)?;
        if !evidence.contains(&report) {
            evidence.push(report);
        }
    }
    if evidence.is_empty() && needed {
        return Err(Error::Unevaluated { draft: drafter.place.clone() });
    }
    Ok(evidence)
}

/// The reports for the weights with this digest, from a file that may have several drafters; all if
/// there are none, so that the first can be refused with its reason.
fn of_weights(reports: Vec<Evaluation>, digest: Option<&String>) -> Vec<Evaluation> {
    let is_own = |report: &Evaluation| report.draft_weights.as_ref() == digest;
    match reports.iter().any(is_own) {
        true => reports.into_iter().filter(is_own).collect(),
        false => reports,
    }
}

/// The reports for the sets that `chosen` names, or all without a choice; prints which they are.
///
/// # Errors
/// A name without a result.
pub(crate) fn choose(
    evidence: Vec<Evaluation>,
    chosen: Option<&[String]>,
) -> Result<Vec<Evaluation>, Error> {
    // As on the card: older reports contain paths.
    let name = |report: &Evaluation| {
        let name = report.prompts.file_name().unwrap_or(report.prompts.as_os_str());
        name.to_string_lossy().into_owned()
    };
    let is = |report: &Evaluation, named: &String| name(report).eq_ignore_ascii_case(named);
    let is_none = |named: &String| named == "none";
    let mut kept = evidence;
    if let Some(chosen) = chosen {
        let known = |named: &&String| is_none(named) || kept.iter().any(|it| is(it, named));
        if let Some(named) = chosen.iter().find(|named| !known(named)) {
            let mut there: Vec<String> = kept.iter().map(name).collect();
            there.dedup();
            return Err(Error::NoSuchResult { named: named.clone(), there: there.join(", ") });
        }
        kept.retain(|report| chosen.iter().any(|named| is(report, named)));
    }
    for report in &kept {
        let Evaluation { mode, responses, max_new_tokens, tokens_per_second, .. } = report;
        let (name, speed_up) = (name(report), tokens_per_second.speed_up);
        say(format!(
            "the card shows {name}, {mode}: {responses} answers of at most {max_new_tokens} tokens, \
             {speed_up:.2}x"
        ));
        if let Some(warning) = Evaluation::repetition(report.repetitive, *responses) {
            say(format!("warning: {name}: {warning}"));
        }
    }
    Ok(kept)
}

fn check(drafter: &Drafter, path: &Path, report: &Evaluation) -> Result<(), Error> {
    let (Some(found), Some(expected)) = (&report.draft_weights, &drafter.digest) else {
        return Err(Error::UnknownWeights { report: path.into() });
    };
    if found != expected {
        let (found, expected) = (found.clone(), expected.clone());
        return Err(Error::OtherWeights { report: path.into(), found, expected });
    }
    if let (Some(measured), Some(made_for)) = (&report.target_identity, &drafter.made_for)
        && !measured.is_same_as(made_for)
    {
        let (found, expected) = (measured.to_string(), made_for.to_string());
        return Err(Error::OtherTarget { report: path.into(), found, expected });
    }
    Ok(())
}
