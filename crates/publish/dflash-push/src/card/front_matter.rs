//! The part of a card that the Hub reads: <https://huggingface.co/docs/hub/model-cards>.

use dflash_formats::draft::Layout;
use dflash_run::{EvalMode, Evaluation};
use serde_json::{Map, Value, json};

use super::measured::prompts_name;
use super::{Card, yaml};

/// Decimals of a result.
const DECIMALS: f64 = 1000.0;

impl Card<'_> {
    /// The lines between the `---` markers.
    pub(super) fn front_matter(&self) -> String {
        let mut map = Map::new();
        let mut put = |key: &str, value: Value| _ = map.insert(key.to_owned(), value);
        if let Some(license) = &self.settings.license {
            put("license", json!(license));
        }
        if !self.settings.language.is_empty() {
            put("language", json!(self.settings.language));
        }
        put("library_name", json!(self.library()));
        put("pipeline_tag", json!("text-generation"));
        if let Some(base) = self.base_model() {
            put("base_model", json!(base));
            // The Hub's term for small weights that are used with an unchanged model.
            put("base_model_relation", json!("adapter"));
        }
        let datasets = self.datasets();
        if !datasets.is_empty() {
            put("datasets", json!(datasets));
        }
        let gguf = self.drafter.gguf().next().map(|_| "gguf");
        let tags = ["dflash", "speculative-decoding", "draft-model", "block-diffusion"];
        put("tags", json!(tags.into_iter().chain(gguf).collect::<Vec<_>>()));
        // Figures of text that repeats itself would be listed beside those of others.
        let told: Vec<_> = self
            .evidence
            .iter()
            .filter(|report| !Evaluation::is_repetitive(report.repetitive, report.responses))
            .collect();
        if !told.is_empty() {
            let name = self.settings.repo.split('/').next_back();
            let results: Vec<Value> = told.into_iter().map(result).collect();
            put("model-index", json!([{"name": name, "results": results}]));
        }
        yaml::document(&map)
    }

    fn library(&self) -> &'static str {
        match self.drafter.shape.layout {
            Layout::ZLab => "transformers",
            Layout::Speculators => "speculators",
            Layout::Gguf => "gguf",
        }
    }
}

/// An evaluation as an entry of the result list.
fn result(report: &Evaluation) -> Value {
    let prompts = prompts_name(report);
    let name = match report.mode == EvalMode::default() {
        true => prompts.clone(),
        false => format!("{prompts}, {}", report.mode),
    };
    let metric = |kind: &str, name: &str, value: f64| {
        let value = (value * DECIMALS).round() / DECIMALS;
        json!({"type": kind, "name": name, "value": value, "verified": false})
    };
    let acceptance = &report.acceptance;
    let lengths = [
        ("acceptance_length", "Tokens per verify step", acceptance.acceptance_length),
        (
            "acceptance_length_per_response",
            "Tokens per verify step, mean over answers",
            acceptance.acceptance_length_per_response,
        ),
        ("speed_up", "Speed-up over plain decoding", report.tokens_per_second.speed_up),
    ];
    let finite = lengths.into_iter().filter(|(.., value)| value.is_finite());
    let metrics: Vec<Value> = finite.map(|(kind, name, value)| metric(kind, name, value)).collect();
    json!({
        "task": {"type": "text-generation", "name": "Speculative decoding"},
        "dataset": {"type": slug(&prompts), "name": name},
        "metrics": metrics,
    })
}

/// A file's name as an identifier.
fn slug(name: &str) -> String {
    let stem = name.split('.').next().unwrap_or(name).to_lowercase();
    let slug = stem.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    if slug.is_empty() { "prompts".to_owned() } else { slug }
}
