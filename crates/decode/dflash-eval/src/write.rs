//! Writes a report to the files that the user requested.

use std::path::{Path, PathBuf};

use dflash_settings::EvalSettings;
use serde_json::Value;

use crate::Error;
use crate::page::{html, markdown};
use crate::report::EvalReport;

/// A format of a report, with the flag and the name in `--output`.
struct Form {
    flag: &'static str,
    name: &'static str,
    path: fn(&EvalSettings) -> Option<&PathBuf>,
    bytes: fn(&EvalReport) -> Vec<u8>,
}

const FORMS: [Form; 4] = [
    Form { flag: "--json", name: "eval.json", path: |s| s.json.as_ref(), bytes: json },
    Form { flag: "--csv", name: "eval.csv", path: |s| s.csv.as_ref(), bytes: csv },
    Form {
        flag: "--markdown",
        name: "eval.md",
        path: |s| s.markdown.as_ref(),
        bytes: |report| markdown(report).into_bytes(),
    },
    Form {
        flag: "--html",
        name: "eval.html",
        path: |s| s.html.as_ref(),
        bytes: |report| html(report).into_bytes(),
    },
];

/// Makes the directory of `--output`, and checks before the work that files can be written and that
/// the baseline exists.
///
/// # Errors
/// A directory that does not exist, or cannot be made; a baseline that cannot be read.
pub fn check_outputs(settings: &EvalSettings) -> Result<(), Error> {
    if let Some(dir) = &settings.output {
        std::fs::create_dir_all(dir)
            .map_err(|source| Error::MakeDirectory { path: dir.clone(), source })?;
    }
    for form in &FORMS {
        let Some(path) = (form.path)(settings) else { continue };
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        if parent.is_some_and(|parent| !parent.is_dir()) {
            return Err(Error::NoDirectory { flag: form.flag, path: path.clone() });
        }
    }
    match &settings.baseline {
        Some(path) => std::fs::metadata(path)
            .map(|_| ())
            .map_err(|source| Error::ReadBaseline { path: path.clone(), source }),
        None => Ok(()),
    }
}

/// Writes every requested format of `report`.
///
/// # Errors
/// A file that cannot be written.
pub fn write(report: &EvalReport, settings: &EvalSettings) -> Result<(), Error> {
    for form in &FORMS {
        let in_output = settings.output.as_ref().map(|dir| dir.join(form.name));
        let paths = (form.path)(settings).cloned().into_iter().chain(in_output);
        for path in paths.collect::<Vec<_>>() {
            write_bytes(&path, &(form.bytes)(report))?;
        }
    }
    Ok(())
}

fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    Ok(dflash_io::write_bytes(path, bytes)?)
}

fn json(report: &EvalReport) -> Vec<u8> {
    serde_json::to_vec_pretty(report).expect("a report holds numbers and strings")
}

/// A line per result, a column per metric and its standard error.
fn csv(report: &EvalReport) -> Vec<u8> {
    let mut figures: Vec<String> = Vec::new();
    // Drafts first, because they have all metrics of plain decoding, and in their own order.
    let (plain, drafted): (Vec<_>, Vec<_>) =
        report.results.iter().partition(|result| result.is_plain());
    for (name, _) in drafted.iter().chain(&plain).flat_map(|one| one.figures.named()) {
        if !figures.contains(&name) {
            figures.push(name);
        }
    }
    let mut writer = csv::Writer::from_writer(Vec::new());
    let keys =
        ["set", "temperature", "thinking", "concurrency", "draft", "responses", "failed", "tokens"];
    let noises = figures.iter().map(|name| format!("{name}_standard_error"));
    let header = keys.iter().map(ToString::to_string).chain(figures.clone()).chain(noises);
    writer.write_record(header).expect("memory takes everything");
    for one in &report.results {
        let thinking = serde_json::to_value(one.mode.thinking).unwrap_or(Value::Null);
        let named = one.figures.named();
        let value = |name: &String| named.iter().find(|(known, _)| known == name).map(|one| one.1);
        let cell = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        let keys = [
            one.set.clone(),
            one.mode.temperature.to_string(),
            thinking.as_str().unwrap_or_default().to_owned(),
            one.mode.concurrency.to_string(),
            one.draft.clone(),
            one.responses.to_string(),
            one.failed.to_string(),
            one.tokens.to_string(),
        ];
        let values = figures.iter().map(|name| cell(value(name)));
        let noises = figures.iter().map(|name| cell(one.noise.get(name).copied()));
        let row = keys.into_iter().chain(values).chain(noises);
        writer.write_record(row).expect("memory takes everything");
    }
    writer.into_inner().expect("memory takes everything")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn a_directory_gets_all_four_forms() {
        let dir = tempfile::tempdir().unwrap();
        let settings = EvalSettings {
            output: Some(dir.path().join("new/deep")),
            csv: Some(dir.path().join("own.csv")),
            ..EvalSettings::default()
        };
        check_outputs(&settings).unwrap();
        write(&report(4.0), &settings).unwrap();
        for name in ["new/deep/eval.json", "new/deep/eval.md", "new/deep/eval.html", "own.csv"] {
            assert!(dir.path().join(name).is_file(), "{name}");
        }
        let text = std::fs::read_to_string(dir.path().join("new/deep/eval.csv")).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 7);
        assert!(
            lines[0]
                .starts_with("set,temperature,thinking,concurrency,draft,responses,failed,tokens")
        );
        assert!(lines[0].contains(",speed_up_standard_error,"), "{}", lines[0]);
        assert!(lines[2].starts_with("gsm8k,0,auto,1,run,8,0,88,2.83333333333333"), "{}", lines[2]);
        let columns = |line: &str| line.split(',').count();
        assert!(lines.iter().all(|line| columns(line) == columns(lines[0])));
        let text = std::fs::read(dir.path().join("new/deep/eval.json")).unwrap();
        let json: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(json["results"].as_array().unwrap().len(), 6);
        assert_eq!(json["lossless"]["holds"], true);
        for key in ["steps", "slots", "tokens_per_second", "acceptance_by_slot", "block_size"] {
            assert!(!json[key].is_null(), "{key}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_named_before_the_work() {
        let settings =
            EvalSettings { html: Some("/nowhere/x.html".into()), ..EvalSettings::default() };
        let error = check_outputs(&settings).unwrap_err().to_string();
        assert!(error.starts_with("--html /nowhere/x.html cannot be written"), "{error}");
        let settings =
            EvalSettings { baseline: Some("/nowhere/b".into()), ..EvalSettings::default() };
        let error = check_outputs(&settings).unwrap_err().to_string();
        assert!(error.contains("cannot read the baseline /nowhere/b"), "{error}");
    }
}
