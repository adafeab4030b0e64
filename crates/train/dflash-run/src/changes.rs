//! Which settings affect the result of a run, and which of them a resumed run changes.
//!
//! Each setting's class is declared on its field in `dflash-settings`. Facts that are known only at
//! run time (ranks, threads, processor) are recorded under their own keys.

use std::collections::BTreeMap;
use std::fmt;

use dflash_settings::{Classed, Resume, TrainSettings, present_record};
use serde_json::{Map, Value};

/// Facts about the machine and the programs that train records in addition to the settings: a
/// change affects the last bits.
const MACHINE: [&str; 7] =
    ["device", "threads", "ranks", "processor", "cpu_level", "dflash", "libtorch"];

/// A setting that differs from the one that a checkpoint was trained with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The flag's name without dashes.
    pub name: String,
    /// The checkpoint's value.
    pub was: String,
    /// The run's value.
    pub now: String,
    /// Whether `--allow-changed` must name it.
    pub needs_leave: bool,
}

/// The settings that affect the result of a run, as far as the user's settings determine them.
pub fn recorded(settings: &TrainSettings) -> BTreeMap<String, String> {
    let settings = serde_json::to_value(settings).expect("settings print");
    let Value::Object(settings) = settings else { unreachable!("settings are a table") };
    let decisive = TrainSettings::settings()
        .into_iter()
        .filter(|setting| matches!(setting.resume, Resume::Compared | Resume::Told));
    decisive.map(|setting| (setting.key.to_owned(), text(&settings[setting.key]))).collect()
}

/// The differences between the settings of a checkpoint (`was`) and those of a run (`now`).
/// Settings that an earlier release did not record are not compared; renamed ones are.
pub fn changes(was: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<Change> {
    let mut record: Map<String, Value> =
        was.iter().map(|(key, value)| (key.clone(), value.as_str().into())).collect();
    present_record(&mut record);
    let was: BTreeMap<String, String> =
        record.iter().map(|(key, value)| (key.clone(), text(value))).collect();
    let told = TrainSettings::settings().into_iter().filter(|it| it.resume == Resume::Told);
    let told: Vec<&str> = told.map(|setting| setting.key).chain(MACHINE).collect();
    let both = was.iter().filter_map(|(key, was)| Some((key, was, now.get(key)?)));
    both.filter(|(_, was, now)| was != now)
        .map(|(key, was, now)| Change {
            name: key.replace('_', "-"),
            was: was.clone(),
            now: now.clone(),
            needs_leave: !told.contains(&key.as_str()),
        })
        .collect()
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} -> {}", self.name, self.was, self.now)
    }
}

/// A value as the user would type it.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "default".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn values_are_told_as_they_are_typed() {
        let check = |json: &str, expect| {
            assert_eq!(text(&serde_json::from_str(json).unwrap()), expect);
        };
        check("null", "default");
        check("[\"ce\", \"kl=0.5\"]", "ce,kl=0.5");
        check("0.0006", "0.0006");
        check("true", "true");
        check("\"wsd\"", "wsd");
    }

    #[test]
    fn changes_are_named_and_only_some_need_leave() {
        let was = map(&[("loss", "ce"), ("max_steps", "400"), ("threads", "8"), ("lr", "0.01")]);
        let now = map(&[("loss", "kl"), ("max_steps", "600"), ("threads", "4"), ("lr", "0.01")]);
        let found = changes(&was, &now);
        let said: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(said, ["loss ce -> kl", "max-steps 400 -> 600", "threads 8 -> 4"]);
        let needy: Vec<bool> = found.iter().map(|change| change.needs_leave).collect();
        assert_eq!(needy, [true, true, false]);
        assert_eq!(changes(&map(&[]), &now), [], "an earlier release recorded nothing");
        let was = [("warmup_ratio", "0.04"), ("warmup_steps", "default")];
        let was = [&was[..], &[("adam_beta1", "default"), ("adam_beta2", "default")]].concat();
        let now = map(&[("warmup", "0.04"), ("adam_betas", "0.9,0.95")]);
        let said: Vec<String> = changes(&map(&was), &now).iter().map(ToString::to_string).collect();
        assert_eq!(said, ["adam-betas 0.9,0.999 -> 0.9,0.95"]);
    }
}
