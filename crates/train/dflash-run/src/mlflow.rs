//! MLflow's file store, `mlruns/` in the run's directory.
//!
//! ```text
//! mlruns/0/meta.yaml                   the experiment
//! mlruns/0/ID/meta.yaml                the run: name, status, start and end
//! mlruns/0/ID/metrics/train/loss       a line per point: milliseconds since 1970, value, step
//! mlruns/0/ID/params/lr                a setting
//! mlruns/0/ID/tags/mlflow.runName      the name again
//! ```
//!
//! tests/trackers has the output of MLflow's own client for it. A resumed run continues the same
//! MLflow run.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::directory::names;
use crate::trackers::{End, Entry, RunAbout, Track, flat, seconds_since_1970};
use crate::{Error, RunDir};

const STORE: &str = "mlruns";
const EXPERIMENT: &str = "0";
const META: &str = "meta.yaml";

/// The longest parameter that MLflow accepts.
const LONGEST_PARAMETER: usize = 6000;

/// Numbers of MLflow's `RunStatus`.
const RUNNING: u8 = 1;
const FINISHED: u8 = 3;
const FAILED: u8 = 4;
const KILLED: u8 = 5;

/// A run of the store.
#[derive(Debug)]
pub(crate) struct MlflowRun {
    dir: PathBuf,
    id: String,
    name: String,
    started_ms: u64,
    /// Open files of metrics, by tag.
    metrics: BTreeMap<String, File>,
}

impl MlflowRun {
    pub(crate) fn open(run: &RunDir, about: &RunAbout) -> Result<Self, Error> {
        let experiment = run.path().join(STORE).join(EXPERIMENT);
        create(&experiment)?;
        let now = (1000.0 * seconds_since_1970()) as u64;
        let earlier = names(&experiment)?.into_iter().find(|name| is_id(name));
        let id = earlier.clone().unwrap_or_else(|| id(now));
        let dir = experiment.join(&id);
        let started_ms = earlier.and_then(|_| started(&dir)).unwrap_or(now);
        let (name, metrics) = (about.name.clone(), BTreeMap::new());
        let own = Self { dir, id, name, started_ms, metrics };
        for inner in ["metrics", "params", "tags", "artifacts"] {
            create(&own.dir.join(inner))?;
        }
        drop_after(&own.dir.join("metrics"), about.step)?;
        if !experiment.join(META).is_file() {
            write(&experiment.join(META), &experiment_meta(&experiment, now))?;
        }
        for (key, value) in flat(&about.config) {
            let value: String = value.chars().take(LONGEST_PARAMETER).collect();
            write(&own.dir.join("params").join(key), &value)?;
        }
        write(&own.dir.join("tags").join("mlflow.runName"), &own.name)?;
        own.note(RUNNING, None)?;
        Ok(own)
    }

    /// Writes the run's own record.
    fn note(&self, status: u8, ended_ms: Option<u64>) -> Result<(), Error> {
        let artifacts = quoted(&uri(&self.dir.join("artifacts")));
        let end = ended_ms.map_or_else(|| "null".to_owned(), |end| end.to_string());
        let (id, name, start) = (&self.id, quoted(&self.name), self.started_ms);
        let text = format!(
            "artifact_uri: {artifacts}\nend_time: {end}\nentry_point_name: ''\n\
             experiment_id: '{EXPERIMENT}'\nlifecycle_stage: active\nrun_id: {id}\n\
             run_name: {name}\nrun_uuid: {id}\nsource_name: ''\nsource_type: 4\n\
             source_version: ''\nstart_time: {start}\nstatus: {status}\ntags: []\nuser_id: ''\n"
        );
        write(&self.dir.join(META), &text)
    }

    /// The open file of a metric.
    fn metric(&mut self, tag: &str) -> Result<&mut File, Error> {
        if !self.metrics.contains_key(tag) {
            let path = self.dir.join("metrics").join(tag);
            create(path.parent().unwrap_or(&self.dir))?;
            let file = File::options().create(true).append(true).open(&path);
            let file = file.map_err(dflash_io::Error::io("open", &path))?;
            self.metrics.insert(tag.to_owned(), file);
        }
        Ok(self.metrics.get_mut(tag).expect("it was opened above"))
    }
}

impl Track for MlflowRun {
    fn add(&mut self, entry: &Entry) -> Result<(), Error> {
        let (time, step) = ((1000.0 * entry.time) as u64, entry.step);
        for (tag, value) in &entry.scalars {
            let line = format!("{time} {value} {step}\n");
            let written = self.metric(tag)?.write_all(line.as_bytes());
            let path = self.dir.join("metrics").join(tag);
            written.map_err(dflash_io::Error::io("write", path))?;
        }
        Ok(())
    }

    fn close(&mut self, end: End) -> Result<(), Error> {
        let status = match end {
            End::Finished => FINISHED,
            End::Stopped => KILLED,
            End::Failed => FAILED,
        };
        self.note(status, Some((1000.0 * seconds_since_1970()) as u64))
    }
}

fn experiment_meta(dir: &Path, now: u64) -> String {
    let location = quoted(&uri(dir));
    format!(
        "artifact_location: {location}\ncreation_time: {now}\nexperiment_id: '{EXPERIMENT}'\n\
         last_update_time: {now}\nlifecycle_stage: active\nname: Default\n"
    )
}

/// Removes the points after `step` below `dir`, which a resumed run writes again.
fn drop_after(dir: &Path, step: u64) -> Result<(), Error> {
    for name in names(dir)? {
        let path = dir.join(name);
        if path.is_dir() {
            drop_after(&path, step)?;
            continue;
        }
        let text = fs::read_to_string(&path).map_err(dflash_io::Error::io("read", &path))?;
        let is_kept = |line: &&str| {
            let point: Option<u64> = line.rsplit(' ').next().and_then(|step| step.parse().ok());
            line.matches(' ').count() == 2 && point.is_some_and(|point| point <= step)
        };
        let kept: String = text.lines().filter(is_kept).flat_map(|line| [line, "\n"]).collect();
        write(&path, &kept)?;
    }
    Ok(())
}

/// When the run in `dir` began, according to its record.
fn started(dir: &Path) -> Option<u64> {
    let text = fs::read_to_string(dir.join(META)).ok()?;
    text.lines().find_map(|line| line.strip_prefix("start_time: ")?.parse().ok())
}

/// 32 hexadecimal digits, as MLflow names runs.
fn id(now: u64) -> String {
    let mut id = format!("{:08x}{now:016x}", std::process::id());
    let noise = std::collections::hash_map::RandomState::new();
    let _ = write!(id, "{:08x}", std::hash::BuildHasher::hash_one(&noise, now) as u32);
    id
}

fn is_id(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn uri(path: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let encoded = path.as_os_str().as_encoded_bytes().iter().map(|&byte| match byte {
        byte if plain(byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    });
    format!("file://{}", encoded.collect::<String>())
}

/// Text in YAML, as a JSON string, which YAML accepts.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a text prints")
}

fn create(dir: &Path) -> Result<(), Error> {
    Ok(fs::create_dir_all(dir).map_err(dflash_io::Error::io("create", dir))?)
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    Ok(dflash_io::write_bytes(path, text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_run_of_the_store_goes_on_where_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::at(dir.path());
        let open = |step| {
            let config = json!({"lr": 0.1, "loss": ["ce"]});
            MlflowRun::open(&run, &RunAbout { name: "mine: a".to_owned(), config, step }).unwrap()
        };
        let entry = |step| Entry {
            step,
            time: 1.7e9,
            scalars: vec![("train/loss".to_owned(), 8.0 / step as f64)],
        };
        let mut first = open(0);
        [1, 2, 4].iter().for_each(|&step| first.add(&entry(step)).unwrap());
        let text = |name: &str| fs::read_to_string(first.dir.join(name)).unwrap();
        let point = |step: u64, value: f64| format!("1700000000000 {value} {step}\n");
        let points = [point(1, 8.0), point(2, 4.0), point(4, 2.0)];
        assert_eq!(text("metrics/train/loss"), points.concat());
        assert_eq!((text("params/lr"), text("params/loss")), ("0.1".into(), "[\"ce\"]".into()));
        let (started, meta) = (first.started_ms, text(META));
        assert!(meta.contains("run_name: \"mine: a\"\n"), "{meta}");
        assert!(meta.contains("end_time: null\n") && meta.contains("status: 1\n"), "{meta}");
        let mut second = open(2);
        assert_eq!((&second.dir, second.started_ms), (&first.dir, started));
        assert_eq!(text("metrics/train/loss"), points[..2].concat());
        second.add(&entry(4)).unwrap();
        assert_eq!(text("metrics/train/loss"), points.concat());
        for (end, status) in [(End::Finished, 3), (End::Failed, 4), (End::Stopped, 5)] {
            second.close(end).unwrap();
            let meta = text(META);
            assert!(meta.contains(&format!("status: {status}\n")), "{meta}");
            assert!(!meta.contains("end_time: null"), "{meta}");
        }
    }

    #[test]
    fn paths_and_ids_are_as_mlflow_has_them() {
        assert_eq!(uri(Path::new("/a b/ü")), "file:///a%20b/%C3%BC");
        assert!(is_id(&id(1_700_000_000_000)) && !is_id(META));
    }
}
