//! Divides samples into trained and held-out ones.
//!
//! A share is held out from the end of each source that the data were prepared from: the end of the
//! whole would be the last source only, and select the checkpoint that is best for that. Samples of
//! a separate set (`--validation-data`) are numbered after those of the data.

use dflash_data::{Dataset, split_index};
use dflash_run::{Checkpoint, State};
use dflash_settings::{Invalid, ValidationSettings};
use serde_json::Value;

use crate::Error;
use crate::order::PlannedRow;

/// Key under which a run records how its validation share is held out.
pub(crate) const HELD_OUT: &str = "held_out";
/// Value for a share of each source.
pub(crate) const EACH_SOURCE: &str = "each source";

/// The samples of a run by number, ascending.
#[derive(Debug)]
pub(crate) struct Split {
    trained: Vec<u32>,
    held_out: Vec<u32>,
    /// Lengths in tokens of the trained samples.
    trained_lengths: Vec<u32>,
    /// Lengths of all samples, followed by those of a validation set.
    lengths: Vec<u32>,
    /// Number of samples held out from each source, by name, if there are several.
    by_source: Vec<(String, usize)>,
}

impl Split {
    /// Divides the samples of `dataset` and of the validation `set` according to the settings; a
    /// resumed run divides them as it began.
    ///
    /// # Errors
    /// One side would be empty.
    pub(crate) fn new(
        dataset: &Dataset,
        set: Option<&Dataset>,
        settings: &ValidationSettings,
        resume: Option<&Checkpoint>,
    ) -> Result<Self, Error> {
        let samples = dataset.len();
        let ratio = settings.held_out(samples);
        let whole = vec![(String::new(), samples)];
        let sources = match ratio > 0.0 && !ended_as_a_whole(resume) {
            true => sources(dataset)?.unwrap_or(whole),
            false => whole,
        };
        let several = sources.len() > 1;
        let (mut trained, mut held_out, mut by_source) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for (name, rows) in sources {
            let kept = split_index(rows, 1.0 - ratio);
            trained.extend((first..first + kept).map(|sample| sample as u32));
            held_out.extend((first + kept..first + rows).map(|sample| sample as u32));
            if several {
                by_source.push((name, rows - kept));
            }
            first += rows;
        }
        if ratio > 0.0 && (trained.is_empty() || held_out.is_empty()) {
            let expected = format!("of {samples} samples it must leave some on both sides");
            return Err(Invalid::new("validation_ratio", ratio, expected).into());
        }
        let own = set.map_or(&[][..], Dataset::lengths);
        held_out.extend((samples..samples + own.len()).map(|sample| sample as u32));
        settings.check_measures(held_out.len())?;
        let trained_lengths = trained.iter().map(|&sample| dataset.lengths()[sample as usize]);
        Ok(Self {
            trained_lengths: trained_lengths.collect(),
            trained,
            held_out,
            lengths: [dataset.lengths(), own].concat(),
            by_source,
        })
    }

    /// Lengths of the trained samples, in order; packing numbers these samples from 0.
    pub(crate) fn trained_lengths(&self) -> &[u32] {
        &self.trained_lengths
    }

    /// Lengths of all samples in tokens.
    pub(crate) fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    pub(crate) fn held_out(&self) -> &[u32] {
        &self.held_out
    }

    /// Whether shares are held out from several sources.
    pub(crate) fn is_by_source(&self) -> bool {
        !self.by_source.is_empty()
    }

    /// Converts sample numbers of planned rows from positions in the trained samples to dataset
    /// numbers.
    pub(crate) fn number(&self, planned: &mut [PlannedRow]) {
        for sample in planned.iter_mut().flat_map(|row| &mut row.samples) {
            *sample = self.trained[*sample as usize];
        }
    }

    /// A note on how many samples are held out from which source, if there are several.
    pub(crate) fn note(&self) -> Option<String> {
        let part = |(name, rows): &(String, usize)| format!("{rows} of {name}");
        let parts: Vec<String> = self.by_source.iter().map(part).collect();
        self.is_by_source().then(|| format!("held out for validation: {}", parts.join(", ")))
    }
}

/// Whether the resumed run holds out the end of the whole data, as earlier releases did.
fn ended_as_a_whole(resume: Option<&Checkpoint>) -> bool {
    let state = resume.and_then(|checkpoint| State::load(&checkpoint.dir).ok());
    state.is_some_and(|state| !state.position.settings.contains_key(HELD_OUT))
}

/// The sources that the data were prepared from, in order, with their numbers of samples; `None` if
/// they are not recorded, for example because the data were shuffled, or do not match the data.
fn sources(dataset: &Dataset) -> Result<Option<Vec<(String, usize)>>, Error> {
    let Some(preparation) = dataset.preparation()? else { return Ok(None) };
    let recorded = preparation["sources"].as_array().map(Vec::as_slice).unwrap_or_default();
    let source = |source: &Value| {
        let rows = usize::try_from(source["rows"].as_u64()?).ok()?;
        Some((source["data"].as_str()?.to_owned(), rows))
    };
    let sources: Option<Vec<_>> = recorded.iter().map(source).collect();
    let fits = |sources: &Vec<(String, usize)>| {
        sources.iter().map(|(_, rows)| rows).sum::<usize>() == dataset.len()
    };
    Ok(sources.filter(fits))
}

#[cfg(test)]
mod tests {
    use dflash_data::{DatasetWriter, Sample, WriterOptions};
    use serde_json::json;

    use super::*;

    fn dataset(dir: &std::path::Path, rows: usize, sources: Option<Value>) -> Dataset {
        let mut writer = DatasetWriter::create(dir, WriterOptions::default()).unwrap();
        for row in 0..rows {
            writer
                .push(&Sample { input_ids: vec![1; row + 1], loss_mask: vec![true; row + 1] })
                .unwrap();
        }
        let sources = sources.map(|sources| json!({"sources": sources, "prepared_for": null}));
        if let Some(document) = sources {
            writer.add_file("dflash_prepare.json", document.to_string().as_bytes()).unwrap();
        }
        writer.finish().unwrap();
        Dataset::open(dir).unwrap()
    }

    fn settings(ratio: f64) -> ValidationSettings {
        ValidationSettings {
            eval_every: Some(1),
            validation_ratio: Some(ratio),
            validation_data: None,
            eval_prompts: None,
            eval_limit: 1,
            eval_max_new_tokens: 1,
        }
    }

    #[test]
    fn each_source_gives_its_share_and_a_set_comes_behind() {
        let dir = tempfile::tempdir().unwrap();
        let set = dataset(&dir.path().join("set"), 2, None);
        let check = |name: &str, sources: Option<Value>, held_out: &[u32], note: Option<&str>| {
            let data = dataset(&dir.path().join(name), 12, sources);
            let split = Split::new(&data, Some(&set), &settings(0.25), None).unwrap();
            assert_eq!(split.held_out(), [held_out, &[12, 13]].concat(), "{name}");
            assert_eq!(split.note().as_deref(), note, "{name}");
            assert_eq!(split.lengths().len(), 14);
            let mut planned = [PlannedRow { epoch: 0, samples: (0..9).collect() }];
            split.number(&mut planned);
            let lengths: Vec<u32> =
                planned[0].samples.iter().map(|&sample| split.lengths()[sample as usize]).collect();
            assert_eq!(lengths, split.trained_lengths(), "{name}");
            assert!(planned[0].samples.iter().all(|sample| !held_out.contains(sample)));
        };
        let two = json!([{"data": "a", "rows": 4}, {"data": "b", "rows": 8}]);
        let note = "held out for validation: 1 of a, 2 of b";
        check("two", Some(two), &[3, 10, 11], Some(note));
        check("unrecorded", None, &[9, 10, 11], None);
        check("one", Some(json!([{"data": "a", "rows": 12}])), &[9, 10, 11], None);
        let shuffled = json!([{"data": "a"}, {"data": "b"}]);
        check("shuffled", Some(shuffled), &[9, 10, 11], None);
        let other = json!([{"data": "a", "rows": 4}, {"data": "b", "rows": 9}]);
        check("other", Some(other), &[9, 10, 11], None);
        let data = Dataset::open(&dir.path().join("two")).unwrap();
        let refused = Split::new(&data, None, &settings(0.01), None).map(|split| split.held_out);
        assert_eq!(refused.unwrap(), [3, 11], "a share below one sample is one");
    }
}
