//! How a drafter was made, according to its run.

use dflash_run::{Checkpoint, Position, Provenance, RunDir, State};
use dflash_settings::{Classed, DATA_PRESETS, TrainSettings, present_record};
use serde_json::Value;

use crate::Error;

/// A run, up to one of its checkpoints.
#[derive(Debug)]
pub(crate) struct Origin {
    provenance: Provenance,
    /// `None` if the trainer's state was removed.
    pub(crate) position: Option<Position>,
    pub(crate) step: u64,
}

impl Origin {
    /// The run of `checkpoint`; `None` if it left no record.
    ///
    /// # Errors
    /// A record or a state that cannot be read, or is broken.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Result<Option<Self>, Error> {
        let run = checkpoint.run();
        let Some(provenance) = run.provenance()? else {
            return match run.has_provenance() {
                true => Err(Error::BrokenRecord { path: run.path().join(RunDir::PROVENANCE) }),
                false => Ok(None),
            };
        };
        let has_state = checkpoint.dir.join(Checkpoint::STATE).is_file();
        let state = has_state.then(|| State::load(&checkpoint.dir)).transpose()?;
        let position = state.map(|state| state.position);
        Ok(Some(Self { provenance, position, step: checkpoint.step }))
    }

    /// The settings that affect the drafter and that were given or have a default, by name.
    pub(crate) fn recipe(&self) -> Vec<(&'static str, String)> {
        let mut config = self.provenance.config.clone();
        config.as_object_mut().into_iter().for_each(present_record);
        let value = |key| shown(&config[key]);
        let recipe = TrainSettings::settings().into_iter().filter(|setting| setting.in_recipe);
        recipe.filter_map(|setting| Some((setting.key, value(setting.key)?))).collect()
    }

    /// Versions and machine: name and value.
    pub(crate) fn surroundings(&self) -> Vec<(&'static str, String)> {
        let setting = |key| self.provenance.settings.get(key).cloned();
        let ranks = self.provenance.world_size.map(|ranks| ranks.to_string());
        let facts = [
            ("dflash", self.provenance.dflash.clone()),
            ("libtorch", self.provenance.libtorch.clone()),
            ("ranks", ranks),
            ("device", setting("device")),
            ("computed in", setting("compute_dtype")),
            ("processor", setting("processor").filter(|_| setting("device") == Some("cpu".into()))),
        ];
        facts.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }

    /// Steps at which the run was resumed.
    pub(crate) fn resumes(&self) -> Vec<u64> {
        self.provenance.resumes()
    }

    /// How the dataset was prepared, if it is recorded.
    pub(crate) fn data(&self) -> Option<Data<'_>> {
        self.provenance.data.as_ref().filter(|data| data.is_object()).map(Data)
    }
}

/// The contents of the dataset's `dflash_prepare.json`.
pub(crate) struct Data<'a>(&'a Value);

impl Data<'_> {
    /// Where the rows come from: names of datasets, and file names without directories.
    pub(crate) fn sources(&self) -> Vec<String> {
        self.specs().map(|spec| repository(spec).unwrap_or_else(|| file_name(spec))).collect()
    }

    /// Those that are datasets on the Hub.
    pub(crate) fn datasets(&self) -> Vec<String> {
        self.specs().filter_map(repository).collect()
    }

    /// Counts and limits: name and value.
    pub(crate) fn facts(&self) -> Vec<(&'static str, String)> {
        let facts = [
            ("rows read", "rows_in"),
            ("samples", "rows"),
            ("tokens", "tokens"),
            ("supervised tokens", "supervised_tokens"),
            ("longest sample, tokens", "seq_length"),
            ("samples cut to that", "truncated"),
            ("at most this many rows", "limit"),
            ("drawn with seed", "shuffle_seed"),
            ("chat template's variables", "chat_template_kwargs"),
        ];
        facts.into_iter().filter_map(|(name, key)| Some((name, shown(&self.0[key])?))).collect()
    }

    /// Rows that were dropped, by reason.
    pub(crate) fn dropped(&self) -> Vec<(String, String)> {
        let dropped = self.0["dropped"].as_object().into_iter().flatten();
        dropped.filter_map(|(reason, it)| Some((reason.clone(), shown(&it["count"])?))).collect()
    }

    fn specs(&self) -> impl Iterator<Item = &str> {
        let sources = self.0["sources"].as_array().into_iter().flatten();
        sources.filter_map(|source| source["data"].as_str())
    }
}

/// The dataset on the Hub that an argument of `--data` stands for.
fn repository(spec: &str) -> Option<String> {
    let preset =
        DATA_PRESETS.iter().find(|(name, _)| *name == spec).map(|(_, stands_for)| *stands_for);
    let name = preset.unwrap_or(spec).strip_prefix("hf:")?;
    name.split(':').next().map(str::to_owned)
}

/// The last part of a path: the rest belongs to this machine.
pub(crate) fn file_name(path: &str) -> String {
    path.trim_end_matches('/').rsplit(['/', '\\']).next().unwrap_or_default().to_owned()
}

/// A setting for people; `None` if it has no value.
fn shown(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().filter_map(shown).collect();
            Some(items.join(", "))
        }
        other => Some(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sources_have_names_and_no_places() {
        let data = json!({"rows": 7, "limit": null, "dropped": {"empty":
            {"count": 3, "first": "/home/me/x:1"}}, "sources": [
            {"data": "gsm8k", "files": ["/home/me/.cache/x.parquet"]},
            {"data": "hf:some/data:config:split", "files": []},
            {"data": "/home/me/chats/", "files": []}, {"data": "rows.jsonl", "files": []}]});
        let data = Data(&data);
        assert_eq!(data.sources(), ["openai/gsm8k", "some/data", "chats", "rows.jsonl"]);
        assert_eq!(data.datasets(), ["openai/gsm8k", "some/data"]);
        assert_eq!(data.facts(), [("samples", "7".to_owned())]);
        assert_eq!(data.dropped(), [("empty".to_owned(), "3".to_owned())]);
    }
}
