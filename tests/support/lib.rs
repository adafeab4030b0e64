//! Shared by the tests of several crates: reproducible randomness, waiting for a condition, a
//! tokenizer, and an NCCL without GPUs.
//!
//! A random test uses a new seed on every run, so that runs add up, and prints it, which the
//! harness shows on failure. `DFLASH_TEST_SEED=N cargo test NAME` repeats it.

mod nccl;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

pub use nccl::HostNccl;
pub use rand::Rng;
use rand::SeedableRng;
pub use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

/// Variable with the seed of all random tests.
const SEED: &str = "DFLASH_TEST_SEED";

/// Long enough for a machine busy with other tests.
const PATIENCE: Duration = Duration::from_secs(60);

/// A test's random generator.
pub fn random() -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed().unsigned_abs())
}

/// Passes a seed to a process-wide generator such as libtorch's, and locks it as [`alone`] does.
pub fn seeded(hand_over: impl FnOnce(i64)) -> MutexGuard<'static, ()> {
    let guard = alone();
    hand_over(seed());
    guard
}

/// Blocks other tests of this process that call it until the guard is dropped: they would draw from
/// the shared generator in between.
pub fn alone() -> MutexGuard<'static, ()> {
    static DRAWING: Mutex<()> = Mutex::new(());
    DRAWING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The requested seed, or one from the clock; printed.
fn seed() -> i64 {
    let seed = match std::env::var(SEED) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED}={text} is not a whole number")),
        Err(_) => {
            let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            // Microseconds: short enough to copy by hand.
            clock.map_or(0, |clock| clock.as_micros() as i64)
        }
    };
    println!("random test: {SEED}={seed} repeats it");
    seed
}

/// Waits until `holds` returns true.
///
/// # Panics
/// After a minute, naming `what`.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A `tokenizer.json` whose first 256 ids are the bytes, followed by the `special` tokens.
pub fn byte_tokenizer(special: &[&str]) -> Value {
    let vocabulary: Map<String, Value> =
        (0..256_u32).map(|byte| (byte_letter(byte).to_string(), json!(byte))).collect();
    let added: Vec<Value> =
        (256..).zip(special).map(|(id, content)| added_token(id, content, true)).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true});
    json!({"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level,
        "decoder": byte_level, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}})
}

/// An entry of a tokenizer's `added_tokens`; only special tokens are matched verbatim.
pub fn added_token(id: u32, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": !special, "special": special})
}

/// GPT-2's letter for a byte: the byte itself if printable, otherwise the next one from U+0100 on.
fn byte_letter(byte: u32) -> char {
    let prints =
        |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let code =
        if prints(byte) { byte } else { 256 + (0..byte).filter(|&b| !prints(b)).count() as u32 };
    char::from_u32(code).unwrap()
}
