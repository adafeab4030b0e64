//! An offline run of Weights & Biases: `wandb sync RUN/wandb/offline-run-*` uploads it.
//!
//! `run-ID.wandb` is a log in LevelDB's format: after seven bytes that name the format, blocks of
//! 32 KiB whose records, whole or in parts, have a CRC-32, a length and a kind. Each is a protobuf
//! `Record` with the field numbers of wandb's `wandb_internal.proto`; tests/trackers has the output
//! of wandb's own reader for it. Each start of a run has its own file, all in one group.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use chrono::Local;
use prost::Message;
use serde_json::Value;

use crate::trackers::{End, Entry, RunAbout, Track, seconds_since_1970};
use crate::{Error, RunDir};

const DIRECTORY: &str = "wandb";
const PROJECT: &str = "dflash";

/// ":W&B", 0xBEE1 in little-endian, version 0.
const IDENTIFICATION: [u8; 7] = *b":W&B\xe1\xbe\x00";
const BLOCK: usize = 32 * 1024;
const RECORD_HEADER: usize = 7;

/// Kinds of records: a whole message, or its parts.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// The oldest reader that supports these records, in wandb 0.19's numbering.
const OLDEST_READER: &str = "0.40.0";

/// An open log.
#[derive(Debug)]
pub(crate) struct WandbRun {
    path: PathBuf,
    file: File,
    /// Bytes of the file.
    written: usize,
    records: i64,
    began: f64,
    /// The numbers of one step, which wandb expects together.
    step: Option<Entry>,
    summary: BTreeMap<String, f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Record {
    #[prost(int64, tag = "1")]
    num: i64,
    #[prost(message, optional, tag = "2")]
    history: Option<History>,
    #[prost(message, optional, tag = "3")]
    summary: Option<Items>,
    #[prost(message, optional, tag = "17")]
    run: Option<Run>,
    #[prost(message, optional, tag = "18")]
    exit: Option<Exit>,
    #[prost(message, optional, tag = "21")]
    header: Option<Header>,
}

#[derive(Clone, PartialEq, Message)]
struct Header {
    #[prost(message, optional, tag = "1")]
    version_info: Option<VersionInfo>,
}

#[derive(Clone, PartialEq, Message)]
struct VersionInfo {
    #[prost(string, tag = "1")]
    producer: String,
    #[prost(string, tag = "2")]
    min_consumer: String,
}

#[derive(Clone, PartialEq, Message)]
struct Run {
    #[prost(string, tag = "1")]
    run_id: String,
    #[prost(string, tag = "3")]
    project: String,
    #[prost(message, optional, tag = "4")]
    config: Option<Items>,
    #[prost(string, tag = "6")]
    run_group: String,
    #[prost(string, tag = "8")]
    display_name: String,
    #[prost(message, optional, tag = "17")]
    start_time: Option<Timestamp>,
}

#[derive(Clone, PartialEq, Message)]
struct Timestamp {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// `ConfigRecord` and `SummaryRecord`.
#[derive(Clone, PartialEq, Message)]
struct Items {
    #[prost(message, repeated, tag = "1")]
    update: Vec<Item>,
}

#[derive(Clone, PartialEq, Message)]
struct History {
    #[prost(message, repeated, tag = "1")]
    item: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    step: Option<Step>,
}

#[derive(Clone, PartialEq, Message)]
struct Step {
    #[prost(int64, tag = "1")]
    num: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Item {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "16")]
    value_json: String,
}

#[derive(Clone, PartialEq, Message)]
struct Exit {
    #[prost(int32, tag = "1")]
    exit_code: i32,
    #[prost(int32, tag = "2")]
    runtime: i32,
}

impl WandbRun {
    /// Begins a log in the run's directory.
    pub(crate) fn create(run: &RunDir, about: &RunAbout) -> Result<Self, Error> {
        let began = seconds_since_1970();
        let id = id(began);
        let date = Local::now().format("%Y%m%d_%H%M%S");
        let dir = run.path().join(DIRECTORY).join(format!("offline-run-{date}-{id}"));
        // wandb looks here for files to upload besides the log.
        let files = dir.join("files");
        std::fs::create_dir_all(&files).map_err(dflash_io::Error::io("create", &files))?;
        let path = dir.join(format!("run-{id}.wandb"));
        let file = File::options().create_new(true).append(true).open(&path);
        let file = file.map_err(dflash_io::Error::io("create", &path))?;
        let (step, summary) = (None, BTreeMap::new());
        let mut own = Self { path, file, written: 0, records: 0, began, step, summary };
        own.append(&IDENTIFICATION)?;
        let producer = format!("dflash {}", env!("CARGO_PKG_VERSION"));
        let version_info = Some(VersionInfo { producer, min_consumer: OLDEST_READER.to_owned() });
        own.write(Record { header: Some(Header { version_info }), ..Record::default() })?;
        let run = Run {
            run_id: id,
            project: PROJECT.to_owned(),
            config: Some(Items { update: config(&about.config) }),
            run_group: about.name.clone(),
            display_name: about.name.clone(),
            start_time: Some(timestamp(began)),
        };
        own.write(Record { run: Some(run), ..Record::default() })?;
        Ok(own)
    }

    /// Writes the numbers of the completed step.
    fn finish_step(&mut self) -> Result<(), Error> {
        let Some(Entry { step, time, scalars }) = self.step.take() else { return Ok(()) };
        let own = [("_step", step as f64), ("_timestamp", time), ("_runtime", time - self.began)];
        let own = own.map(|(key, value)| item(key, value));
        let scalars = scalars.iter().map(|(tag, value)| item(tag, *value));
        let history =
            History { item: own.into_iter().chain(scalars).collect(), step: step_of(step) };
        self.write(Record { history: Some(history), ..Record::default() })
    }

    fn write(&mut self, record: Record) -> Result<(), Error> {
        self.records += 1;
        let message = Record { num: self.records, ..record }.encode_to_vec();
        self.append(&framed(self.written, &message))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.file.write_all(bytes);
        written.map_err(dflash_io::Error::io("write", &self.path))?;
        self.written += bytes.len();
        Ok(())
    }
}

impl Track for WandbRun {
    fn add(&mut self, entry: &Entry) -> Result<(), Error> {
        self.summary.extend(entry.scalars.iter().cloned());
        match &mut self.step {
            Some(step) if step.step == entry.step => step.scalars.extend(entry.scalars.clone()),
            _ => {
                self.finish_step()?;
                self.step = Some(entry.clone());
            }
        }
        Ok(())
    }

    fn close(&mut self, end: End) -> Result<(), Error> {
        self.finish_step()?;
        let update = self.summary.iter().map(|(tag, value)| item(tag, *value)).collect();
        self.write(Record { summary: Some(Items { update }), ..Record::default() })?;
        let exit_code = match end {
            End::Finished => 0,
            End::Failed => 1,
            End::Stopped => 143,
        };
        let runtime = (seconds_since_1970() - self.began) as i32;
        self.write(Record { exit: Some(Exit { exit_code, runtime }), ..Record::default() })
    }
}

/// A message in the log's format, starting at byte `at`.
fn framed(at: usize, mut message: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(message.len() + 2 * RECORD_HEADER);
    let mut kinds = [FIRST, FULL];
    loop {
        let room = BLOCK - (at + bytes.len()) % BLOCK;
        if room < RECORD_HEADER {
            bytes.resize(bytes.len() + room, 0);
            continue;
        }
        let (part, rest) = message.split_at(message.len().min(room - RECORD_HEADER));
        let [more, last] = kinds;
        let kind = if rest.is_empty() { last } else { more };
        record(kind, part, &mut bytes);
        if rest.is_empty() {
            return bytes;
        }
        (message, kinds) = (rest, [MIDDLE, LAST]);
    }
}

fn record(kind: u8, data: &[u8], bytes: &mut Vec<u8>) {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&[kind]);
    crc.update(data);
    bytes.extend(crc.finalize().to_le_bytes());
    bytes.extend((data.len() as u16).to_le_bytes());
    bytes.push(kind);
    bytes.extend(data);
}

fn item(key: &str, value: f64) -> Item {
    Item { key: key.to_owned(), value_json: serde_json::json!(value).to_string() }
}

fn step_of(step: u64) -> Option<Step> {
    Some(Step { num: step as i64 })
}

fn config(config: &Value) -> Vec<Item> {
    let members = config.as_object().into_iter().flatten();
    members.map(|(key, value)| Item { key: key.clone(), value_json: value.to_string() }).collect()
}

fn timestamp(seconds: f64) -> Timestamp {
    Timestamp { seconds: seconds as i64, nanos: (1e9 * seconds.fract()) as i32 }
}

/// Eight letters and digits, as wandb names runs.
fn id(now: f64) -> String {
    let noise = std::collections::hash_map::RandomState::new();
    let random = std::hash::BuildHasher::hash_one(&noise, now.to_bits());
    format!("{:08x}", random as u32)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The messages of a log, by wandb's rules.
    fn messages(bytes: &[u8]) -> Vec<Vec<u8>> {
        let (mut at, mut found, mut parts) = (IDENTIFICATION.len(), Vec::new(), Vec::new());
        assert_eq!(bytes[..at], IDENTIFICATION);
        while at < bytes.len() {
            let room = BLOCK - at % BLOCK;
            if room < RECORD_HEADER {
                assert!(bytes[at..at + room].iter().all(|&byte| byte == 0));
                at += room;
                continue;
            }
            let header = &bytes[at..at + RECORD_HEADER];
            let length = u16::from_le_bytes([header[4], header[5]]) as usize;
            assert!(RECORD_HEADER + length <= room, "a record stays in its block");
            let data = &bytes[at + RECORD_HEADER..at + RECORD_HEADER + length];
            let mut again = Vec::new();
            record(header[6], data, &mut again);
            assert_eq!(again, bytes[at..at + RECORD_HEADER + length]);
            assert_eq!(parts.is_empty(), [FULL, FIRST].contains(&header[6]));
            parts.extend_from_slice(data);
            if [FULL, LAST].contains(&header[6]) {
                found.push(std::mem::take(&mut parts));
            }
            at += RECORD_HEADER + length;
        }
        found
    }

    #[test]
    fn messages_of_any_length_stay_in_their_blocks() {
        let mut bytes = IDENTIFICATION.to_vec();
        let lengths = [1, 40, BLOCK - 80, 9, 3 * BLOCK, BLOCK - 7, 0, 100_000, 5];
        let sent: Vec<Vec<u8>> = lengths.map(|length| vec![length as u8; length]).into();
        for message in &sent {
            bytes.extend(framed(bytes.len(), message));
        }
        let sent: Vec<_> = sent.into_iter().collect();
        assert_eq!(messages(&bytes), sent);
    }

    #[test]
    fn a_run_has_its_name_its_settings_its_steps_and_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"lr": 0.1});
        let about = RunAbout { name: "mine".to_owned(), config, step: 0 };
        let mut run = WandbRun::create(&RunDir::at(dir.path()), &about).unwrap();
        let add = |run: &mut WandbRun, step, tag: &str, value| {
            let scalars = vec![(tag.to_owned(), value)];
            run.add(&Entry { step, time: 1.7e9, scalars }).unwrap();
        };
        add(&mut run, 1, "train/loss", 2.0);
        add(&mut run, 1, "validation/loss", 3.0);
        add(&mut run, 2, "train/loss", 1.0);
        run.close(End::Stopped).unwrap();
        let bytes = std::fs::read(&run.path).unwrap();
        let records: Vec<Record> =
            messages(&bytes).iter().map(|it| Record::decode(it.as_slice()).unwrap()).collect();
        assert_eq!(records.iter().map(|it| it.num).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        let described = records[1].run.as_ref().unwrap();
        assert_eq!(
            (described.display_name.as_str(), described.project.as_str()),
            ("mine", PROJECT)
        );
        assert_eq!(described.config.as_ref().unwrap().update, [item("lr", 0.1)]);
        let step = records[2].history.as_ref().unwrap();
        assert_eq!(step.step, step_of(1));
        assert_eq!(step.item[3..], [item("train/loss", 2.0), item("validation/loss", 3.0)]);
        let summary = &records[4].summary.as_ref().unwrap().update;
        assert_eq!(summary[..], [item("train/loss", 1.0), item("validation/loss", 3.0)]);
        assert_eq!(records[5].exit.as_ref().unwrap().exit_code, 143);
    }
}
