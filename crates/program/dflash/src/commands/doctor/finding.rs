//! The doctor's findings, as lines and as JSON.

use std::fmt::Write;

use serde::Serialize;

/// The status of one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    /// In order.
    Ok,
    /// Something will be slower or impossible.
    Warning,
    /// Commands that need it cannot run.
    Missing,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// What was checked, in a word or two.
    pub(super) what: &'static str,
    pub(super) status: Status,
    pub(super) found: String,
    /// What to do, unless in order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
}

impl Finding {
    pub(super) fn ok(what: &'static str, found: impl Into<String>) -> Self {
        Self { what, status: Status::Ok, found: found.into(), remedy: None }
    }

    pub(super) fn warning(
        what: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let remedy = Some(remedy.into());
        Self { what, status: Status::Warning, found: found.into(), remedy }
    }

    pub(super) fn missing(
        what: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { status: Status::Missing, ..Self::warning(what, found, remedy) }
    }
}

/// One line per finding and per remedy.
pub(super) fn show(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { what, status, found, remedy } in findings {
        let status = match status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Missing => "MISSING",
        };
        let found = found.trim_end().replace('\n', "\n                        ");
        writeln!(text, "{status:<8} {what:<14} {found}").expect("text takes text");
        if let Some(remedy) = remedy {
            writeln!(text, "{:23} -> {remedy}", "").expect("text takes text");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_is_a_line_and_a_remedy_follows() {
        let findings = [
            Finding::ok("dflash", "0.1.0"),
            Finding::warning("port 8000", "taken", "choose another with --port"),
            Finding::missing("libtorch", "none\nat all", "install it"),
        ];
        let expected = "\
ok       dflash         0.1.0
warning  port 8000      taken
                        -> choose another with --port
MISSING  libtorch       none
                        at all
                        -> install it
";
        assert_eq!(show(&findings), expected);
    }

    #[test]
    fn json_names_the_status_and_leaves_out_what_is_not_there() {
        let json = |finding: &Finding| serde_json::to_string(finding).unwrap();
        let fine = Finding::ok("glibc", "2.36");
        assert_eq!(json(&fine), r#"{"what":"glibc","status":"ok","found":"2.36"}"#);
        let missing = json(&Finding::missing("a", "b", "c"));
        assert!(missing.contains(r#""status":"missing","found":"b","remedy":"c""#), "{missing}");
    }
}
