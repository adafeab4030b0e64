//! Prints the identity of a model's directory and how long it took, in a fresh process.
//!
//! `cargo run --release --workspace --example identity -- DIR`

use std::path::Path;
use std::time::Instant;

use dflash_identity::{TargetIdentity, tokenizer_digest};

fn main() {
    let name = std::env::args().nth(1).expect("the directory of a model");
    let dir = Path::new(&name);
    let begun = Instant::now();
    match TargetIdentity::read(dir, &name) {
        Ok(identity) => println!("{identity} in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3),
        Err(error) => println!("{error}"),
    }
    let begun = Instant::now();
    match tokenizer_digest(dir) {
        Ok(digest) => {
            println!("tokenizer {digest:?} in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3)
        }
        Err(error) => println!("{error}"),
    }
}
