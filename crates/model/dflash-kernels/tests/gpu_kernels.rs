//! The GPU kernels, emulated on the CPU, compared with their formulas in float64: both types,
//! widths with and without a remainder, more rows than blocks.

use dflash_kernels::gpu::{self, HeadGradients, HeadNorms, HeadTurn, KeyRoom, Runner};
use dflash_kernels::kernels::{self, RmsWeight};
use dflash_test_support::{Rng, alone, random};
use tch::{Device, IndexOp, Kind, Tensor};

const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];
const RUNNER: Runner = Runner::Emulation;
const EPS: f64 = 1e-6;

/// Standard normal numbers exactly representable in `kind`.
fn normal(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind)
}

fn wide(x: &Tensor) -> Tensor {
    x.to_kind(Kind::Double)
}

/// Tolerance: one rounding to the result's type, after float32 sums.
fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let relative = if found.kind() == Kind::BFloat16 { 2f64.powi(-8) } else { 2e-6 };
    let scale = expected.abs().max().double_value(&[]).max(1.0);
    let excess = (wide(found) - expected).abs() - expected.abs() * relative - 3e-6 * scale;
    let worst = excess.max().double_value(&[]);
    assert!(worst <= 0.0, "{what} in {:?}: {worst:e} beyond the bound, of {scale}", found.kind());
}

fn scale(x: &Tensor) -> Tensor {
    (x.square().mean_dim([-1i64].as_slice(), true, Kind::Double) + EPS).rsqrt()
}

/// Gradients of `x * scale(x) * w` for x and, per row, for w.
fn norm_backward(dy: &Tensor, x: &Tensor, w: &Tensor) -> (Tensor, Tensor) {
    let normed = x * scale(x);
    let dnormed = dy * w;
    let along = (&dnormed * &normed).mean_dim([-1i64].as_slice(), true, Kind::Double);
    ((dnormed - &normed * along) * scale(x), dy * normed)
}

fn rows_sum(x: &Tensor) -> Tensor {
    x.sum_dim_intlist([0i64].as_slice(), false, Kind::Double)
}

#[test]
fn norms() {
    let _alone = alone();
    tch::manual_seed(random().random());
    for kind in KINDS {
        for (rows, dim) in [(1, 1), (7, 33), (3, 64), (4, 2056), (541, 24)] {
            let x = normal(&[rows, dim], kind);
            // Away from zero: a row of one element nearly cancels, the more the smaller it is.
            let x = &x + x.sign();
            let (w, dy, residual) =
                (normal(&[dim], kind), normal(&[rows, dim], kind), normal(&[rows, dim], kind));
            let what = format!("{rows} x {dim}");
            let (dx, dw) = norm_backward(&wide(&dy), &wide(&x), &wide(&w));
            let y = wide(&x) * scale(&wide(&x)) * wide(&w);
            assert_close(&what, &gpu::rms_norm(RUNNER, &x, &w, EPS), &y);

            let dweight = Tensor::ones([dim], (Kind::Float, Device::Cpu));
            let mut found = dy.copy();
            let (again, norm) = (x.empty_like(), RmsWeight { weight: &w, eps: EPS });
            let (residual_in, again_in) = (Some(&residual), Some(&again));
            gpu::rms_norm_backward(RUNNER, &mut found, &x, norm, residual_in, again_in, &dweight);
            assert_close(&what, &found, &(&dx + wide(&residual)));
            assert_close(&what, &again, &y);
            assert_close(&what, &dweight, &(rows_sum(&dw) + 1.0));
            let mut found = dy.copy();
            gpu::rms_norm_backward(RUNNER, &mut found, &x, norm, None, None, &dweight);
            assert_close(&what, &found, &dx);
            assert_close(&what, &dweight, &(rows_sum(&dw) * 2.0 + 1.0));
        }
    }
}

/// [N, heads, D] rotated by the tables, or back.
fn turned(x: &Tensor, (cosine, sine): (&Tensor, &Tensor), back: bool) -> Tensor {
    let halves = x.chunk(2, -1);
    let (c, s) = (wide(cosine).unsqueeze(1), wide(sine).unsqueeze(1));
    let s = if back { -s } else { s };
    let (low, high) = (&halves[0], &halves[1]);
    Tensor::cat(&[low * &c - high * &s, high * &c + low * &s], -1)
}

#[test]
fn heads() {
    let _alone = alone();
    tch::manual_seed(random().random());
    let shapes = [(1, 1, 1, 2), (5, 6, 2, 6), (3, 2, 1, 128), (2, 4, 2, 130), (700, 4, 1, 8)];
    for kind in KINDS {
        for (n, query_heads, kv_heads, dim) in shapes {
            for with_queries in [true, false] {
                let query_heads = if with_queries { query_heads } else { 0 };
                check_heads(kind, n, (query_heads, kv_heads, dim));
            }
        }
    }
}

fn check_heads(kind: Kind, n: i64, (query_heads, kv_heads, dim): (i64, i64, i64)) {
    let what = format!("{n} rows, {query_heads} + {kv_heads} heads of {dim}");
    let heads = query_heads + 2 * kv_heads;
    // The rows are slices of wider ones.
    let whole = normal(&[n, (heads + 2) * dim], kind);
    let x = whole.narrow(1, dim, heads * dim);
    let raw = wide(&x).unflatten(1, [heads, dim]).copy();
    let (query, key) = (normal(&[dim], kind), normal(&[dim], kind));
    let angles = Tensor::rand([n, dim / 2], (Kind::Float, Device::Cpu)) * 6.0;
    let (cosine, sine) = (angles.cos(), angles.sin());
    let tables = (&cosine, &sine);
    let with_queries = query_heads > 0;
    let norms = HeadNorms {
        query: with_queries.then_some(&query),
        key: &key,
        eps: EPS,
        cosine: &cosine,
        sine: &sine,
    };
    let parts = raw.split_with_sizes([query_heads, kv_heads, kv_heads], 1);
    let weights = [wide(&query), wide(&key)];
    let (q, k) = gpu::heads(RUNNER, &x, &norms, kv_heads);
    for (found, (part, w)) in [q, Some(k)].iter().zip(parts.iter().zip(&weights)) {
        if let Some(found) = found {
            assert_close(&what, found, &turned(&(part * scale(part) * w), tables, false));
        }
    }

    let gradient = |heads: i64| Tensor::randn([n, heads, dim], (Kind::Float, Device::Cpu));
    let [dq, dk, dv] = [query_heads, kv_heads, kv_heads].map(gradient);
    let d = HeadGradients { query: with_queries.then_some(&dq), key: &dk, value: &dv };
    let dweights = [1.0, 2.0].map(|x| Tensor::full([dim], x, (Kind::Float, Device::Cpu)));
    let outside = whole.narrow(1, 0, dim).copy();
    gpu::heads_backward(RUNNER, &x, &norms, &d, &dweights[0], &dweights[1]);
    let mut expected = Vec::new();
    for (index, d) in [dq, dk].iter().enumerate() {
        let back = turned(&wide(d), tables, true);
        let (dx, dw) = norm_backward(&back, &parts[index], &weights[index]);
        let dw = dw.sum_dim_intlist([0i64, 1].as_slice(), false, Kind::Double);
        assert_close(&what, &dweights[index], &(dw + (index + 1) as f64));
        expected.push(dx);
    }
    expected.push(wide(&dv));
    assert_close(&what, &x.unflatten(1, [heads, dim]), &Tensor::cat(&expected, 1));
    assert!(whole.narrow(1, 0, dim).equal(&outside), "{what}: wrote outside");
}

/// Writes into a cache laid out by head: keys rotated, values unchanged, and nothing around them.
#[test]
fn heads_go_where_a_cache_keeps_them() {
    let _alone = alone();
    tch::manual_seed(random().random());
    let shapes = [(1, 2, 1, 4), (5, 6, 2, 6), (3, 0, 2, 128), (2, 4, 2, 130), (70, 4, 1, 8)];
    for kind in KINDS {
        for (n, query_heads, kv_heads, dim) in shapes {
            for (is_normed, keeps_values) in [(true, true), (false, true), (false, false)] {
                let shape = (n, (query_heads, kv_heads, dim));
                check_heads_kept(kind, shape, (is_normed, keeps_values));
            }
        }
    }
}

fn check_heads_kept(
    kind: Kind,
    (n, (query_heads, kv_heads, dim)): (i64, (i64, i64, i64)),
    (is_normed, keeps_values): (bool, bool),
) {
    let what = format!("{n} rows, {query_heads} + {kv_heads} heads of {dim}, norms: {is_normed}");
    let x = normal(&[n, (query_heads + 2 * kv_heads) * dim], kind);
    let heads = x.unflatten(1, [query_heads + 2 * kv_heads, dim]);
    let parts = heads.split_with_sizes([query_heads, kv_heads, kv_heads], 1);
    let (query, key) = (normal(&[dim], kind), normal(&[dim], kind));
    let angles = Tensor::rand([n, dim / 2], (Kind::Float, Device::Cpu)) * 6.0;
    let (cosine, sine) = (angles.cos(), angles.sin());
    let norms = is_normed.then_some(((query_heads > 0).then_some(&query), &key));
    let turn = HeadTurn { norms, eps: EPS, cosine: &cosine, sine: &sine };
    // Room for two rows before and three after.
    let caches = [0, 1].map(|_| Tensor::full([kv_heads, n + 5, dim], 9.0, (kind, Device::Cpu)));
    let rooms = caches.each_ref().map(|cache| cache.narrow(1, 2, n).transpose(0, 1));
    let room = KeyRoom { key: &rooms[0], value: keeps_values.then_some(&rooms[1]) };
    let found = gpu::heads_to(RUNNER, &x, &turn, room);
    assert_eq!(found.is_some(), query_heads > 0, "{what}");
    let expected = |part: &Tensor, weight: &Tensor| {
        let raw = wide(part);
        let normed = if is_normed { &raw * scale(&raw) * wide(weight) } else { raw };
        turned(&normed, (&cosine, &sine), false)
    };
    if let Some(found) = found {
        assert_close(&what, &found, &expected(&parts[0], &query));
    }
    assert_close(&what, &rooms[0], &expected(&parts[1], &key));
    if keeps_values {
        assert_eq!(rooms[1], parts[2], "{what}");
    }
    for cache in &caches {
        for (start, rows) in [(0, 2), (n + 2, 3)] {
            let outside = cache.narrow(1, start, rows);
            assert!(outside.equal(&outside.full_like(9.0)), "{what}: wrote outside");
        }
    }
}

/// The values' gradients are only rounded: to bfloat16 as libtorch rounds.
#[test]
fn bfloat16_is_rounded_to_even() {
    let _alone = alone();
    tch::manual_seed(random().random());
    let tie = 2f32.powi(-8);
    let special = [
        1.0 + tie,
        1.0 + 3.0 * tie,
        1.0 + tie * 1.001,
        f32::NAN,
        f32::INFINITY,
        -0.0,
        1e-40,
        f32::MAX,
    ];
    let many = Tensor::randn([1024 - 8], (Kind::Float, Device::Cpu));
    let dv = Tensor::cat(&[Tensor::from_slice(&special), many], 0).view([8, 1, 128]);
    let x = normal(&[8, 256], Kind::BFloat16);
    let (key, dk) = (normal(&[128], Kind::BFloat16), dv.zeros_like());
    let cosine = Tensor::ones([8, 64], (Kind::Float, Device::Cpu));
    let norms = HeadNorms { query: None, key: &key, eps: EPS, cosine: &cosine, sine: &cosine };
    let d = HeadGradients { query: None, key: &dk, value: &dv };
    let dweight = Tensor::zeros([128], (Kind::Float, Device::Cpu));
    gpu::heads_backward(RUNNER, &x, &norms, &d, &dweight, &dweight);
    let bits = |x: &Tensor| {
        Vec::<i16>::try_from(x.contiguous().view([-1]).view_dtype(Kind::Int16)).unwrap()
    };
    let expected = dv.to_kind(Kind::BFloat16).view([8, 128]);
    let (mut found, mut expected) = (bits(&x.narrow(1, 128, 128)), bits(&expected));
    // All NaNs are equal.
    let nan = |bits: i16| bits & 0x7fff > 0x7f80;
    assert!(nan(found[3]) && nan(expected[3]));
    (found[3], expected[3]) = (0, 0);
    assert_eq!(found, expected);
}

#[test]
fn swiglu() {
    let _alone = alone();
    tch::manual_seed(random().random());
    for kind in KINDS {
        for (rows, dim) in [(1, 1), (5, 37), (3, 4096)] {
            let (gate_up, dy) = (normal(&[rows, 2 * dim], kind) * 8.0, normal(&[rows, dim], kind));
            let halves = wide(&gate_up).chunk(2, -1);
            let (share, up) = (halves[0].sigmoid(), &halves[1]);
            let silu = &halves[0] * &share;
            let what = format!("{rows} x {dim}");
            assert_close(&what, &gpu::swiglu(RUNNER, &gate_up), &(&silu * up));
            let dgate = wide(&dy) * up * (&share + &silu * (1.0 - &share));
            let expected = Tensor::cat(&[dgate, wide(&dy) * &silu], -1);
            let (mut value, mut gradient) = (dy.copy(), gate_up.copy());
            gpu::swiglu_backward(RUNNER, &mut value, &mut gradient);
            assert_close(&what, &value, &(&silu * up));
            assert_close(&what, &gradient, &expected);
        }
    }
}

#[test]
fn cross_entropy() {
    let _alone = alone();
    let mut draws = random();
    tch::manual_seed(draws.random());
    for kind in KINDS {
        for (rows, vocab) in [(1, 1), (3, 37), (5, 1000), (4, 4104), (2, 9999)] {
            let logits = normal(&[rows, vocab], kind) * 5.0;
            let labels: Vec<i64> = (0..rows).map(|_| draws.random_range(0..vocab)).collect();
            let labels = Tensor::from_slice(&labels);
            // The label is the argmax of the first row, by a margin or tied with a later one.
            let _ = logits.i((0, labels.int64_value(&[0]))).fill_(40.0);
            let _ = logits.i((0, vocab - 1)).fill_(40.0);
            let weight = Tensor::rand([rows], (Kind::Float, Device::Cpu));
            let what = format!("{rows} x {vocab}");
            let log_q = wide(&logits).log_softmax(-1, Kind::Double);
            let ce = -log_q.gather(1, &labels.unsqueeze(1), false).squeeze_dim(1);
            let mut gradient = logits.copy();
            let found = gpu::cross_entropy(RUNNER, &gradient, &labels);
            assert_close(&what, &found.ce_m, &ce);
            let correct = logits.max_dim(1, false).1.eq_tensor(&labels);
            assert!(found.correct_m.equal(&correct.to_kind(Kind::Float)), "{what}");
            found.gradient(&mut gradient, &labels, &weight);
            let one = wide(&logits).zeros_like().scatter_value(1, &labels.unsqueeze(1), 1.0);
            assert_close(&what, &gradient, &((log_q.exp() - one) * wide(&weight).unsqueeze(1)));
            if kind == Kind::Float {
                let mut exponentials = logits.copy();
                let cpu = kernels::softmax_cross_entropy(&mut exponentials, &labels);
                assert_close(&what, &cpu.ce_m, &wide(&found.ce_m));
                assert!(cpu.correct_m.equal(&found.correct_m), "{what}");
            }
        }
    }
}

#[test]
fn bad_logits_and_labels_make_their_own_loss_nan() {
    let logits = Tensor::zeros([5, 40], (Kind::Float, Device::Cpu));
    let _ = logits.i((1, 39)).fill_(f64::NAN);
    let _ = logits.i((2, 0)).fill_(f64::NEG_INFINITY);
    let labels = Tensor::from_slice(&[3i64, 3, 3, 40, -1]);
    let ce = Vec::<f32>::try_from(gpu::cross_entropy(RUNNER, &logits, &labels).ce_m).unwrap();
    assert!((ce[0] - 40f32.ln()).abs() < 1e-6 && (ce[2] - 39f32.ln()).abs() < 1e-6, "{ce:?}");
    assert!(ce[1].is_nan() && ce[3].is_nan() && ce[4].is_nan(), "{ce:?}");
}

#[test]
fn the_same_call_gives_the_same_bits() {
    let _alone = alone();
    let x = normal(&[700, 40], Kind::BFloat16);
    let w = normal(&[40], Kind::BFloat16);
    let run = || {
        let dweight = Tensor::zeros([40], (Kind::Float, Device::Cpu));
        let mut dy = &x * 3.0;
        gpu::rms_norm_backward(
            RUNNER,
            &mut dy,
            &x,
            RmsWeight { weight: &w, eps: EPS },
            None,
            None,
            &dweight,
        );
        (dy, dweight)
    };
    assert_eq!(run(), run());
}
