//! The whole command.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use dflash_data::{Dataset, DatasetWriter, WriteSummary, WriterOptions};
use dflash_io::{Progress, Unit};
use dflash_settings::PrepareSettings;

use crate::error::Error;
use crate::model::Model;
use crate::outcome::{Answers, Dropped, Tally};
use crate::pipeline::{Job, process};
use crate::provenance;
use crate::source::{self, Source};

/// The result of a run. Prints as a small table.
#[derive(Debug, Clone)]
pub struct Summary {
    /// The new dataset.
    pub output: PathBuf,
    /// What was written.
    pub written: WriteSummary,
    /// What happened to the input.
    pub tally: Tally,
    /// Time from the first row read to the last one written.
    pub elapsed: Duration,
}

/// Prepares a dataset. Ends early if `stop` is set, and then leaves nothing behind.
///
/// # Errors
/// See [`Error`]. In every case the output is complete or absent.
pub fn prepare(settings: &PrepareSettings, stop: &AtomicBool) -> Result<Summary, Error> {
    settings.check()?;
    let output = settings.output();
    let places = source::locate(&settings.data)?;
    let shard_bytes = (settings.shard_mb * 1e6) as u64;
    let options = WriterOptions { shard_bytes, overwrite: settings.overwrite };
    let mut writer = DatasetWriter::create(&output, options).map_err(|error| match error {
        dflash_data::Error::Files(dflash_io::Error::Occupied { path }) => Error::Occupied { path },
        other => other.into(),
    })?;
    let model = Model::load(settings, stop)?;
    let mut sources = source::fetch(places, stop)?;
    let started = Instant::now();
    let tally = fill(settings, &model, &mut sources, &mut writer, stop)?;
    if writer.so_far().rows == 0 {
        return Err(match tally.rows_in {
            0 => Error::Empty { data: settings.data.join(", ") },
            rows => Error::NothingLeft { rows, reasons: tally.reasons() },
        });
    }
    let provenance = provenance::document(settings, &model, &sources, &tally, &writer);
    writer.add_file(provenance::FILE, &provenance)?;
    let mut written = writer.finish()?;
    // The name that training uses, in its records and when it refuses another dataset.
    written.fingerprint = Dataset::open(&output)?.fingerprint();
    Ok(Summary { output, written, tally, elapsed: started.elapsed() })
}

fn fill(
    settings: &PrepareSettings,
    model: &Model,
    sources: &mut [Source],
    writer: &mut DatasetWriter,
    stop: &AtomicBool,
) -> Result<Tally, Error> {
    let files: Vec<PathBuf> = sources.iter().flat_map(|source| source.files.clone()).collect();
    let total = files.iter().filter_map(|path| Some(path.metadata().ok()?.len())).sum();
    let mut progress = Progress::new("preparing", Unit::Bytes, total);
    let mut read = 0;
    let mut tally = Tally::default();
    let mut by_file: BTreeMap<Arc<Path>, u64> = BTreeMap::new();
    process(&files, Job { model, settings }, stop, |prepared| {
        for sample in &prepared.samples {
            writer.push(sample)?;
        }
        tally.absorb(prepared.tally);
        for (path, samples) in prepared.by_file {
            *by_file.entry(path).or_insert(0) += samples;
        }
        let written = writer.so_far();
        read += prepared.file_bytes;
        progress.update(read, format!("{} rows, {} tokens", written.rows, written.tokens));
        Ok(())
    })?;
    if settings.shuffle_seed.is_none() {
        count_samples(sources, by_file);
    }
    Ok(tally)
}

/// Records how many samples came from each source. If two sources name the same file they cannot be
/// told apart, and nothing is recorded.
fn count_samples(sources: &mut [Source], by_file: BTreeMap<Arc<Path>, u64>) {
    let mut files: Vec<&PathBuf> = sources.iter().flat_map(|source| &source.files).collect();
    files.sort();
    if files.windows(2).any(|pair| pair[0] == pair[1]) {
        return;
    }
    for source in sources {
        let of_file = |path: &PathBuf| by_file.get(path.as_path()).copied().unwrap_or_default();
        source.rows = Some(source.files.iter().map(of_file).sum());
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, written, tally, elapsed } = self;
        let rate = written.rows as f64 / elapsed.as_secs_f64().max(1e-9);
        let share = 100.0 * written.supervised_tokens as f64 / written.tokens.max(1) as f64;
        writeln!(f, "dataset            {}", output.display())?;
        writeln!(f, "rows read          {}", tally.rows_in)?;
        writeln!(f, "rows written       {}", written.rows)?;
        writeln!(f, "tokens             {}", written.tokens)?;
        writeln!(f, "supervised tokens  {} ({share:.1}%)", written.supervised_tokens)?;
        if tally.answers != Answers::default() {
            writeln!(f, "answers            {}", tally.answers)?;
        }
        writeln!(f, "cut to length      {}", tally.truncated)?;
        if tally.unfinished > 0 {
            writeln!(
                f,
                "answers cut        in {} of {} rows, at the --max-new-tokens of `dflash regenerate`",
                tally.unfinished, tally.rows_in
            )?;
        }
        for (reason, Dropped { count, first }) in &tally.dropped {
            writeln!(f, "dropped            {count}: {reason} (first: {first})")?;
        }
        for (reason, Dropped { count, first }) in &tally.turns_dropped {
            writeln!(f, "turns dropped      {count}: {reason} (first: {first})")?;
        }
        if !tally.unknown_keys.is_empty() {
            writeln!(f, "unknown keys       {}", tally.keys())?;
        }
        if !tally.unread_columns.is_empty() {
            writeln!(f, "unread columns     {}", tally.columns())?;
        }
        writeln!(f, "shards             {}", written.shards)?;
        writeln!(f, "fingerprint        {}", written.fingerprint)?;
        write!(f, "time               {:.1} s ({rate:.0} rows/s)", elapsed.as_secs_f64())
    }
}
