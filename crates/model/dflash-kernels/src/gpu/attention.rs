//! Gather, merge and gradient sum around the variable-length attention calls of a layer; each
//! handles all calls in one launch.

use std::ptr::null_mut;

use tch::{Kind, Tensor};

use super::launch::{Kernel, Launch, Moves, Runner, begins_at_multiple};
use super::{Data, check_alike, check_float, data, empty, optional};

/// Maximum attention calls per layer, including the blocks' own: `kMostParts` in the source.
pub const MOST_PARTS: usize = 33;

pub(super) const GATHER: Kernel = Kernel { name: "gather", threads: 128 };
pub(super) const MERGE: Kernel = Kernel { name: "merge", threads: 256 };
pub(super) const SUM: Kernel = Kernel { name: "sum", threads: 256 };

fn check_index(tensors: &[&Tensor]) {
    for x in tensors {
        assert!(x.kind() == Kind::Int && x.is_contiguous(), "a kernel needs contiguous int32");
    }
}

fn padded<T: Copy>(values: impl IntoIterator<Item = T>, rest: T) -> [T; MOST_PARTS] {
    let mut all = [rest; MOST_PARTS];
    for (place, value) in all.iter_mut().zip(values) {
        *place = value;
    }
    all
}

/// Arguments of a gather.
#[derive(Debug)]
pub struct Gather<'a> {
    /// Up to three slot tensors, [slots, heads, D].
    pub slots: &'a [&'a Tensor],
    /// Log-sum-exp of the slots, [heads, slots], float32.
    pub lse: Option<&'a Tensor>,
    /// Slots to copy, int32.
    pub slot_list: &'a Tensor,
    /// Start of each call's slots in the list, then the list's length.
    pub calls: &'a [i32],
    /// Keys and values of the context, [context, kv heads, D].
    pub context: [&'a Tensor; 2],
    /// The blocks' keys and values, [slots, kv heads, D].
    pub own: [&'a Tensor; 2],
    /// Key rows to copy, int32; the blocks' rows are numbered after those of the context.
    pub key_list: &'a Tensor,
}

/// Gathered rows.
#[derive(Debug)]
pub struct Gathered {
    /// [listed slots, heads, D] each.
    pub slots: Vec<Tensor>,
    /// Per call [heads, its slots], concatenated.
    pub lse: Option<Tensor>,
    /// [listed keys, kv heads, D] each.
    pub keys: [Tensor; 2],
}

impl Gathered {
    /// Log-sum-exp [heads, length] of the call whose slots start at `start` of the list.
    ///
    /// # Panics
    /// If it was not gathered: a bug of the caller.
    pub fn lse_of(&self, start: i64, length: i64) -> Tensor {
        let lse = self.lse.as_ref().expect("the log-sum-exp was gathered");
        let heads = self.slots[0].size()[1];
        lse.narrow(0, heads * start, heads * length).view([heads, length])
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GatherArguments {
    slots: [Data; 3],
    slots_to: [Data; 3],
    slot_stride: [i64; 3],
    lse: Data,
    lse_to: Data,
    context_keys: [Data; 2],
    own_keys: [Data; 2],
    keys_to: [Data; 2],
    context_stride: [i64; 2],
    own_stride: [i64; 2],
    slot_list: Data,
    key_list: Data,
    slot_rows: i64,
    slot_count: i64,
    context: i64,
    tensors: i32,
    slot_width: i32,
    key_width: i32,
    heads: i32,
    calls: i32,
    first: [i32; MOST_PARTS + 1],
}

/// Row stride of `x` [rows, heads, D], in elements; each row must be contiguous.
fn row_stride(x: &Tensor) -> i64 {
    let (size, stride) = (x.size(), x.stride());
    let contiguous = size.len() == 3 && stride[2] == 1 && (size[1] == 1 || stride[1] == size[2]);
    assert!(contiguous, "a kernel needs rows of heads, got {size:?} {stride:?}");
    stride[0]
}

fn row_width(x: &Tensor) -> i64 {
    x.size()[1] * x.size()[2]
}

impl Gather<'_> {
    /// Copies the rows.
    pub fn run(&self, runner: Runner) -> Gathered {
        let like = self.context[0];
        let (slot_rows, key_rows) = (self.slot_list.numel() as i64, self.key_list.numel() as i64);
        let of = |rows: i64, x: &Tensor| empty(&[rows, x.size()[1], x.size()[2]], x.kind(), x);
        let gathered = Gathered {
            slots: self.slots.iter().map(|x| of(slot_rows, x)).collect(),
            lse: self.lse.map(|x| empty(&[x.size()[0] * slot_rows], Kind::Float, x)),
            keys: self.context.map(|x| of(key_rows, x)),
        };
        self.check();
        let from: Vec<&Tensor> =
            self.slots.iter().copied().chain(self.context).chain(self.own).collect();
        let unit = self.unit(runner, &from, &gathered);
        let lists = [self.slot_list, self.key_list];
        let reads: Vec<&Tensor> = from.iter().copied().chain(self.lse).chain(lists).collect();
        let writes: Vec<&Tensor> =
            gathered.slots.iter().chain(&gathered.keys).chain(&gathered.lse).collect();
        let instance = match unit {
            16 => "_16",
            4 => "_4",
            _ => "_2",
        };
        let blocks = slot_rows + key_rows;
        Launch { kernel: GATHER, instance, blocks, shared: 0, reads: &reads, writes: &writes }
            .run(runner, || {
                self.arguments(&gathered, unit / like.kind().elt_size_in_bytes() as i64)
            });
        gathered
    }

    fn check(&self) {
        let like = self.context[0];
        check_index(&[self.slot_list, self.key_list]);
        let all = || self.slots.iter().copied().chain(self.context).chain(self.own);
        assert!(self.slots.len() <= 3 && all().all(|x| x.kind() == like.kind()));
        assert!(self.slots.iter().all(|x| x.size() == self.slots[0].size()));
        let keys = || self.context.into_iter().chain(self.own);
        assert!(keys().all(|x| x.size()[1..] == like.size()[1..]));
        assert!(self.context[1].size() == like.size() && self.own[1].size() == self.own[0].size());
        assert!(self.calls.len() <= MOST_PARTS + 1);
        assert_eq!(self.calls.last().map(|&end| end as usize), Some(self.slot_list.numel()));
        if let Some(lse) = self.lse {
            check_float(&[lse]);
            assert_eq!(lse.size(), [self.slots[0].size()[1], self.slots[0].size()[0]]);
        }
    }

    /// Bytes that a thread copies at once; all rows are aligned to it and multiples of it.
    fn unit(&self, runner: Runner, from: &[&Tensor], gathered: &Gathered) -> i64 {
        let element = from[0].kind().elt_size_in_bytes();
        let fits = from
            .iter()
            .chain(&gathered.slots.iter().chain(&gathered.keys).collect::<Vec<_>>())
            .all(|x| {
                let several = (16 / element) as i64;
                row_width(x) % several == 0
                    && row_stride(x) % several == 0
                    && begins_at_multiple(runner, x, 16 / element)
            });
        if fits { 16 } else { element as i64 }
    }

    /// `several` is the number of elements per copy unit.
    fn arguments(&self, gathered: &Gathered, several: i64) -> GatherArguments {
        let three = |get: &dyn Fn(usize) -> Data| {
            std::array::from_fn(|i| if i < self.slots.len() { get(i) } else { null_mut() })
        };
        let stride = |x: &Tensor| row_stride(x) / several;
        let width = |x: &Tensor| (row_width(x) / several) as i32;
        let mut first = [0; MOST_PARTS + 1];
        first[..self.calls.len()].copy_from_slice(self.calls);
        GatherArguments {
            slots: three(&|i| data(self.slots[i])),
            slots_to: three(&|i| data(&gathered.slots[i])),
            slot_stride: std::array::from_fn(|i| self.slots.get(i).map_or(0, |x| stride(x))),
            lse: optional(self.lse),
            lse_to: optional(gathered.lse.as_ref()),
            context_keys: self.context.map(data),
            own_keys: self.own.map(data),
            keys_to: [data(&gathered.keys[0]), data(&gathered.keys[1])],
            context_stride: self.context.map(stride),
            own_stride: self.own.map(stride),
            slot_list: data(self.slot_list),
            key_list: data(self.key_list),
            slot_rows: self.slot_list.numel() as i64,
            slot_count: self.slots.first().map_or(0, |x| x.size()[0]),
            context: self.context[0].size()[0],
            tensors: self.slots.len() as i32,
            slot_width: self.slots.first().map_or(0, |x| width(x)),
            key_width: width(self.context[0]),
            heads: self.slots.first().map_or(0, |x| x.size()[1]) as i32,
            calls: self.calls.len() as i32 - 1,
            first,
        }
    }
}

/// Result of one call.
#[derive(Debug)]
pub struct CallResult {
    /// [its slots, heads, D].
    pub out: Tensor,
    /// [heads, its slots], float32.
    pub lse: Tensor,
}

/// Which slots take part in which calls. Call 0 has all slots in order.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// For each block and each call after call 0, the row of the block's first slot, or -1:
    /// [blocks, calls - 1], int32.
    pub of_blocks: &'a Tensor,
    /// Slots of a block.
    pub block_size: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct MergeArguments {
    out: [Data; MOST_PARTS],
    lse: [Data; MOST_PARTS],
    rows: [i32; MOST_PARTS],
    places: Data,
    merged: Data,
    merged_lse: Data,
    slots: i64,
    parts: i32,
    heads: i32,
    dim: i32,
    block: i32,
}

/// Merges the parts of an attention: output [slots, heads, D] and log-sum-exp [heads, slots].
pub fn merge(runner: Runner, parts: &[CallResult], places: &Places<'_>) -> CallResult {
    let out = &parts[0].out;
    let (slots, heads, dim) = out.size3().expect("a part has rows, heads and their width");
    assert!(parts.len() <= MOST_PARTS && slots % places.block_size == 0);
    assert_eq!(
        places.of_blocks.size(),
        [slots / places.block_size, parts.len() as i64 - 1],
        "a place for each block and call"
    );
    check_index(&[places.of_blocks]);
    for part in parts {
        assert!(
            part.out.size()[1..] == [heads, dim] && part.lse.size() == [heads, part.out.size()[0]]
        );
        check_float(&[&part.lse]);
    }
    let outs: Vec<&Tensor> = parts.iter().map(|part| &part.out).collect();
    check_alike(&outs);
    let merged = CallResult { out: out.empty_like(), lse: parts[0].lse.empty_like() };
    let all: Vec<&Tensor> = outs.iter().copied().chain([&merged.out]).collect();
    let lse = parts.iter().map(|part| &part.lse);
    let reads: Vec<&Tensor> = outs.iter().copied().chain(lse).chain([places.of_blocks]).collect();
    Launch {
        kernel: MERGE,
        instance: Moves::Sixteen.instance(runner, out.kind(), &all, &[dim]),
        blocks: slots,
        shared: heads * parts.len() as i64,
        reads: &reads,
        writes: &[&merged.out, &merged.lse],
    }
    .run(runner, || MergeArguments {
        out: padded(parts.iter().map(|part| data(&part.out)), null_mut()),
        lse: padded(parts.iter().map(|part| data(&part.lse)), null_mut()),
        rows: padded(parts.iter().map(|part| part.out.size()[0] as i32), 0),
        places: data(places.of_blocks),
        merged: data(&merged.out),
        merged_lse: data(&merged.lse),
        slots,
        parts: parts.len() as i32,
        heads: heads as i32,
        dim: dim as i32,
        block: places.block_size as i32,
    });
    merged
}

/// Gradients of one call.
#[derive(Debug)]
pub struct PartGradient {
    /// [its slots, heads, D].
    pub dq: Tensor,
    /// [its keys, kv heads, D].
    pub dk: Tensor,
    /// Same shape as `dk`.
    pub dv: Tensor,
}

/// Gradients of the merged attention, float32.
#[derive(Debug)]
pub struct Sums {
    /// [slots, heads, D].
    pub dq: Tensor,
    /// [context + slots, kv heads, D]: context rows, then the blocks'.
    pub dk: Tensor,
    /// Same shape as `dk`.
    pub dv: Tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SumArguments {
    dq: [Data; MOST_PARTS],
    dk: [Data; MOST_PARTS],
    dv: [Data; MOST_PARTS],
    places: Data,
    key_first: Data,
    key_places: Data,
    dq_to: Data,
    dk_to: Data,
    dv_to: Data,
    slots: i64,
    parts: i32,
    query_width: i32,
    key_width: i32,
    block: i32,
}

/// Sums the gradients of all parts. Key row r gets row `key_places[2i + 1]` of part
/// `key_places[2i]` for i from `key_first[r]` to `key_first[r + 1]`, in this order; both lists are
/// int32.
pub fn sum(
    runner: Runner,
    parts: &[PartGradient],
    places: &Places<'_>,
    key_first: &Tensor,
    key_places: &Tensor,
) -> Sums {
    let (dq, dk) = (&parts[0].dq, &parts[0].dk);
    let (slots, keys) = (dq.size()[0], key_first.numel() as i64 - 1);
    assert!(parts.len() <= MOST_PARTS && slots % places.block_size == 0);
    assert_eq!(places.of_blocks.size(), [slots / places.block_size, parts.len() as i64 - 1]);
    check_index(&[places.of_blocks, key_first, key_places]);
    let all: Vec<&Tensor> = parts.iter().flat_map(|part| [&part.dq, &part.dk, &part.dv]).collect();
    check_alike(&all);
    for part in parts {
        assert!(part.dq.size()[1..] == dq.size()[1..] && part.dk.size()[1..] == dk.size()[1..]);
        assert_eq!(part.dk.size(), part.dv.size());
    }
    let of_keys = || empty(&[keys, dk.size()[1], dk.size()[2]], Kind::Float, dk);
    let sums = Sums { dq: empty(&dq.size(), Kind::Float, dq), dk: of_keys(), dv: of_keys() };
    let lists = [places.of_blocks, key_first, key_places];
    let reads: Vec<&Tensor> = all.iter().copied().chain(lists).collect();
    let widths = [row_width(dq), row_width(dk)];
    Launch {
        kernel: SUM,
        instance: Moves::Sixteen.instance(runner, dq.kind(), &all, &widths),
        blocks: slots + keys,
        shared: 0,
        reads: &reads,
        writes: &[&sums.dq, &sums.dk, &sums.dv],
    }
    .run(runner, || SumArguments {
        dq: padded(parts.iter().map(|part| data(&part.dq)), null_mut()),
        dk: padded(parts.iter().map(|part| data(&part.dk)), null_mut()),
        dv: padded(parts.iter().map(|part| data(&part.dv)), null_mut()),
        places: data(places.of_blocks),
        key_first: data(key_first),
        key_places: data(key_places),
        dq_to: data(&sums.dq),
        dk_to: data(&sums.dk),
        dv_to: data(&sums.dv),
        slots,
        parts: parts.len() as i32,
        query_width: widths[0] as i32,
        key_width: widths[1] as i32,
        block: places.block_size as i32,
    });
    sums
}
