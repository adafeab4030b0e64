//! Stored samples: what is read, omitted and written.

use std::path::Path;
use std::sync::atomic::Ordering;

use dflash_hidden_states::{Error, OfflineFiles, StreamConfig};
use dflash_settings::{OnGenerate, OnMissing};

use crate::fake::{
    LAYERS, assert_right, config, drain, good, own_server, prompt, single_rows, start, states_of,
};

/// A stream over samples 0..6, of which the even ones are stored in `dir`.
fn half_stored(dir: &Path, endpoints: &[&str], on_missing: OnMissing) -> StreamConfig {
    let files = OfflineFiles::new(dir.into());
    for sample in [0, 2, 4] {
        let ids = prompt(sample).input_ids;
        files.write(sample, &ids, &states_of(&ids, &[2, 5, 8])).unwrap();
    }
    let mut config = config(endpoints);
    config.offline_dir = Some(dir.into());
    config.on_missing = on_missing;
    config
}

#[test]
fn missing_samples_are_left_out_without_any_server() {
    let dir = tempfile::tempdir().unwrap();
    for on_missing in [OnMissing::Skip, OnMissing::Warn] {
        let mut stream =
            start(half_stored(dir.path(), &[], on_missing), single_rows(0..6)).unwrap();
        for fetched in drain(&mut stream).into_iter().flatten() {
            match fetched.sample % 2 {
                0 => assert_right(&fetched),
                _ => assert!(fetched.states.is_none()),
            }
        }
        let counters = stream.counters();
        assert_eq!((counters.stored, counters.missing, counters.requests), (3, 3, 0));
    }
}

#[test]
fn missing_samples_fail_when_asked_to() {
    let dir = tempfile::tempdir().unwrap();
    let config = half_stored(dir.path(), &[], OnMissing::Raise);
    let mut stream = start(config, single_rows(0..6)).unwrap();
    assert!(stream.next_row().unwrap().is_ok());
    let error = stream.next_row().unwrap().unwrap_err();
    assert!(matches!(error, Error::Missing { sample: 1, .. }), "{error:?}");
    assert!(error.to_string().contains("--on-missing generate"), "{error}");
}

#[test]
fn only_missing_samples_are_generated() {
    let dir = tempfile::tempdir().unwrap();
    let (server, requests) = own_server(async |_, request| good(&request));
    let config = half_stored(dir.path(), &[&server.url], OnMissing::Generate);
    let mut stream = start(config, single_rows(0..6)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    assert_eq!(requests.load(Ordering::SeqCst), 3);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "nothing is kept");
}

#[test]
fn cached_samples_serve_the_next_run_and_other_software() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("hidden_states");
    let (server, requests) = own_server(async |_, request| good(&request));
    for run in 0..2 {
        let mut config = config(&[&server.url]);
        config.offline_dir = Some(store.clone());
        config.on_generate = OnGenerate::Cache;
        let mut stream = start(config, single_rows(0..4)).unwrap();
        drain(&mut stream).iter().flatten().for_each(assert_right);
        let counters = stream.counters();
        let expected = if run == 0 { (4, 0, 4) } else { (0, 4, 0) };
        assert_eq!((counters.generated, counters.stored, counters.cached), expected);
    }
    assert_eq!(requests.load(Ordering::SeqCst), 4);
    // Other software expects the last layer, 8, in the last slot.
    let bytes = std::fs::read(store.join("hs_3.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = prompt(3).input_ids;
    let rows = file.tensor("hidden_states").unwrap();
    assert_eq!(rows.shape(), [ids.len(), 3, 8]);
    let last = states_of(&ids, &[8]);
    assert_eq!(&rows.data()[2 * 16..3 * 16], &last.layer(8).unwrap()[..16]);
}

#[test]
fn damaged_and_outdated_files_count_as_missing() {
    let dir = tempfile::tempdir().unwrap();
    let (server, _) = own_server(async |_, request| good(&request));
    let config = half_stored(dir.path(), &[&server.url], OnMissing::Generate);
    std::fs::write(dir.path().join("hs_0.safetensors"), b"cut").unwrap();
    let files = OfflineFiles::new(dir.path().into());
    files.write(2, &[1, 2, 3], &states_of(&[1, 2, 3], &LAYERS)).unwrap();
    let mut stream = start(config, single_rows(0..6)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    let counters = stream.counters();
    assert_eq!((counters.stored, counters.stale, counters.generated), (1, 2, 5));
}

#[test]
fn files_of_other_layers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = half_stored(dir.path(), &[], OnMissing::Skip);
    config.layer_ids = vec![2, 3];
    let error = start(config, single_rows(0..1)).unwrap().next_row().unwrap().unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error:?}");
}

#[test]
fn a_cache_that_cannot_be_written_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let occupied = dir.path().join("occupied");
    std::fs::write(&occupied, b"a file").unwrap();
    let (server, _) = own_server(async |_, request| good(&request));
    let mut config = config(&[&server.url]);
    config.offline_dir = Some(occupied.join("hidden_states"));
    config.on_generate = OnGenerate::Cache;
    let error = start(config, single_rows(0..1)).unwrap().next_row().unwrap().unwrap_err();
    assert!(error.to_string().contains("occupied"), "{error}");
}
