//! The settings of `dflash push`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, at_odds};

/// Longest first line of a commit that the Hub shows in full, and its own limit, characters.
const LONGEST_MESSAGE: usize = 500;

/// Publish a drafter on the Hugging Face Hub, with a model card.
///
/// Uploads only what serving needs: configuration, weights, and a model card with training, data,
/// results and how to serve it. Everything becomes visible in one commit, whose URL goes to
/// standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct PushSettings {
    /// The drafter: the directory of a run (its best checkpoint, or the newest if nothing was
    /// validated), RUN_DIR/latest or RUN_DIR/best, a checkpoint, an exported drafter, or a GGUF
    /// file.
    #[cfg_attr(feature = "clap", arg(value_name = "DIR|FILE"))]
    pub draft: PathBuf,
    /// The repository, OWNER/NAME; created if it does not exist.
    #[cfg_attr(feature = "clap", arg(long, value_name = "OWNER/NAME"))]
    pub repo: String,
    /// Create the repository, and a new collection, as private; refuse an existing public one.
    #[cfg_attr(feature = "clap", arg(long))]
    pub private: bool,
    /// Show what would be uploaded, and the card, without sending anything.
    #[cfg_attr(feature = "clap", arg(long))]
    pub dry_run: bool,
    /// A GGUF file of the same drafter, to upload as well. Repeatable.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    #[serde(default)]
    pub gguf: Vec<PathBuf>,
    /// A report of `dflash eval --json` for the card, in addition to those kept with the
    /// checkpoint. Repeatable.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    #[serde(default)]
    pub evaluation: Vec<PathBuf>,
    /// Results for the card: names of sets, separated by commas; none for no results [default: all
    /// of this drafter].
    #[cfg_attr(feature = "clap", arg(long, value_name = "SET|none", action = clap::ArgAction::Set, value_delimiter = ','))]
    #[serde(default)]
    pub results: Option<Vec<String>>,
    /// Publish a drafter that was never evaluated; its card then says so.
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_unevaluated: bool,
    /// The target's name on the Hub, OWNER/NAME [default: the one that the drafter was trained with,
    /// if that was from the Hub].
    #[cfg_attr(feature = "clap", arg(long, value_name = "OWNER/NAME"))]
    pub base_model: Option<String>,
    /// The drafter's licence, as the Hub abbreviates it, such as apache-2.0.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID"))]
    pub license: Option<String>,
    /// A language of the training data, such as en. Repeatable.
    #[cfg_attr(feature = "clap", arg(long, value_name = "CODE"))]
    #[serde(default)]
    pub language: Vec<String>,
    /// A dataset on the Hub that the training data comes from, in addition to those that the run
    /// recorded. Repeatable.
    #[cfg_attr(feature = "clap", arg(long, value_name = "OWNER/NAME"))]
    #[serde(default)]
    pub dataset: Vec<String>,
    /// A collection to add the repository to: its slug, OWNER/TITLE-ID, or the title of one of the
    /// repository's owner, created if it does not exist.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SLUG|TITLE"))]
    pub collection: Option<String>,
    /// The branch to commit to [default: main].
    #[cfg_attr(feature = "clap", arg(long, value_name = "BRANCH"))]
    pub revision: Option<String>,
    /// Open a pull request instead of committing to the branch.
    #[cfg_attr(feature = "clap", arg(long))]
    pub create_pr: bool,
    /// The commit's message [default: names the drafter's step].
    #[cfg_attr(feature = "clap", arg(long, value_name = "TEXT"))]
    pub message: Option<String>,
    /// File with a token that has write access [default: HF_TOKEN, or the token of `hf auth
    /// login`].
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub token_file: Option<PathBuf>,
}

impl PushSettings {
    /// # Errors
    /// A text that the Hub would refuse.
    pub fn check(&self) -> Result<(), Invalid> {
        repository("repo", &self.repo)?;
        self.base_model.iter().try_for_each(|name| repository("base_model", name))?;
        let is_id = |text: &str, more: &[char]| {
            let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || more.contains(&c);
            !text.is_empty() && text.chars().all(fits)
        };
        if let Some(license) = self.license.as_ref().filter(|it| !is_id(it, &['-', '.'])) {
            let expected = "it is one of the Hub's abbreviations, such as apache-2.0, mit or other";
            return Err(Invalid::new("license", license, expected));
        }
        if let Some(code) = self.language.iter().find(|it| !is_id(it, &['-']) || it.len() < 2) {
            return Err(Invalid::new("language", code, "it is a code such as en or zh"));
        }
        // Datasets of the early days have no owner.
        let is_dataset = |name: &str| !name.is_empty() && !name.contains([' ', ':', '@']);
        if let Some(name) = self.dataset.iter().find(|name| !is_dataset(name)) {
            return Err(Invalid::new("dataset", name, "it is a name on the Hub, OWNER/NAME"));
        }
        if let Some(message) = &self.message
            && !(1..=LONGEST_MESSAGE).contains(&message.trim().chars().count())
        {
            let length = format!("{} characters long", message.trim().chars().count());
            let expected = format!("it must have at least 1 and at most {LONGEST_MESSAGE}");
            return Err(Invalid::new("message", length, expected));
        }
        if self.collection.as_ref().is_some_and(|collection| collection.trim().is_empty()) {
            return Err(at_odds("collection", "needs a slug or a title"));
        }
        Ok(())
    }
}

/// Refuses names that are not valid for a repository on the Hub.
fn repository(key: &'static str, name: &str) -> Result<(), Invalid> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_word = |word: &str| {
        (1..=96).contains(&word.len())
            && word.chars().all(plain)
            && !word.starts_with(['-', '.'])
            && !word.ends_with(['-', '.'])
            && !word.contains("--")
            && !word.contains("..")
    };
    let fits = name.split_once('/').is_some_and(|(owner, name)| {
        is_word(owner) && is_word(name) && !name.ends_with(".git") && !name.ends_with(".ipynb")
    });
    let expected = "it must be OWNER/NAME of letters, digits, '-', '_' and '.', each at most 96 \
                    characters, none beginning or ending with '-' or '.', without '--' and '..'";
    if fits { Ok(()) } else { Err(Invalid::new(key, name, expected)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(key: &str, value: Value, expect: Option<&str>) {
        let mut settings = json!({"draft": "d", "repo": "a/b", "private": false, "dry_run": false,
            "allow_unevaluated": false, "create_pr": false});
        settings[key] = value.clone();
        let settings: PushSettings = serde_json::from_value(settings).unwrap();
        let refused = settings.check().err().map(|invalid| invalid.to_string());
        match expect {
            None => assert_eq!(refused, None, "{key} {value}"),
            Some(words) => assert!(refused.is_some_and(|it| it.contains(words)), "{key} {value}"),
        }
    }

    #[test]
    fn names_are_those_that_the_hub_takes() {
        for name in ["me/Qwen3-8B-DFlash", "a/b", "z-lab/Qwen3.5_x"] {
            check("repo", json!(name), None);
            check("base_model", json!(name), None);
        }
        let wrong =
            ["b", "a/b/c", "a/", "/b", "a/-b", "a/b.", "a/b--c", "a/b..c", "a/b.git", "a/b c"];
        for name in wrong {
            check("repo", json!(name), Some("--repo is"));
            check("base_model", json!(name), Some("--base-model is"));
        }
        check("repo", json!(format!("a/{}", "b".repeat(97))), Some("at most 96"));
    }

    #[test]
    fn what_the_hub_would_not_read_is_refused() {
        check("license", json!("apache-2.0"), None);
        check("license", json!("Apache 2"), Some("such as apache-2.0"));
        check("language", json!(["en", "zh-hant"]), None);
        check("language", json!(["English"]), Some("a code such as en"));
        check("dataset", json!(["openai/gsm8k", "squad"]), None);
        check("dataset", json!(["hf:openai/gsm8k"]), Some("--dataset is"));
        check("message", json!(" "), Some("0 characters long"));
        check("collection", json!(""), Some("needs a slug or a title"));
    }
}
