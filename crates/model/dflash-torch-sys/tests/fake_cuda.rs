//! The fake CUDA device: what it records and refuses, and its confinement to thread and time.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dflash_torch_sys::flash::{Sequences, Window, flash_backward, flash_forward, takes_flash};
use dflash_torch_sys::trace::{self, Event, Form, Record, on_fake_cuda};
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);
const F32: (Kind, Device) = (Kind::Float, GPU);
const BF16: (Kind, Device) = (Kind::BFloat16, GPU);

fn record(f: impl FnOnce()) -> Record {
    tch::no_grad(|| on_fake_cuda(f)).unwrap().1
}

/// Message of the panic with which tch reports a refused call.
fn refusal(f: impl FnOnce()) -> String {
    let caught = catch_unwind(AssertUnwindSafe(|| record(f)));
    let panic = caught.expect_err("nothing was refused");
    panic.downcast_ref::<String>().cloned().expect("a panic with a message")
}

fn operations(record: &Record) -> Vec<(&str, u64)> {
    record.events.iter().map(|event| (event.operation.as_str(), event.launches)).collect()
}

fn only(record: &Record) -> &Event {
    assert_eq!(record.events.len(), 1, "{:?}", operations(record));
    &record.events[0]
}

#[test]
fn products_are_noted_with_bytes_and_arithmetic() {
    let noted = record(|| {
        let (a, b) = (Tensor::empty([64, 32], BF16), Tensor::empty([16, 32], BF16));
        let c = a.matmul(&b.tr());
        assert_eq!((c.size(), c.kind(), c.device()), (vec![64, 16], Kind::BFloat16, GPU));
    });
    let product = only(&noted);
    assert_eq!((product.operation.as_str(), product.launches), ("aten::mm", 1));
    assert_eq!(product.read, 2.0 * (64.0 * 32.0 + 16.0 * 32.0));
    assert_eq!(product.written, 2.0 * 64.0 * 16.0);
    assert_eq!(product.flops, 2.0 * 64.0 * 32.0 * 16.0);
}

/// For tests that also run on a GPU: data copied from the host can be read back, computed data
/// reads as zeros, and the next thread reads nothing.
#[test]
fn a_test_may_read_what_has_no_values() {
    let reading = || {
        trace::fake_cuda_to_the_end().unwrap();
        trace::fake_cuda_to_the_end().unwrap();
        let ids = Tensor::from_slice(&[3i64, 5]).to_device(GPU);
        assert_eq!(Vec::<i64>::try_from(&ids.to_device(Device::Cpu)).unwrap(), [3, 5]);
        assert_eq!(ids.int64_value(&[1]), 5);
        let sum = (&ids + 1).to_device(Device::Cpu);
        assert_eq!(Vec::<i64>::try_from(&sum).unwrap(), [0, 0]);
        let product = Tensor::ones([2, 2], F32).mm(&Tensor::ones([2, 2], F32));
        assert_eq!(product.double_value(&[1, 1]), 0.0);
        // It still refuses everything else.
        assert!(
            Tensor::ones([2], F32).f_add(&Tensor::ones([2], (Kind::Float, Device::Cpu))).is_err()
        );
    };
    std::thread::spawn(reading).join().unwrap();
    let message = refusal(|| drop(Tensor::ones([2], F32).to_device(Device::Cpu)));
    assert!(message.contains("reads values of the GPU"), "{message}");
}

#[test]
fn views_cost_nothing_and_share_their_memory() {
    let noted = record(|| {
        let x = Tensor::zeros([8, 64], F32);
        trace::start_over();
        let view = x.narrow(0, 2, 4).tr().unsqueeze(0).squeeze_dim(0).unflatten(1, [2, 2]);
        assert_eq!(view.size(), [64, 2, 2]);
        drop(x);
        // the storage lives as long as its last view
        let _ = view.shallow_clone().g_add_scalar_(1.0);
    });
    assert_eq!(only(&noted).operation, "aten::add_");
    assert_eq!(noted.peak_bytes, 8 * 64 * 4);
}

#[test]
fn elementwise_work_is_read_once_and_written_once() {
    let noted = record(|| {
        let (mut x, row) = (Tensor::empty([128, 64], F32), Tensor::empty([64], F32));
        // [64] is read once, although every row uses it
        let y = &x + &row;
        let _ = x.g_mul_(&y);
        let _ = x.zero_();
        x.narrow(0, 0, 2).copy_(&row.expand([2, 64], false));
    });
    let bytes: Vec<_> =
        noted.events.iter().map(|it| (&*it.operation, it.read, it.written)).collect();
    let x = 128.0 * 64.0 * 4.0;
    assert_eq!(
        bytes,
        [
            ("aten::add", x + 256.0, x),
            ("aten::mul_", 2.0 * x, x),
            ("aten::zero_", 0.0, x),
            ("aten::copy_", 256.0, 512.0),
        ]
    );
}

#[test]
fn rows_by_number_cost_what_they_touch() {
    let noted = record(|| {
        let mut x = Tensor::empty([1000, 8], F32);
        let rows = Tensor::from_slice(&[3i64, 5]).to_device(GPU);
        let picked = x.index_select(0, &rows);
        let _ = x.index_add_(0, &rows, &picked);
        let _ = x.index_copy_(0, &rows, &picked);
    });
    let bytes: Vec<_> =
        noted.events.iter().skip(1).map(|it| (&*it.operation, it.read, it.written)).collect();
    assert_eq!(
        bytes,
        [
            ("aten::index_select", 64.0 + 16.0, 64.0),
            ("aten::index_add_", 64.0 + 16.0 + 64.0, 64.0),
            ("aten::index_copy_", 64.0 + 16.0, 64.0),
        ]
    );
}

#[test]
fn the_peak_counts_each_storage_once_and_until_its_end() {
    let noted = record(|| {
        let _part = trace::part("first");
        let a = Tensor::zeros([1024], F32); // 4096
        let b = &a + 1.0; // 8192
        drop(a); // 4096
        let _second = trace::part("second");
        let c = Tensor::cat(&[&b, &b], 0); // 12288
        let d = c.view([2, -1]);
        drop((b, c)); // 8192, by the view
        let _small = Tensor::zeros([1], F32); // a granule of 512
        assert_eq!(d.size(), [2, 1024]);
    });
    assert_eq!((noted.peak_bytes, noted.peak_part, noted.live_bytes), (12288, "second", 0));
    let parts: Vec<_> = noted.events.iter().map(|event| (event.part, &*event.operation)).collect();
    assert_eq!(
        parts,
        [
            ("first", "aten::zero_"),
            ("first", "aten::add"),
            ("second", "aten::cat"),
            ("second", "aten::zero_")
        ]
    );
}

#[test]
fn reading_a_value_is_refused_by_name() {
    let x = || Tensor::ones([4], F32);
    let all = [
        ("aten::_local_scalar_dense", refusal(|| _ = x().sum(Kind::Float).double_value(&[]))),
        ("aten::copy_", refusal(|| drop(x().to_device(Device::Cpu)))),
        ("aten::copy_", refusal(|| drop(Vec::<f32>::try_from(x()).unwrap()))),
        ("aten::nonzero", refusal(|| drop(x().nonzero()))),
        ("aten::masked_select", refusal(|| drop(x().masked_select(&x().gt(0.0))))),
    ];
    for (operation, message) in all {
        assert!(message.contains(operation) && message.contains("reads"), "{message}");
    }
}

#[test]
fn shapes_that_libtorch_leaves_to_python_are_known_or_refused() {
    record(|| {
        let x = Tensor::ones([4, 8], F32);
        assert_eq!(x.abs().size(), [4, 8]);
        assert_eq!(x.logsumexp([-1i64].as_slice(), true).size(), [4, 1]);
    });
    let message = refusal(|| drop(Tensor::ones([4], F32).histc(4)));
    assert!(message.contains("aten::histc: the fake CUDA device does not know"), "{message}");
}

#[test]
fn mixing_devices_is_refused_by_name() {
    let here = || Tensor::ones([4], (Kind::Float, Device::Cpu));
    for (operation, message) in [
        ("aten::add", refusal(|| drop(Tensor::ones([4], F32) + here()))),
        ("aten::mul_", refusal(|| drop(Tensor::ones([4], F32).g_mul_(&here())))),
        ("aten::cat", refusal(|| drop(Tensor::cat(&[Tensor::ones([4], F32), here()], 0)))),
    ] {
        assert!(message.contains(operation), "{message}");
        assert!(message.contains("mixes a tensor on cpu of shape [4]"), "{message}");
    }
    // a host scalar is passed with the launch
    record(|| drop(Tensor::ones([4], F32) * Tensor::from(2.0f32)));
}

#[test]
fn copies_from_the_host_are_told_apart_by_whether_the_host_waits() {
    let noted = record(|| {
        let host = Tensor::ones([4], (Kind::Float, Device::Cpu));
        let mut x = host.to_device(GPU);
        x.copy_(&host);
    });
    let forms: Vec<_> = noted.events.iter().map(|it| (it.form, it.written, it.launches)).collect();
    assert_eq!(forms, [(Form::BlockingUpload, 16.0, 0), (Form::BlockingUpload, 16.0, 0)]);
}

fn attention(window: Window) -> Record {
    let lengths = |ends: &[i32]| Tensor::from_slice(ends).to_device(GPU);
    record(|| {
        let (q, k) = (Tensor::empty([200, 4, 128], BF16), Tensor::empty([300, 2, 128], BF16));
        // two lists in one copy, as rows supply them
        let all = lengths(&[0, 150, 200, 0, 100, 300]);
        let sequences = Sequences {
            cu_q: all.narrow(0, 0, 3),
            cu_k: all.narrow(0, 3, 3),
            max_q: 150,
            max_k: 200,
            window,
        };
        trace::start_over();
        let (out, lse) = flash_forward(&q, &k, &k, &sequences, 1.0).unwrap();
        assert_eq!((out.size(), lse.size()), (q.size(), vec![4, 200]));
        let (dq, dk, dv) = flash_backward(&out, &q, &k, &k, &out, &lse, &sequences, 1.0).unwrap();
        assert_eq!((dq.size(), dk.size(), dv.size()), (q.size(), k.size(), k.size()));
    })
}

#[test]
fn attention_counts_the_pairs_of_its_lengths() {
    let noted = attention(Window::ALL);
    let pairs = 150.0 * 100.0 + 50.0 * 200.0;
    let forward = &noted.events[0];
    assert_eq!(forward.operation, "aten::_flash_attention_forward");
    assert_eq!(forward.flops, 4.0 * 4.0 * 128.0 * pairs);
    // tiles of 128 queries and 64 keys: 2 by 2 and 1 by 4
    assert_eq!(forward.tile_flops, 4.0 * 4.0 * 128.0 * 128.0 * 64.0 * (2.0 * 2.0 + 4.0));
    let backward: Vec<_> =
        noted.events.iter().filter(|it| it.operation.contains("backward")).collect();
    // rows, the kernel itself, queries, and keys and values by group
    assert_eq!(backward.iter().map(|it| it.launches).sum::<u64>(), 5);
    assert_eq!(backward.iter().map(|it| it.flops).sum::<f64>(), 10.0 * 4.0 * 128.0 * pairs);
}

#[test]
fn attention_counts_what_a_window_shows() {
    let window = Window { left: Some(9), right: Some(0) };
    let visible = |queries: i64, keys: i64| -> i64 {
        (0..queries).map(|q| window.seen(q, queries, keys)).map(|(from, to)| to - from).sum()
    };
    let pairs = (visible(150, 100) + visible(50, 200)) as f64;
    assert_eq!(attention(window).events[0].flops, 4.0 * 4.0 * 128.0 * pairs);
}

#[test]
fn lengths_that_were_computed_are_refused() {
    let message = refusal(|| {
        let q = Tensor::empty([4, 2, 8], BF16);
        let ends = Tensor::from_slice(&[0i32, 4]).to_device(GPU) * 1;
        let cu_q = ends.to_kind(Kind::Int);
        let sequences =
            Sequences { cu_k: cu_q.shallow_clone(), cu_q, max_q: 4, max_k: 4, window: Window::ALL };
        let _ =
            flash_forward(&q, &q, &q, &sequences, 1.0).unwrap_or_else(|error| panic!("{error}"));
    });
    assert!(message.contains("lengths of its sequences are not known"), "{message}");
}

#[test]
fn own_kernels_are_noted_on_fake_cuda() {
    assert!(!trace::is_fake_cuda());
    let noted = record(|| {
        assert!(trace::is_fake_cuda());
        let (x, y) = (Tensor::empty([64], F32), Tensor::empty([64], BF16));
        let _part = trace::part("mlp");
        trace::own_kernel("swiglu", &[&x], &[&y]);
    });
    let event = only(&noted);
    assert_eq!((event.form, event.part, &*event.operation), (Form::OwnKernel, "mlp", "swiglu"));
    assert_eq!((event.launches, event.read, event.written), (1, 256.0, 128.0));
}

#[test]
fn the_pretence_ends_with_its_function_and_holds_on_its_thread_alone() {
    let left = on_fake_cuda(|| Tensor::ones([4], F32)).unwrap().0;
    let after = catch_unwind(AssertUnwindSafe(|| &left + 1.0)).unwrap_err();
    let message = after.downcast_ref::<String>().unwrap();
    assert!(message.contains("not on this thread or not any more"), "{message}");
    let _ = refusal(|| _ = Tensor::ones([4], F32).double_value(&[0]));
    assert!(!trace::is_fake_cuda(), "a panic ends it");
    record(|| {
        let elsewhere = std::thread::spawn(|| {
            assert!(!trace::is_fake_cuda());
            catch_unwind(|| Tensor::ones([4], F32)).is_err()
        });
        assert!(elsewhere.join().unwrap(), "another thread has no GPU");
        // host tensors compute as usual
        assert_eq!((Tensor::from(2.0) * 2.0).double_value(&[]), 4.0);
        assert!(on_fake_cuda(|| ()).is_err(), "once at a time");
    });
    assert!(!tch::Cuda::is_available());
}

#[test]
fn flash_attention_is_taken_where_kinds_and_widths_fit() {
    record(|| {
        assert!(takes_flash(0, Kind::BFloat16, 128).unwrap());
        assert!(!takes_flash(0, Kind::Float, 128).unwrap());
    });
}
