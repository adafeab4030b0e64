//! The model card: `README.md` of the repository.

mod front_matter;
mod measured;
mod serving;
mod yaml;

use std::fmt::Write;

use dflash_formats::draft::Layout;
use dflash_run::{Evaluation, ServedWeights};
use dflash_settings::PushSettings;

use crate::drafter::{Drafter, VOCABULARY};
use crate::origin::{Data, Origin};

pub(crate) struct Card<'a> {
    pub(crate) settings: &'a PushSettings,
    pub(crate) drafter: &'a Drafter,
    pub(crate) evidence: &'a [Evaluation],
}

impl Card<'_> {
    /// The whole page.
    pub(crate) fn text(&self) -> String {
        let sections = [
            self.introduction(),
            self.shape(),
            self.measured(),
            self.serving(),
            self.training(),
            self.data(),
        ];
        format!("---\n{}---\n\n{}", self.front_matter(), sections.join("\n"))
    }

    /// The target's name on the Hub, if it is known.
    pub(crate) fn base_model(&self) -> Option<String> {
        let own = self.drafter.made_for.as_ref().map(|target| target.name.as_str());
        let own = own.filter(|name| dflash_hub::is_repository(name));
        self.settings.base_model.clone().or(own.map(str::to_owned))
    }

    /// The target's name for people.
    fn target(&self) -> String {
        let own = self.drafter.made_for.as_ref().map(|target| plain(&target.name));
        match self.base_model() {
            Some(name) => format!("[{name}](https://huggingface.co/{name})"),
            None => own.unwrap_or_else(|| "a target that its files do not name".to_owned()),
        }
    }

    fn introduction(&self) -> String {
        let name = self.settings.repo.split('/').next_back().unwrap_or_default();
        let worth = self.worth();
        let mut text = format!(
            "# {name}\n\n{worth}\n\nA drafter for speculative decoding with {}, trained with DFlash (block \
             diffusion). It reads hidden states of its target and proposes a block of tokens in one \
             pass; the target checks the block in one more and keeps its longest right beginning. The \
             text is the target's own; the drafter decides only how fast it comes. It is of no use \
             without that target.\n",
            self.target()
        );
        if self.base_model().is_none() {
            text.push_str(
                "\nIts files do not name the target's repository on the Hub: TARGET below stands for \
                 the target's directory or name.\n",
            );
        }
        text
    }

    fn shape(&self) -> String {
        let shape = &self.drafter.shape;
        let number = |number: Option<i64>| number.map(|number| number.to_string());
        let layers: Vec<String> = shape.target_layer_ids.iter().map(u32::to_string).collect();
        let layers = (!layers.is_empty()).then(|| layers.join(", "));
        let layout = match shape.layout {
            Layout::ZLab => "z-lab's: `config.json` and `model.safetensors`",
            Layout::Speculators => "speculators': `config.json` and `model.safetensors`",
            Layout::Gguf => "GGUF, for llama.cpp",
        };
        let target = self.drafter.made_for.as_ref().map(|target| {
            let weights = target.weights.as_ref().map(|it| format!(", weights {it}"));
            format!("{} (config {}{})", target.name, target.config, weights.unwrap_or_default())
        });
        let pruned = self.drafter.files.contains_key(VOCABULARY);
        let pruned = pruned.then(|| format!("pruned; its tokens are in `{VOCABULARY}`"));
        let facts = [
            ("layout", Some(layout.to_owned())),
            ("parameters", self.drafter.parameters.map(|number| number.to_string())),
            ("stored as", self.drafter.dtype.clone()),
            ("head", (!shape.head.is_plain()).then(|| shape.head.kind.clone())),
            ("layers", number(shape.layers)),
            ("hidden size", number(shape.hidden_size)),
            ("block size, the anchor included", number(shape.block_size)),
            ("target layers read (0 is the embedding)", layers),
            ("mask token", number(shape.mask_token_id)),
            ("sliding window", number(shape.sliding_window)),
            ("vocabulary of its own", pruned),
            ("made for", target),
        ];
        format!("## Model\n\n{}", table(known(facts)))
    }

    fn training(&self) -> String {
        let Some(origin) = &self.drafter.origin else {
            return "## Training\n\nThe files say nothing of how it was trained.\n".to_owned();
        };
        let mut text = format!("## Training\n\n{}", progress(origin));
        let resumes: Vec<String> = origin.resumes().iter().map(u64::to_string).collect();
        if !resumes.is_empty() {
            write!(text, " It was resumed at step {}.", resumes.join(", ")).expect("grows");
        }
        let recipe = origin.recipe().into_iter().chain(origin.surroundings());
        text.push_str(&format!("\n\n{}", table(recipe)));
        text
    }

    fn data(&self) -> String {
        let data = self.drafter.origin.as_ref().and_then(Origin::data);
        let mut text = "## Data\n\n".to_owned();
        let Some(data) = data else {
            text.push_str("The run does not say what it was trained on.\n");
            let names: Vec<String> = self.datasets().iter().map(|name| plain(name)).collect();
            if !names.is_empty() {
                writeln!(text, "Whoever published it names {}.", names.join(", ")).expect("grows");
            }
            return text;
        };
        let sources: Vec<String> = data.sources().iter().map(|name| code(name)).collect();
        writeln!(
            text,
            "From {}; rendered with the target's chat template, and what the assistant says is \
             supervised.\n",
            if sources.is_empty() {
                "sources that are not named".to_owned()
            } else {
                sources.join(", ")
            }
        )
        .expect("grows");
        text.push_str(&table(facts_of(&data)));
        text
    }

    /// Datasets on the Hub: those that the run recorded, and those that the settings add.
    pub(crate) fn datasets(&self) -> Vec<String> {
        let data = self.drafter.origin.as_ref().and_then(Origin::data);
        let mut names = data.map(|data| data.datasets()).unwrap_or_default();
        names.extend(self.settings.dataset.iter().cloned());
        let mut seen = std::collections::HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        names
    }
}

fn facts_of(data: &Data<'_>) -> Vec<(String, String)> {
    let facts = data.facts().into_iter().map(|(name, value)| (name.to_owned(), value));
    let dropped = data.dropped().into_iter();
    let dropped =
        dropped.map(|(reason, count)| (format!("dropped: {}", reason.replace('_', " ")), count));
    facts.chain(dropped).collect()
}

/// The run's position, in a sentence.
fn progress(origin: &Origin) -> String {
    let Some(position) = &origin.position else {
        return format!("The checkpoint of step {}.", origin.step);
    };
    let averaged = match position.served_weights {
        ServedWeights::Last => "",
        ServedWeights::Averaged => " The weights are a moving average over the steps.",
    };
    let mut text = format!(
        "The checkpoint of step {}: {} samples with {} tokens were trained on",
        origin.step, position.samples, position.tokens
    );
    if position.anchors > 0 {
        write!(text, ", {} blocks in all", position.anchors).expect("grows");
    }
    if position.skipped_samples > 0 {
        write!(text, "; {} samples were skipped", position.skipped_samples).expect("grows");
    }
    format!("{text}.{averaged}")
}

/// Rows of a name and a value.
fn table(rows: impl IntoIterator<Item = (impl AsRef<str>, String)>) -> String {
    let rows = rows.into_iter();
    let rows: String = rows
        .map(|(name, value)| format!("| {} | {} |\n", plain(name.as_ref()), plain(&value)))
        .collect();
    format!("| | |\n|---|---|\n{rows}")
}

fn known<const N: usize>(
    facts: [(&'static str, Option<String>); N],
) -> impl Iterator<Item = (&'static str, String)> {
    facts.into_iter().filter_map(|(name, value)| Some((name, value?)))
}

/// Outside text for a table or a sentence, without markup that crosses a line or a cell.
fn plain(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.replace('|', "\\|").replace('<', "&lt;")
}

/// Outside text as code.
fn code(text: &str) -> String {
    format!("`{}`", plain(text).replace('`', "'").replace("&lt;", "<"))
}

#[cfg(test)]
mod tests;
