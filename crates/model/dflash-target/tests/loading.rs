//! Progress reported by a load: each needed byte once, and the end. Runs in its own process, since
//! the observer is global.

use std::sync::Mutex;

use dflash_golden::entries;
use dflash_settings::Dtype;
use dflash_target::parallel::{Grid, TargetPart};
use dflash_target::{Prefill, PrefillOptions, Target, TargetConfig, TargetOptions};
use dflash_tensor::{DeviceKind, Loading, on_loading};
use tch::{Device, Kind};

/// For each call, the bytes in total, handled and read, and whether it was the last.
static HEARD: Mutex<Vec<(u64, u64, u64, bool)>> = Mutex::new(Vec::new());

fn listen(loading: Loading<'_>) {
    let Loading { total, done, read, over, .. } = loading;
    HEARD.lock().unwrap().push((total, done, read, over));
}

/// Summary of one load: bytes in total, and bytes read at its end.
fn heard(what: &str) -> (u64, u64) {
    let calls = std::mem::take(&mut *HEARD.lock().unwrap());
    assert!(calls.len() > 3, "{what}: {calls:?}");
    let (total, done, read, over) = *calls.last().unwrap();
    assert!(over && calls.iter().filter(|call| call.3).count() == 1, "{what}: {calls:?}");
    assert!(calls.is_sorted_by_key(|call| call.1) && calls.iter().all(|call| call.0 == total));
    assert_eq!((calls[0].1, done), (0, total), "{what}: all that is wanted, and once");
    (total, read)
}

#[test]
fn every_byte_that_is_wanted_is_counted_once() {
    on_loading(listen);
    let found = ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None));
    let mut models = 0;
    for entry in found.filter(|entry| TargetConfig::load(&entry.path).is_ok()) {
        let (device, dtype) = (Device::Cpu, Kind::Float);
        Target::load(&entry.path, &TargetOptions { device, dtype }).unwrap();
        let (total, read) = heard(&entry.name);
        assert_eq!(read, total, "{}", entry.name);
        // As for a server: without the head, up to a layer, or the first of two stages.
        let (place, asked) = (DeviceKind { device, kind: dtype }, Dtype::Float32);
        let options = PrefillOptions { place, asked, highest: Some(1), embedding_vh: None };
        Prefill::load(&entry.path, &options).unwrap();
        let (first_layer, read) = heard(&entry.name);
        assert!(read == first_layer && read < total, "{}", entry.name);
        let grid = Grid { pipeline: 2, tensor: 1 };
        let stages = [0, 1].map(|rank| {
            TargetPart::load(&entry.path, &options, grid, rank, None).unwrap();
            heard(&entry.name)
        });
        assert!(stages.iter().all(|(total, read)| total == read), "{}", entry.name);
        models += 1;
    }
    assert!(models >= 20, "{models} models");
    // Two ranks divide the layers' matrices: each handles all of it and reads its part.
    let qwen3 = entries("targets", None).into_iter().find(|entry| entry.name == "qwen3").unwrap();
    let grid = Grid { pipeline: 1, tensor: 2 };
    let (place, asked) = (DeviceKind::CPU_F32, Dtype::Float32);
    let options = PrefillOptions { place, asked, highest: None, embedding_vh: None };
    let of_rank = |rank: usize| {
        TargetPart::load(&qwen3.path, &options, grid, rank, None).unwrap();
        heard("a part")
    };
    let [(total, first), (_, second)] = [0, 1].map(of_rank);
    assert!(first < total && second < total, "{first} and {second} of {total}");
    assert!(first + second > total, "norms and the embedding are whole on both");
}
