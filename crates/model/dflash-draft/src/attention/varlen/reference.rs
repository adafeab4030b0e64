//! Reference implementation of the variable-length GPU kernels: dense, sequence by sequence, from
//! the same tensors. Rejects what a kernel would reject or misread.

use dflash_torch_sys::flash::{Sequences, Window};
use tch::{Kind, Tensor};

use super::{CallGradient, Results};

/// Consecutive rows.
#[derive(Clone, Copy)]
struct RowSpan {
    first: i64,
    rows: i64,
}

/// A sequence's queries and keys, and the visible pairs.
struct Sequence {
    queries: RowSpan,
    keys: RowSpan,
    visible: Tensor,
}

/// The sequences described by the tensors, with the total numbers of queries and keys.
fn sequences(of: &Sequences, all_queries: i64, all_keys: i64) -> Vec<Sequence> {
    let queries = spans(&of.cu_q, of.max_q, all_queries);
    let keys = spans(&of.cu_k, of.max_k, all_keys);
    assert_eq!(queries.len(), keys.len());
    let one = |(queries, keys): (RowSpan, RowSpan)| Sequence {
        queries,
        keys,
        visible: visible(of.window, queries.rows, keys.rows),
    };
    queries.into_iter().zip(keys).map(one).collect()
}

/// Each sequence's rows.
fn spans(ends: &Tensor, longest: i64, total: i64) -> Vec<RowSpan> {
    assert_eq!((ends.kind(), ends.dim()), (Kind::Int, 1), "kernels read int32");
    assert!(ends.is_contiguous());
    let ends = Vec::<i32>::try_from(ends).unwrap();
    assert_eq!((ends[0], i64::from(ends[ends.len() - 1])), (0, total), "rows beside all sequences");
    let span = |pair: &[i32]| {
        let (first, end) = (i64::from(pair[0]), i64::from(pair[1]));
        RowSpan { first, rows: end - first }
    };
    let spans: Vec<RowSpan> = ends.windows(2).map(span).collect();
    assert!(spans.iter().all(|span| span.rows > 0), "infinities for an empty sequence");
    assert_eq!(spans.iter().map(|span| span.rows).max(), Some(longest));
    spans
}

/// Positions are aligned at the end: the last query and the last key coincide.
fn visible(window: Window, queries: i64, keys: i64) -> Tensor {
    let options = (Kind::Int64, tch::Device::Cpu);
    let behind = Tensor::arange(keys, options).unsqueeze(0)
        - Tensor::arange(queries, options).unsqueeze(1)
        - (keys - queries);
    let before = window.left.map_or(i64::MIN, |left| -left);
    let after = window.right.unwrap_or(i64::MAX);
    behind.ge(before).logical_and(&behind.le(after))
}

/// Scores [heads, queries, keys] of one sequence, minus infinity where hidden.
fn scores(one: &Sequence, scale: f64, q: &Tensor, k: &Tensor) -> Tensor {
    let scores = q.transpose(0, 1).matmul(&k.permute([1, 2, 0])) * scale;
    scores.masked_fill(&one.visible.logical_not(), f64::NEG_INFINITY)
}

/// Keys or values repeated for each query head: head h uses head h / group.
fn expanded(x: &Tensor, heads: i64) -> Tensor {
    let kv_heads = x.size()[1];
    assert_eq!(heads % kv_heads, 0);
    let of: Vec<i64> = (0..heads).map(|head| head / (heads / kv_heads)).collect();
    x.index_select(1, &Tensor::from_slice(&of))
}

fn check(q: &Tensor, k: &Tensor, v: &Tensor) {
    for x in [q, k, v] {
        assert_eq!((x.dim(), x.stride()[2]), (3, 1), "kernels read heads whole");
    }
    assert_eq!((k.size(), k.size()[2]), (v.size(), q.size()[2]));
}

fn part(x: &Tensor, span: RowSpan) -> Tensor {
    x.narrow(0, span.first, span.rows)
}

pub(super) fn for_each_pair(of: &Sequences, mut pair: impl FnMut(usize, usize)) {
    let end = |ends: &Tensor| ends.int64_value(&[-1]);
    for one in sequences(of, end(&of.cu_q), end(&of.cu_k)) {
        let visible = Vec::<bool>::try_from(one.visible.flatten(0, 1)).unwrap();
        for (query, row) in visible.chunks(one.keys.rows as usize).enumerate() {
            for key in (0..row.len()).filter(|&key| row[key]) {
                pair(one.queries.first as usize + query, one.keys.first as usize + key);
            }
        }
    }
}

pub(super) fn forward(
    of: &Sequences,
    scale: f64,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> (Tensor, Tensor) {
    check(q, k, v);
    let heads = q.size()[1];
    let (k, v) = (expanded(k, heads), expanded(v, heads));
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for one in sequences(of, q.size()[0], k.size()[0]) {
        let scores = scores(&one, scale, &part(q, one.queries), &part(&k, one.keys));
        lse.push(scores.logsumexp([-1i64].as_slice(), false));
        let weights = scores.softmax(-1, None::<Kind>);
        out.push(weights.matmul(&part(&v, one.keys).transpose(0, 1)).transpose(0, 1));
    }
    (Tensor::cat(&out, 0), Tensor::cat(&lse, 1))
}

pub(super) fn backward(
    of: &Sequences,
    scale: f64,
    Results { out, lse, dout }: &Results,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> CallGradient {
    check(q, k, v);
    let (heads, kv_heads) = (q.size()[1], k.size()[1]);
    assert!(lse.is_contiguous(), "kernels read the log-sum-exp head by head");
    assert_eq!(lse.size(), [heads, q.size()[0]]);
    assert_eq!((out.size(), dout.size()), (q.size(), q.size()));
    let (k, v) = (expanded(k, heads), expanded(v, heads));
    let by_head = |x: &Tensor, rows: RowSpan| part(x, rows).transpose(0, 1);
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    for one in sequences(of, q.size()[0], k.size()[0]) {
        let (rows, keys) = (one.queries, one.keys);
        let lse = lse.narrow(1, rows.first, rows.rows).unsqueeze(-1);
        let p = (scores(&one, scale, &part(q, rows), &part(&k, keys)) - lse).exp();
        let dout = by_head(dout, rows);
        let delta = (&dout * by_head(out, rows)).sum_dim_intlist([-1i64].as_slice(), true, None);
        let ds = &p * (dout.matmul(&part(&v, keys).permute([1, 2, 0])) - delta) * scale;
        dq.push(ds.matmul(&by_head(&k, keys)).transpose(0, 1));
        dk.push(ds.transpose(1, 2).matmul(&by_head(q, rows)).transpose(0, 1));
        dv.push(p.transpose(1, 2).matmul(&dout).transpose(0, 1));
    }
    // The gradient of a shared head is the sum over its group.
    let join = |parts: &[Tensor]| {
        let group = Tensor::cat(parts, 0).unflatten(1, [kv_heads, heads / kv_heads]);
        group.sum_dim_intlist([2i64].as_slice(), false, None)
    };
    CallGradient { dq: Tensor::cat(&dq, 0), dk: join(&dk), dv: join(&dv) }
}
