//! Times the two methods of splitting a draft's attention alternately on this CPU:
//!
//! `cargo run --release --workspace --example attention_methods -- TOKENS DOCUMENTS ANCHORS BLOCK
//! KV_HEADS GROUP HEAD_DIM [WINDOW [ROUNDS]]`, for instance `2048 8 128 16 8 4 128`; a WINDOW of 0
//! means full attention.

use std::time::Instant;

use dflash_draft::attention::{
    AttentionShape, BlockAttention, BlockPlan, KeyValue, Method, Visibility,
};
use dflash_tensor::Kernels;
use tch::{Device, Kind, Tensor, no_grad};

fn main() {
    let numbers: Result<Vec<usize>, _> = std::env::args().skip(1).map(|arg| arg.parse()).collect();
    match numbers.as_deref() {
        Ok(&[tokens, documents, anchors, block, kv_heads, group, head_dim, ref more @ ..])
            if documents * 2 <= tokens && anchors <= tokens =>
        {
            let window = more.first().copied().unwrap_or(0);
            let rounds = more.get(1).copied().unwrap_or(7);
            let heads = [kv_heads, group, head_dim].map(|number| number as i64);
            no_grad(|| compare((tokens, documents, anchors, block), heads, window, rounds.max(1)));
        }
        _ => {
            eprintln!(
                "usage: attention_methods TOKENS DOCUMENTS ANCHORS BLOCK KV_HEADS GROUP HEAD_DIM [WINDOW [ROUNDS]]"
            );
            std::process::exit(2);
        }
    }
}

/// Prints milliseconds of each method, forward and backward, and the ratio of their sums.
fn compare(
    (tokens, documents, anchors, block): (usize, usize, usize, usize),
    [kv_heads, group, head_dim]: [i64; 3],
    window: usize,
    rounds: usize,
) {
    let visibility = if window == 0 { Visibility::FULL } else { Visibility::sliding(window) };
    let starts: Vec<usize> = (0..=documents).map(|index| index * tokens / documents).collect();
    // Evenly spaced, as random anchors are on average.
    let anchors: Vec<usize> = (0..anchors).map(|index| index * tokens / anchors).collect();
    let plan = BlockPlan::new(&starts, &anchors, block, &[visibility]);
    let (slots, context) = (plan.slots() as i64, plan.context_rows() as i64);
    tch::manual_seed(0);
    // In the memory layout of the draft's kernels.
    let random = |rows: i64, group: i64| {
        Tensor::randn([rows, group, kv_heads, head_dim], (Kind::Float, Device::Cpu))
            .permute([2, 0, 1, 3])
    };
    let keys = |rows| KeyValue {
        k_jtd: random(rows, 1).squeeze_dim(2),
        v_jtd: random(rows, 1).squeeze_dim(2),
    };
    let (q, dout) = (random(slots, group), random(slots, group));
    let (context, own) = (keys(context), keys(slots));
    let shape = |method| AttentionShape {
        queries_per_kv: group,
        head_dim,
        device: Device::Cpu,
        kind: Kind::Float,
        kernels: Kernels::Fast,
        method,
    };
    let methods = [Method::Chunks, Method::Halves];
    let ways = methods.map(|method| BlockAttention::new(&plan, &visibility, &shape(method)));
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (attention, times) in ways.iter().zip(&mut times) {
            let begun = Instant::now();
            let attended = attention.forward(&q, &context, &own);
            let forward = begun.elapsed().as_secs_f64() * 1e3;
            drop(attention.backward(&dout, &q, &context, &own, &attended));
            times.push((forward, begun.elapsed().as_secs_f64() * 1e3 - forward));
        }
    }
    let median = |times: &[(f64, f64)], pick: fn(&(f64, f64)) -> f64| {
        let mut values: Vec<f64> = times.iter().map(pick).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let mut sums = Vec::new();
    for (method, times) in methods.iter().zip(&times) {
        let (forward, backward) = (median(times, |it| it.0), median(times, |it| it.1));
        println!("{method:?}: {forward:.1} ms forward, {backward:.1} ms backward");
        sums.push(median(times, |it| it.0 + it.1));
    }
    println!("Halves / Chunks: {:.2}", sums[1] / sums[0]);
}
