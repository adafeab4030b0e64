//! Every target with vectors, run in every way: documents packed with others, sequences that share
//! a pass, and a cache that is truncated and copied. All compared with computing the tokens from
//! the start.

use std::path::Path;

use dflash_golden::entries;
use dflash_target::{KvCache, SequencePart, Target, TargetConfig, TargetOptions};
use dflash_tensor::checkpoint::TensorFile;
use dflash_test_support::seeded;
use tch::{Device, Kind, Tensor, no_grad};

/// Tolerance for states and logits, relative to the largest.
const BOUND: f64 = 1e-5;

/// The same for random texts, on some of which these models amplify rounding: float32 was seen 3e-5
/// off. A missing or repeated token causes 1e-2 and more. The caches' own tests show in float64
/// that the states differ only by rounding.
const RANDOM_TEXTS: f64 = 1e-4;

/// Runs `check` with every model's name, the model, and the vectors' 40 tokens.
fn each(check: impl Fn(&str, &Target, &Tensor)) {
    let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
    let found = ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None));
    let mut models = 0;
    for entry in found.filter(|entry| TargetConfig::load(&entry.path).is_ok()) {
        let target = Target::load(&entry.path, &options).unwrap();
        no_grad(|| check(&entry.name, &target, &ids(&entry.path)));
        models += 1;
    }
    assert!(models >= 9, "{models} models");
}

fn ids(dir: &Path) -> Tensor {
    let golden = TensorFile::open(&dir.join("golden.safetensors")).unwrap();
    golden.any_tensor("input_ids").unwrap().flatten(0, -1)
}

fn assert_close(what: &str, actual: &Tensor, expected: &Tensor) {
    assert_within(BOUND, what, actual, expected);
}

fn assert_within(bound: f64, what: &str, actual: &Tensor, expected: &Tensor) {
    assert_eq!(actual.size(), expected.size(), "{what}");
    let scale = expected.abs().max().double_value(&[]);
    let difference = (actual - expected).abs().max().double_value(&[]) / scale;
    assert!(difference <= bound, "{what} differs by {difference:e}");
}

/// The last states of tokens computed from the start, [T, H].
fn from_start(target: &Target, ids: &Tensor) -> Tensor {
    let last = target.num_layers() as u32;
    target.forward_packed(ids, &[0, ids.size()[0]], &[last]).remove(0)
}

/// The last states of the last of `pieces`: computed from the start, or piece by piece if these
/// tokens together use other frequencies.
fn of_last(target: &Target, pieces: &[Tensor]) -> Tensor {
    let all = Tensor::cat(pieces, 0);
    let (tokens, new) = (all.size()[0], pieces[pieces.len() - 1].size()[0]);
    if target.longest_in_pieces().is_none_or(|longest| tokens <= longest as i64) {
        return from_start(target, &all).narrow(0, tokens - new, new);
    }
    let mut cache = target.new_cache(tokens as usize);
    let read = pieces.iter().filter(|piece| piece.size()[0] > 0);
    read.map(|piece| append(target, &mut cache, piece)).last().unwrap()
}

fn append(target: &Target, cache: &mut KvCache, ids: &Tensor) -> Tensor {
    target.forward_cached(ids, cache, &[]).hidden_td
}

#[test]
fn documents_of_a_row_are_as_alone() {
    each(|name, target, ids| {
        let last = [target.num_layers() as u32];
        let starts = [0, 9, 10, 31, 40];
        let row = target.forward_packed(ids, &starts, &last).remove(0);
        for bounds in starts.windows(2) {
            let (start, length) = (bounds[0], bounds[1] - bounds[0]);
            let alone = from_start(target, &ids.narrow(0, start, length));
            assert_close(&format!("{name} from {start}"), &row.narrow(0, start, length), &alone);
        }
    });
}

#[test]
fn sequences_of_a_pass_are_as_alone() {
    each(|name, target, ids| {
        let (held, new) = ([7, 0, 12, 3], [5, 20, 1, 16]);
        let piece = |at: usize| ids.narrow(0, at as i64, held[at] + new[at]);
        let cache = |at: usize| {
            let mut cache = target.new_cache(40);
            if held[at] > 0 {
                let _ = append(target, &mut cache, &piece(at).narrow(0, 0, held[at]));
            }
            cache
        };
        let mut caches: Vec<KvCache> = (0..held.len()).map(cache).collect();
        let parts = caches.iter_mut().zip(new);
        let mut parts: Vec<SequencePart> =
            parts.map(|(cache, tokens)| SequencePart { cache, tokens: tokens as usize }).collect();
        let added = |at: usize| piece(at).narrow(0, held[at], new[at]);
        let all = Tensor::cat(&(0..held.len()).map(added).collect::<Vec<_>>(), 0);
        let states = target.forward_sequences(&all, &mut parts, &[]).hidden_td;
        let mut start = 0;
        for at in 0..held.len() {
            let pieces = [piece(at).narrow(0, 0, held[at]), added(at), ids.narrow(0, 39, 1)];
            let expected = of_last(target, &pieces[..2]);
            let what = format!("{name}, sequence {at}");
            assert_close(&what, &states.narrow(0, start, new[at]), &expected);
            start += new[at];
            // Its remaining cache serves the next token.
            let expected = of_last(target, &pieces);
            assert_close(&what, &append(target, &mut caches[at], &pieces[2]), &expected);
        }
    });
}

/// Whatever was appended, truncated and copied before, a cache that holds some tokens continues
/// like one that read only these.
#[test]
fn a_cache_that_was_cut_and_copied_is_one_that_read_its_tokens() {
    let _draws = seeded(tch::manual_seed);
    let below =
        |most: i64| Tensor::randint(most, [1], (Kind::Int64, Device::Cpu)).int64_value(&[0]);
    each(|name, target, ids| {
        // Growing beyond such a length differs from one pass.
        if target.longest_in_pieces().is_some_and(|longest| longest < 60) {
            return;
        }
        let mut tokens: Vec<i64> = Vec::new();
        let mut cache = target.new_cache(60);
        let mut done = String::new();
        for _ in 0..24 {
            match below(4) {
                0 => {
                    let earliest = cache.earliest();
                    let len = match below(6) {
                        0 => 0,
                        _ => earliest + below((cache.len() - earliest) as i64 + 1) as usize,
                    };
                    cache.truncate(len);
                    tokens.truncate(len);
                    done += &format!(" cut to {len}");
                }
                1 => {
                    let earliest = cache.earliest();
                    let len = earliest + below((cache.len() - earliest) as i64 + 1) as usize;
                    cache = target.copy_cache(&cache, len, 60 + below(9) as usize);
                    tokens.truncate(len);
                    done += &format!(" copy of {len}");
                }
                _ => {
                    let most = (60 - tokens.len() as i64).min(20);
                    let new = if most > 0 { 1 + below(most) } else { continue };
                    let added = ids.narrow(0, below(40 - new), new);
                    tokens.extend(Vec::<i64>::try_from(&added).unwrap());
                    let states = append(target, &mut cache, &added);
                    done += &format!(" +{new}");
                    let all = from_start(target, &Tensor::from_slice(&tokens));
                    let expected = all.narrow(0, tokens.len() as i64 - new, new);
                    assert_within(RANDOM_TEXTS, &format!("{name}:{done}"), &states, &expected);
                }
            }
            assert_eq!(cache.len(), tokens.len());
        }
    });
}

/// Recurrent layers store their state at few lengths; others can be truncated anywhere.
#[test]
fn a_cache_says_how_far_back_it_goes() {
    each(|name, target, ids| {
        let mut cache = target.new_cache(40);
        let _ = append(target, &mut cache, &ids.narrow(0, 0, 12));
        let _ = append(target, &mut cache, &ids.narrow(0, 12, 6));
        let earliest = if target.carries_state() { 12 } else { 0 };
        assert_eq!(cache.earliest(), earliest, "{name}");
        cache.truncate(14);
        assert_eq!((cache.len(), cache.earliest()), (14, earliest), "{name}");
        let copy = target.copy_cache(&cache, 13, 20);
        assert_eq!((copy.len(), copy.earliest()), (13, earliest), "{name}");
    });
}
