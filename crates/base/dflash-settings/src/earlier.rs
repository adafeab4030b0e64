//! Settings under the names of earlier releases, on command lines, in run files and in run records.

use serde_json::{Map, Value, json};

use crate::ResumeMode;
use crate::optimizer::DEFAULT_BETAS;

/// AdamW's default betas in earlier releases.
const EARLIER_BETAS: [f64; 2] = [0.9, 0.999];

/// Names of earlier releases, and whether a value follows the flag.
pub const EARLIER_NAMES: [(&str, bool); 6] = [
    ("resume_or_start", false),
    ("resume_from", true),
    ("warmup_ratio", true),
    ("warmup_steps", true),
    ("adam_beta1", true),
    ("adam_beta2", true),
];

/// Translates one source's settings, e.g. a run file's, from earlier names; `take` removes and
/// returns the value of a name.
pub fn present_settings(take: &mut dyn FnMut(&str) -> Option<Value>) -> Vec<(&'static str, Value)> {
    let [or_start, from, ratio, steps, beta1, beta2] =
        EARLIER_NAMES.map(|(name, _)| take(name).filter(|value| !value.is_null()));
    let auto = (or_start == Some(Value::Bool(true))).then(|| json!(ResumeMode::AUTO));
    // Of several, the most specific counts: a step, then auto, then a bare --resume.
    let resume = from.or(auto).map(|earlier| match take("resume") {
        Some(step) if earlier == ResumeMode::AUTO && is_step(&step) => step,
        _ => earlier,
    });
    let warmup = steps.or(ratio.map(share));
    let betas = (beta1.is_some() || beta2.is_some()).then(|| betas([beta1, beta2], DEFAULT_BETAS));
    let present = [("resume", resume), ("warmup", warmup), ("adam_betas", betas)];
    present.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
}

/// A run's recorded settings under their present names, with the defaults of the release that
/// recorded them. Strings are parsed like numbers.
pub fn present_record(record: &mut Map<String, Value>) {
    let said = |value: &Value| !value.is_null() && value != "default";
    let is_earlier = record.contains_key("adam_beta1");
    let mut take = |name: &str| record.remove(name).filter(said);
    let means = [take("adam_beta1"), take("adam_beta2")];
    let (steps, ratio) = (take("warmup_steps"), take("warmup_ratio"));
    if let Some(warmup) = steps.or(ratio) {
        record.insert("warmup".into(), warmup);
    }
    if is_earlier {
        record.insert("adam_betas".into(), betas(means, EARLIER_BETAS));
    }
}

fn betas(given: [Option<Value>; 2], usual: [f64; 2]) -> Value {
    let [beta1, beta2] = given;
    json!([beta1.unwrap_or_else(|| usual[0].into()), beta2.unwrap_or_else(|| usual[1].into())])
}

fn is_step(resume: &Value) -> bool {
    resume.is_u64() || resume.as_str().is_some_and(|text| text.parse::<u64>().is_ok())
}

/// A fraction under its earlier name, for which 1 did not mean a step.
fn share(ratio: Value) -> Value {
    let number = match &ratio {
        Value::String(text) => text.parse().ok(),
        ratio => ratio.as_f64(),
    };
    number.map_or(ratio, |number: f64| format!("{number:?}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(given: Value, expect: &[(&str, Value)]) {
        let Value::Object(mut source) = given else { panic!("a table") };
        let found = present_settings(&mut |name| source.remove(name));
        assert_eq!(found, expect);
    }

    #[test]
    fn earlier_names_are_read_as_the_present_ones() {
        check(json!({"lr": 1}), &[]);
        check(json!({"resume_or_start": true, "resume": true}), &[("resume", json!("auto"))]);
        check(json!({"resume_or_start": true, "resume": "7"}), &[("resume", json!("7"))]);
        check(json!({"resume_or_start": false}), &[]);
        check(json!({"resume_or_start": true, "resume_from": 7}), &[("resume", json!(7))]);
        check(json!({"warmup_ratio": 0.1}), &[("warmup", json!("0.1"))]);
        check(json!({"warmup_ratio": 1}), &[("warmup", json!("1.0"))]);
        check(json!({"warmup_ratio": "x"}), &[("warmup", json!("x"))]);
        check(json!({"warmup_ratio": 0.1, "warmup_steps": 9}), &[("warmup", json!(9))]);
        check(json!({"adam_beta1": 0.5}), &[("adam_betas", json!([0.5, 0.95]))]);
        let both = json!({"adam_beta1": "0.5", "adam_beta2": "0.9"});
        check(both, &[("adam_betas", json!(["0.5", "0.9"]))]);
    }

    #[test]
    fn records_keep_the_defaults_that_they_were_made_with() {
        let record = |record: Value| {
            let Value::Object(mut record) = record else { panic!("a table") };
            present_record(&mut record);
            Value::Object(record)
        };
        let json_record = json!({"warmup_ratio": 0.04, "warmup_steps": null,
            "adam_beta1": null, "adam_beta2": 0.9, "lr": 1});
        let expect = json!({"warmup": 0.04, "adam_betas": [0.9, 0.9], "lr": 1});
        assert_eq!(record(json_record), expect);
        let texts = json!({"warmup_ratio": "0.04", "warmup_steps": "20",
            "adam_beta1": "default", "adam_beta2": "default"});
        assert_eq!(record(texts), json!({"warmup": "20", "adam_betas": [0.9, 0.999]}));
        let present = json!({"warmup": "0.04", "adam_betas": "0.9,0.95"});
        assert_eq!(record(present.clone()), present);
    }
}
