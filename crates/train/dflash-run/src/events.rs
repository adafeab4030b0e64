//! TensorBoard event files with scalars.
//!
//! A file is a sequence of TFRecords, each a protobuf `Event` framed by its length (u64,
//! little-endian) and masked CRC-32C sums of length and message. Field numbers are those of
//! TensorBoard's `event.proto` and `summary.proto`; tests/tensorboard has a file from its own
//! writer.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use prost::Message;

use crate::trackers::{End, Entry, Track, seconds_since_1970};
use crate::{Error, RunDir};

/// Prefix of file names; the start time in seconds follows.
const PREFIX: &str = "events.out.tfevents.";

/// The version that TensorBoard expects in a file's first event.
const FILE_VERSION: &str = "brain.Event:2";

/// An open event file. Every line is passed to the operating system at once.
#[derive(Debug)]
pub(crate) struct Events {
    path: PathBuf,
    file: File,
}

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

/// Marks a start or resumption: records of this step and later in earlier files are void.
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// `SessionLog.SessionStatus.START`.
const START: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// Optional, so that a zero is written too.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

impl Events {
    /// Creates a file in the run's directory, one per start. If there are files of earlier starts
    /// (the run resumes after `step`, or was killed before its first checkpoint), it tells readers
    /// to drop their later steps.
    pub(crate) fn create(run: &RunDir, step: u64) -> Result<Self, Error> {
        let dir = run.path().join(RunDir::EVENTS);
        std::fs::create_dir_all(&dir).map_err(dflash_io::Error::io("create", &dir))?;
        // TensorBoard reads files with "tfevents" in their name, in name order, so each start takes
        // a later second than the previous one, even if the clock has not reached it yet.
        let (now, newest) = (seconds_since_1970() as u64, newest(&dir)?);
        let seconds = newest.map_or(now, |newest| now.max(newest + 1));
        let path = dir.join(format!("{PREFIX}{seconds:010}.{}", std::process::id()));
        let file = File::options().create(true).append(true).open(&path);
        let file = file.map_err(dflash_io::Error::io("create", &path))?;
        let mut events = Self { path, file };
        let file_version = Some(FILE_VERSION.to_owned());
        let wall_time = seconds_since_1970();
        events.write(&Event { wall_time, file_version, ..Event::default() })?;
        if step > 0 || newest.is_some() {
            let session_log = Some(SessionLog { status: START });
            let step = step as i64 + 1;
            events.write(&Event { wall_time, step, session_log, ..Event::default() })?;
        }
        Ok(events)
    }

    fn write(&mut self, event: &Event) -> Result<(), Error> {
        let written = self.file.write_all(&framed(&event.encode_to_vec()));
        Ok(written.map_err(dflash_io::Error::io("write", &self.path))?)
    }
}

impl Track for Events {
    fn add(&mut self, entry: &Entry) -> Result<(), Error> {
        let scalar = |(tag, number): &(String, f64)| {
            let simple_value = Some(*number as f32);
            Scalar { tag: tag.clone(), simple_value }
        };
        let value = entry.scalars.iter().map(scalar).collect();
        let (step, wall_time) = (entry.step as i64, entry.time);
        self.write(&Event { step, wall_time, summary: Some(Summary { value }), ..Event::default() })
    }

    /// The format has no record for the end of a run.
    fn close(&mut self, _: End) -> Result<(), Error> {
        Ok(())
    }
}

/// The second in the name of the newest file in `dir`.
fn newest(dir: &Path) -> Result<Option<u64>, Error> {
    let entries = std::fs::read_dir(dir).map_err(dflash_io::Error::io("list", dir))?;
    let seconds = entries.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        let rest = name.to_str()?.strip_prefix(PREFIX)?;
        rest.split('.').next()?.parse().ok()
    });
    Ok(seconds.max())
}

/// A TFRecord.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    let sums = [&length, message].map(|bytes| masked(crc32c(bytes)).to_le_bytes());
    [&length, &sums[0][..], message, &sums[1]].concat()
}

/// TFRecord masks sums, for messages that contain sums themselves.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: a line has only a few kilobytes.
fn crc32c(bytes: &[u8]) -> u32 {
    const REFLECTED: u32 = 0x82f6_3b78;
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (REFLECTED & (crc & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MetricLine, TeacherForced};

    /// Written by TensorBoard; tests/tensorboard/README.md says how.
    const RECORDED: &[u8] = include_bytes!("../tests/tensorboard/recorded.tfevents");

    /// The messages of a file, whose frames must be as we write them.
    fn messages(mut bytes: &[u8]) -> Vec<&[u8]> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let (record, rest) = bytes.split_at(length + 16);
            let message = &record[12..12 + length];
            assert_eq!(framed(message), record);
            found.push(message);
            bytes = rest;
        }
        found
    }

    fn scalars(event: &Event) -> Vec<(&str, f32)> {
        let values = event.summary.iter().flat_map(|summary| &summary.value);
        values.map(|value| (value.tag.as_str(), value.simple_value.unwrap())).collect()
    }

    #[test]
    fn sums_are_castagnoli_s() {
        // the check value of CRC-32/ISCSI
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn frames_and_messages_are_tensorboard_s() {
        let events: Vec<Event> =
            messages(RECORDED).into_iter().map(|bytes| Event::decode(bytes).unwrap()).collect();
        assert_eq!(events[0].file_version.as_deref(), Some(FILE_VERSION));
        assert_eq!((events[1].step, events[1].wall_time), (10, 1.7e9 + 10.0));
        assert_eq!(scalars(&events[1]), [("train/loss", 3.5)]);
        assert_eq!(scalars(&events[2]), [("train/loss", 2.25), ("train/lr", 0.0006)]);
        // Skip the first: it also names the writer, in a field that we do not write.
        for (event, bytes) in events.iter().zip(messages(RECORDED)).skip(1) {
            assert_eq!(event.encode_to_vec(), bytes);
        }
    }

    #[test]
    fn a_line_becomes_an_event() {
        let dir = tempfile::tempdir().unwrap();
        let mut events = Events::create(&RunDir::at(dir.path()), 0).unwrap();
        let figures = TeacherForced { loss: Some(1.5), ..TeacherForced::default() };
        let line = MetricLine { step: 7, figures, ..MetricLine::default() };
        events.add(&Entry::of(&line, 1.7e9)).unwrap();
        let bytes = std::fs::read(&events.path).unwrap();
        let written = messages(&bytes);
        assert_eq!(written.len(), 2);
        let event = Event::decode(written[1]).unwrap();
        let counts = ["samples", "tokens", "anchors", "skipped_samples", "bad_steps"];
        let zeros: Vec<String> = counts.iter().map(|name| format!("train/{name}")).collect();
        let zeros: Vec<(&str, f32)> = zeros.iter().map(|tag| (tag.as_str(), 0.0)).collect();
        assert_eq!((event.step, event.wall_time), (7, 1.7e9));
        assert_eq!(scalars(&event), [&[("train/loss", 1.5)][..], &zeros].concat());
    }

    #[test]
    fn a_run_that_goes_on_drops_what_came_after() {
        let dir = tempfile::tempdir().unwrap();
        let events = Events::create(&RunDir::at(dir.path()), 20).unwrap();
        let bytes = std::fs::read(&events.path).unwrap();
        let written = messages(&bytes);
        let event = Event::decode(written[1]).unwrap();
        assert_eq!((event.step, event.session_log), (21, Some(SessionLog { status: START })));
        // Field 7, of two bytes: field 1 is 1. As in TensorBoard's event.proto.
        assert!(written[1].ends_with(&[0x3a, 2, 0x08, 1]), "{:?}", written[1]);
    }

    #[test]
    fn a_run_that_starts_again_drops_what_was_there_and_is_read_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::at(dir.path());
        let starts = [0; 3].map(|step| Events::create(&run, step).unwrap());
        let sessions: [Vec<i64>; 3] = starts.each_ref().map(|start| {
            let bytes = std::fs::read(&start.path).unwrap();
            let events = messages(&bytes).into_iter().map(|bytes| Event::decode(bytes).unwrap());
            events.filter(|event| event.session_log.is_some()).map(|event| event.step).collect()
        });
        assert_eq!(sessions, [vec![], vec![1], vec![1]]);
        // within one second and one process
        assert!(starts.is_sorted_by(|start, next| start.path < next.path), "{starts:?}");
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let path = PathBuf::from("/dev/full");
        let file = File::options().append(true).open(&path).unwrap();
        let entry = Entry::of(&MetricLine::default(), 0.0);
        let refused = Events { path, file }.add(&entry).unwrap_err();
        assert!(matches!(refused, Error::Files(error) if error.is_disk_full()));
    }
}
