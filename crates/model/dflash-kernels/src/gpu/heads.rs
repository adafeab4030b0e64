//! Head norms, rotation, and the destination of keys and values.

use std::ptr::null_mut;

use tch::{Kind, Tensor};

use super::launch::{Kernel, Launch, Moves, Runner};
use super::{
    Data, SHARING_BLOCKS, check_alike, check_float, column_sums, data, empty, optional,
    strided_rows,
};

pub(super) const HEADS: Kernel = Kernel { name: "heads", threads: 256 };
pub(super) const HEADS_BACKWARD: Kernel = Kernel { name: "heads_backward", threads: 256 };

/// Norms and rotation of heads. Without a query norm the rows hold no queries.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// `[D]`.
    pub query: Option<&'a Tensor>,
    /// `[D]`.
    pub key: &'a Tensor,
    /// Added to the mean of squares.
    pub eps: f64,
    /// Table for the rows' positions, [N, D / 2], float32.
    pub cosine: &'a Tensor,
    /// Same shape as `cosine`.
    pub sine: &'a Tensor,
}

impl HeadNorms<'_> {
    fn dim(&self) -> i64 {
        self.key.numel() as i64
    }

    fn check(&self, x: &Tensor) {
        let (rows, dim) = (x.size()[0], self.dim());
        assert!([self.cosine, self.sine].iter().all(|table| table.size() == [rows, dim / 2]));
        check_float(&[self.cosine, self.sine]);
        let weights: Vec<&Tensor> = self.query.into_iter().chain([self.key]).collect();
        assert!(weights.iter().all(|w| w.numel() as i64 == dim && w.kind() == x.kind()));
        check_alike(&weights);
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.query.into_iter().chain([self.key, self.cosine, self.sine])
    }
}

/// Head norms (optional) and rotation, for passes outside training.
#[derive(Clone, Copy, Debug)]
pub struct HeadTurn<'a> {
    /// Query and key norm weights `[D]`; no query norm if the rows hold no queries.
    pub norms: Option<(Option<&'a Tensor>, &'a Tensor)>,
    /// Added to the mean of squares.
    pub eps: f64,
    /// Table for the rows' positions, [N, D / 2], float32.
    pub cosine: &'a Tensor,
    /// Same shape as `cosine`.
    pub sine: &'a Tensor,
}

/// Destination of keys and values [N, kv heads, D], contiguous in D: rows of a cache.
#[derive(Clone, Copy, Debug)]
pub struct KeyRoom<'a> {
    /// Gets normed and rotated keys.
    pub key: &'a Tensor,
    /// Gets the values; `None` leaves them in `x`.
    pub value: Option<&'a Tensor>,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Heads {
    x: Data,
    query_weight: Data,
    key_weight: Data,
    cosine: Data,
    sine: Data,
    query: Data,
    key: Data,
    value: Data,
    rows: i64,
    stride: i64,
    key_row: i64,
    key_head: i64,
    value_row: i64,
    value_head: i64,
    query_heads: i32,
    key_heads: i32,
    dim: i32,
    eps: f32,
}

/// Normed and rotated queries [N, heads, D] and keys [N, kv heads, D] of `x` [N, (heads + 2 kv
/// heads) * D], which holds queries, keys and values (rows may be part of wider rows).
pub fn heads(
    runner: Runner,
    x: &Tensor,
    norms: &HeadNorms<'_>,
    kv_heads: i64,
) -> (Option<Tensor>, Tensor) {
    norms.check(x);
    let HeadNorms { query, key, eps, cosine, sine } = *norms;
    let turn = HeadTurn { norms: Some((query, key)), eps, cosine, sine };
    let key = empty(&[x.size()[0], kv_heads, norms.dim()], x.kind(), x);
    let query = heads_to(runner, x, &turn, KeyRoom { key: &key, value: None });
    assert_eq!(query.is_some(), norms.query.is_some(), "a norm for queries, and none for none");
    (query, key)
}

/// [`heads`] that writes keys and values to `room`; returns the queries, if the rows hold any.
pub fn heads_to(
    runner: Runner,
    x: &Tensor,
    turn: &HeadTurn<'_>,
    room: KeyRoom<'_>,
) -> Option<Tensor> {
    let (rows, stride) = strided_rows(x);
    let [_, key_heads, dim] = room.key.size()[..] else {
        panic!("a room for keys has rows and heads")
    };
    let query_heads = x.size()[1] / dim - 2 * key_heads;
    assert_eq!(x.size()[1], (query_heads + 2 * key_heads) * dim);
    assert!([turn.cosine, turn.sine].iter().all(|table| table.size() == [rows, dim / 2]));
    check_float(&[turn.cosine, turn.sine]);
    let (query_weight, key_weight) = turn.norms.map_or((None, None), |(q, k)| (q, Some(k)));
    let weights: Vec<&Tensor> = query_weight.into_iter().chain(key_weight).collect();
    assert!(weights.iter().all(|w| w.numel() as i64 == dim && w.kind() == x.kind()));
    check_alike(&weights);
    let has_query_weight = query_heads > 0 && key_weight.is_some();
    assert_eq!(query_weight.is_some(), has_query_weight, "norms are of all heads or of none");
    let ((key_row, key_head), (value_row, value_head)) = (
        room_strides(room.key, x, [rows, key_heads, dim]),
        match room.value {
            Some(value) => room_strides(value, x, [rows, key_heads, dim]),
            None => (0, 0),
        },
    );
    let query = (query_heads > 0).then(|| empty(&[rows, query_heads, dim], x.kind(), x));
    let reads: Vec<&Tensor> = weights.into_iter().chain([turn.cosine, turn.sine, x]).collect();
    let writes: Vec<&Tensor> = query.iter().chain([room.key]).chain(room.value).collect();
    let all: Vec<&Tensor> = reads.iter().chain(&writes).copied().collect();
    let copied = if room.value.is_some() { key_heads } else { 0 };
    let sizes = [dim / 2, stride, key_row, key_head, value_row, value_head];
    let warps = u64::from(HEADS.threads / 32);
    Launch {
        kernel: HEADS,
        instance: Moves::Pair.instance(runner, x.kind(), &all, &sizes),
        blocks: (rows * (query_heads + key_heads + copied)).unsigned_abs().div_ceil(warps) as i64,
        shared: 0,
        reads: &reads,
        writes: &writes,
    }
    .run(runner, || Heads {
        x: data(x),
        query_weight: optional(query_weight),
        key_weight: optional(key_weight),
        cosine: data(turn.cosine),
        sine: data(turn.sine),
        query: optional(query.as_ref()),
        key: data(room.key),
        value: room.value.map_or(null_mut(), data),
        rows,
        stride,
        key_row,
        key_head,
        value_row,
        value_head,
        query_heads: query_heads as i32,
        key_heads: key_heads as i32,
        dim: dim as i32,
        eps: turn.eps as f32,
    });
    query
}

/// Row and head strides of `room`, for `heads` [N, kv heads, D] of the type of `x`.
fn room_strides(room: &Tensor, x: &Tensor, heads: [i64; 3]) -> (i64, i64) {
    let (size, stride) = (room.size(), room.stride());
    assert!(size == heads && room.kind() == x.kind(), "a room of {size:?} for {heads:?}");
    assert!(stride[2] == 1, "a kernel needs the elements of a head side by side, got {stride:?}");
    (stride[0], stride[1])
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct HeadsBackward {
    x: Data,
    query_weight: Data,
    key_weight: Data,
    cosine: Data,
    sine: Data,
    dquery: Data,
    dkey: Data,
    dvalue: Data,
    partial: Data,
    rows: i64,
    stride: i64,
    query_heads: i32,
    key_heads: i32,
    dim: i32,
    eps: f32,
}

/// Gradients of the outputs of [`heads`] and of the values, float32.
#[derive(Clone, Copy, Debug)]
pub struct HeadGradients<'a> {
    /// Shape [N, heads, D]; `None` if the rows hold no queries.
    pub query: Option<&'a Tensor>,
    /// Shape [N, kv heads, D].
    pub key: &'a Tensor,
    /// Shape [N, kv heads, D].
    pub value: &'a Tensor,
}

/// Overwrites the input `x` of [`heads`] with its gradient. The query and key norm gradients are
/// added to `dweights`.
pub fn heads_backward(
    runner: Runner,
    x: &Tensor,
    norms: &HeadNorms<'_>,
    d: &HeadGradients<'_>,
    dquery_weight: &Tensor,
    dkey_weight: &Tensor,
) {
    norms.check(x);
    let ((rows, stride), dim) = (strided_rows(x), norms.dim());
    let heads = |x: &Tensor| x.size()[1];
    let (query_heads, key_heads) = (d.query.map_or(0, heads), heads(d.key));
    let gradients: Vec<&Tensor> = d.query.into_iter().chain([d.key, d.value]).collect();
    check_float(&gradients);
    assert!(gradients.iter().all(|d| d.size()[0] == rows && d.size()[2] == dim));
    assert!(d.value.size() == d.key.size() && d.query.is_some() == norms.query.is_some());
    assert_eq!(x.size()[1], (query_heads + 2 * key_heads) * dim);
    let weights = 1 + i64::from(d.query.is_some());
    let warps = i64::from(HEADS_BACKWARD.threads / 32);
    let items = rows * (query_heads + 2 * key_heads);
    let blocks = (items.unsigned_abs().div_ceil(warps as u64) as i64).min(SHARING_BLOCKS);
    let partial = empty(&[blocks, weights * dim], Kind::Float, x);
    let reads: Vec<&Tensor> = norms.tensors().chain([x]).chain(gradients).collect();
    Launch {
        kernel: HEADS_BACKWARD,
        instance: Moves::Pair.instance(runner, x.kind(), &reads, &[dim / 2, stride]),
        blocks,
        shared: warps * weights * dim,
        reads: &reads,
        writes: &[x, &partial],
    }
    .run(runner, || HeadsBackward {
        x: data(x),
        query_weight: optional(norms.query),
        key_weight: data(norms.key),
        cosine: data(norms.cosine),
        sine: data(norms.sine),
        dquery: optional(d.query),
        dkey: data(d.key),
        dvalue: data(d.value),
        partial: data(&partial),
        rows,
        stride,
        query_heads: query_heads as i32,
        key_heads: key_heads as i32,
        dim: dim as i32,
        eps: norms.eps as f32,
    });
    match d.query {
        Some(_) => column_sums(runner, &partial, dquery_weight, Some(dkey_weight)),
        None => column_sums(runner, &partial, dkey_weight, None),
    }
}
