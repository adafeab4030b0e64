//! Measures how fast an endpoint, ours or a stock vLLM, delivers hidden states:
//!
//! `cargo run --release -p dflash-hidden-states --example fetch_rate -- ENDPOINT LAYERS HIDDEN
//! [SAMPLES TOKENS IN_FLIGHT]`, for instance `localhost:8000 2,3,5,6 256 200 216 8`.

use std::time::Instant;

use dflash_hidden_states::{Error, Request, Stream, StreamConfig, WantedRow};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.len() < 3 {
        eprintln!("usage: fetch_rate ENDPOINT LAYERS HIDDEN [SAMPLES TOKENS IN_FLIGHT]");
        std::process::exit(2);
    }
    if let Err(error) = run(&args) {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        eprintln!("error: {error}{}", cause.unwrap_or_default());
        std::process::exit(1);
    }
}

fn run(args: &[String]) -> Result<(), Error> {
    let number = |index: usize, default: usize| {
        args.get(index).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (samples, tokens) = (number(3, 200), number(4, 216));
    let layer_ids = args[1].split(',').filter_map(|id| id.parse().ok()).collect();
    let mut config = StreamConfig::new(vec![args[0].clone()], layer_ids, number(2, 256));
    config.max_in_flight = number(5, 8);
    // Every prompt differs from the first token on, so that no server can reuse a prefix.
    let row = move |sample: usize| {
        let ids = (0..tokens).map(|token| ((sample * 131 + token * 17) % 4000) as i64);
        let requests = vec![Request { sample: sample as u64, input_ids: ids.collect() }];
        Ok::<_, Error>(WantedRow { row: (), requests })
    };
    let mut stream = Stream::start(config, (0..samples).map(row))?;
    let start = Instant::now();
    while let Some(row) = stream.next_row() {
        row?;
    }
    let (seconds, counters) = (start.elapsed().as_secs_f64(), stream.counters());
    let rate = |count: f64| count / seconds;
    println!(
        "{:.1} samples/s, {:.0} tokens/s, {:.1} MB/s; {counters:?}",
        rate(counters.generated as f64),
        rate((counters.generated as usize * tokens) as f64),
        rate(counters.bytes as f64 / 1e6),
    );
    Ok(())
}
