//! Attention parts by halving on a GPU with our kernels: the calls of `halves`, with the work
//! around them done for all calls of a layer at once. One launch gathers non-contiguous rows and
//! one merges the results; in the backward pass one gathers and one sums all gradients, in float32.
//!
//! The plan determines what is added where: for each block its row in every call, for each key row
//! the list of its occurrences. So sums have a fixed order, and nothing is written twice.

use std::ops::Range;

use dflash_kernels::gpu::{self, Gather, Gathered, MOST_PARTS, PartGradient, Places, Runner};
use tch::Tensor;

use super::halves::{KeyRows, LevelPlan, OwnPlan, RowPlan, by_row, upload};
use super::plan::{BlockPlan, Visibility};
use super::rectangles::Rectangle;
use super::varlen::{Call, Results};
use super::{Attended, AttentionGradient, AttentionShape, KeyValue};

/// Attention of one layer type over one packed row: its calls, and the sources of their rows.
#[derive(Debug)]
pub(super) struct JoinedAttention {
    runner: Runner,
    own: Call,
    /// Rows of the own call's keys; `None` if no block has an edge.
    own_keys: Option<CallRows>,
    levels: Vec<Level>,
    tables: Tables,
    block_size: i64,
    queries_per_kv: i64,
    context_rows: i64,
}

#[derive(Debug)]
struct Level {
    slots: CallRows,
    context: CallRows,
    call: Call,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallRows {
    /// First row and count, in the original tensor.
    Lying(i64, i64),
    /// First row and count, in the gathered tensor.
    Copied(i64, i64),
}

impl CallRows {
    fn of(self, lying: &Tensor, copied: &Tensor) -> Tensor {
        match self {
            Self::Lying(start, length) => lying.narrow(0, start, length),
            Self::Copied(start, length) => copied.narrow(0, start, length),
        }
    }
}

/// Arguments of the kernels, int32 on the device.
#[derive(Debug)]
struct Tables {
    /// Slots and key rows to gather.
    slot_list: Tensor,
    key_list: Tensor,
    /// Start of each call's slots in the list, then the list's length.
    calls: Vec<i32>,
    /// [blocks, levels].
    places: Tensor,
    /// For each key row (context, then own): the start of its occurrences, and the occurrences as
    /// pairs (part, row).
    key_first: Tensor,
    key_places: Tensor,
}

/// [`Tables`] under construction.
#[derive(Debug, Default)]
struct Lists {
    slots: Vec<i32>,
    keys: Vec<i32>,
    calls: Vec<i32>,
}

impl Lists {
    /// The rows of a call, gathered unless they are a single span.
    fn rows(list: &mut Vec<i32>, plan: &RowPlan) -> CallRows {
        match plan.span() {
            Some(span) => CallRows::Lying(span.start as i64, span.len() as i64),
            None => Self::copied(list, plan.rows()),
        }
    }

    fn copied(list: &mut Vec<i32>, rows: &[i64]) -> CallRows {
        let start = list.len() as i64;
        list.extend(rows.iter().map(|&row| index(row)));
        CallRows::Copied(start, rows.len() as i64)
    }

    fn slots(&mut self, plan: &RowPlan) -> CallRows {
        let rows = Self::rows(&mut self.slots, plan);
        if let CallRows::Copied(start, _) = rows {
            self.calls.push(index(start));
        }
        rows
    }
}

fn index(row: i64) -> i32 {
    i32::try_from(row).expect("a row has fewer than 2^31")
}

impl JoinedAttention {
    /// Prepares the calls of `plan` for layers with `visibility`; `None` if they exceed the
    /// kernels' limit.
    pub(super) fn new(
        runner: Runner,
        plan: &BlockPlan,
        visibility: &Visibility,
        shape: &AttentionShape,
    ) -> Option<Self> {
        let rectangles = plan.rectangles(visibility);
        if rectangles.levels.len() >= MOST_PARTS {
            return None;
        }
        let own = OwnPlan::new(plan, visibility, &rectangles.edges);
        let level = |level: &Vec<Rectangle>| LevelPlan::new(level, plan.block_size());
        let levels: Vec<LevelPlan> = rectangles.levels.iter().map(level).collect();

        let mut lists = Lists::default();
        let own_keys = (!own.keys.is_empty()).then(|| Lists::copied(&mut lists.keys, &own.keys));
        let mut rows = Vec::new();
        for level in &levels {
            rows.push((lists.slots(&level.slots), Lists::rows(&mut lists.keys, &level.context)));
        }
        lists.calls.push(index(lists.slots.len() as i64));
        let places = places(&rectangles.levels, plan);
        let (key_first, key_places) = key_places(&own, &levels, plan);

        let all_lengths = std::iter::once(&own.lengths).chain(levels.iter().map(|it| &it.lengths));
        let mut host: Vec<&[i32]> =
            vec![&lists.slots, &lists.keys, &places, &key_first, &key_places];
        host.extend(all_lengths.flat_map(|lengths| [&lengths.queries[..], &lengths.keys]));
        let mut uploaded = upload(&host, shape.device).into_iter();
        let mut next = || uploaded.next().expect("a tensor for each list");
        let tables = Tables {
            slot_list: next(),
            key_list: next(),
            calls: lists.calls,
            places: next().view([plan.anchors().len() as i64, levels.len() as i64]),
            key_first: next(),
            key_places: next(),
        };
        let own = Call::new(&own.lengths, next(), next(), shape);
        let mut level = |(level, (slots, context)): (&LevelPlan, (CallRows, CallRows))| Level {
            slots,
            context,
            call: Call::new(&level.lengths, next(), next(), shape),
        };
        Some(Self {
            runner,
            own,
            own_keys,
            levels: levels.iter().zip(rows).map(&mut level).collect(),
            tables,
            block_size: plan.block_size() as i64,
            queries_per_kv: shape.queries_per_kv,
            context_rows: plan.context_rows() as i64,
        })
    }

    /// See [`super::BlockAttention::forward`].
    pub(super) fn forward(&self, q_jngd: &Tensor, context: &KeyValue, own: &KeyValue) -> Attended {
        let q = by_row(q_jngd);
        let (context, own) = (dense_rows(context), dense_rows(own));
        let copied = self.gather(&[&q], None, &context, &own);
        let keys = self.own_rows(&own, &copied);
        let part = |(out, lse): (Tensor, Tensor)| gpu::CallResult {
            out: out.contiguous(),
            lse: lse.contiguous(),
        };
        let mut parts = vec![part(self.own.forward(&q, &keys.k, &keys.v))];
        for level in &self.levels {
            let keys = level.keys(&context, &copied);
            let q = level.slots.of(&q, &copied.slots[0]);
            parts.push(part(level.call.forward(&q, &keys.k, &keys.v)));
        }
        drop(copied);
        let whole = gpu::merge(self.runner, &parts, &self.places());
        let group = [-1, self.queries_per_kv];
        Attended {
            out_jngd: whole.out.unflatten(1, group).transpose(0, 1),
            lse_jng: whole.lse.unflatten(0, group).transpose(1, 2),
        }
    }

    /// See [`super::BlockAttention::backward`].
    pub(super) fn backward(
        &self,
        dout_jngd: &Tensor,
        q_jngd: &Tensor,
        context: &KeyValue,
        own: &KeyValue,
        attended: &Attended,
    ) -> AttentionGradient {
        let (q, dout) = (by_row(q_jngd), by_row(dout_jngd));
        let out = by_row(&attended.out_jngd);
        let lse = attended.lse_jng.transpose(1, 2).flatten(0, 1);
        let (context, own) = (dense_rows(context), dense_rows(own));
        let copied = self.gather(&[&q, &out, &dout], Some(&lse), &context, &own);
        let keys = self.own_rows(&own, &copied);
        let results = |slots: CallRows| match slots {
            CallRows::Lying(start, length) => Results {
                out: out.narrow(0, start, length),
                lse: lse.narrow(1, start, length).contiguous(),
                dout: dout.narrow(0, start, length),
            },
            CallRows::Copied(start, length) => Results {
                out: copied.slots[1].narrow(0, start, length),
                lse: copied.lse_of(start, length),
                dout: copied.slots[2].narrow(0, start, length),
            },
        };
        let part = |call: &Call, results: &Results, q: &Tensor, keys: &KeyRows| {
            let gradient = call.backward(results, q, &keys.k, &keys.v);
            let [dq, dk, dv] = [gradient.dq, gradient.dk, gradient.dv].map(|d| d.contiguous());
            PartGradient { dq, dk, dv }
        };
        let all = CallRows::Lying(0, q.size()[0]);
        let mut parts = vec![part(&self.own, &results(all), &q, &keys)];
        for level in &self.levels {
            let keys = level.keys(&context, &copied);
            let q = level.slots.of(&q, &copied.slots[0]);
            parts.push(part(&level.call, &results(level.slots), &q, &keys));
        }
        let Tables { key_first, key_places, .. } = &self.tables;
        let sums = gpu::sum(self.runner, &parts, &self.places(), key_first, key_places);
        let rows = |start, length| KeyRows {
            k: sums.dk.narrow(0, start, length),
            v: sums.dv.narrow(0, start, length),
        };
        AttentionGradient {
            dq_jngd: sums.dq.unflatten(1, [-1, self.queries_per_kv]).transpose(0, 1),
            context: rows(0, self.context_rows).by_head(),
            own: rows(self.context_rows, q.size()[0]).by_head(),
        }
    }

    fn places(&self) -> Places<'_> {
        Places { of_blocks: &self.tables.places, block_size: self.block_size }
    }

    fn gather(
        &self,
        slots: &[&Tensor],
        lse: Option<&Tensor>,
        context: &KeyRows,
        own: &KeyRows,
    ) -> Gathered {
        let Tables { slot_list, key_list, calls, .. } = &self.tables;
        let (context, own) = ([&context.k, &context.v], [&own.k, &own.v]);
        Gather { slots, lse, slot_list, calls, context, own, key_list }.run(self.runner)
    }

    fn own_rows(&self, own: &KeyRows, copied: &Gathered) -> KeyRows {
        let lying = CallRows::Lying(0, own.k.size()[0]);
        key_rows(self.own_keys.unwrap_or(lying), own, copied)
    }
}

impl Level {
    fn keys(&self, context: &KeyRows, copied: &Gathered) -> KeyRows {
        key_rows(self.context, context, copied)
    }
}

/// Keys and values by row with contiguous heads; copied if necessary.
fn dense_rows(x: &KeyValue) -> KeyRows {
    KeyRows::of(x).map(|x| {
        let (size, stride) = (x.size(), x.stride());
        let dense = stride[2] == 1 && (size[1] == 1 || stride[1] == size[2]);
        if dense { x.shallow_clone() } else { x.contiguous() }
    })
}

fn key_rows(rows: CallRows, lying: &KeyRows, copied: &Gathered) -> KeyRows {
    let [k, v] = &copied.keys;
    KeyRows { k: rows.of(&lying.k, k), v: rows.of(&lying.v, v) }
}

/// For each block and level the row of the block's first slot in the call, or -1.
fn places(levels: &[Vec<Rectangle>], plan: &BlockPlan) -> Vec<i32> {
    let mut places = vec![-1; plan.anchors().len() * levels.len()];
    for (column, level) in levels.iter().enumerate() {
        let mut row = 0;
        for anchor in level.iter().flat_map(|it: &Rectangle| Range::clone(&it.anchors)) {
            places[anchor * levels.len() + column] = index(row);
            row += plan.block_size() as i64;
        }
    }
    places
}

/// For each key row (context, then own) the start of its occurrences, and the occurrences: pairs
/// (part, row), parts ascending.
fn key_places(own: &OwnPlan, levels: &[LevelPlan], plan: &BlockPlan) -> (Vec<i32>, Vec<i32>) {
    let context = plan.context_rows() as i64;
    let keys = context + plan.slots() as i64;
    let lying: Vec<i64> = (context..keys).collect();
    let own_rows = if own.keys.is_empty() { &lying } else { &own.keys };
    let calls = std::iter::once(&own_rows[..]).chain(levels.iter().map(|it| it.context.rows()));
    let mut met: Vec<(i64, [i32; 2])> = Vec::new();
    for (part, rows) in calls.enumerate() {
        let place = |(place, &row): (usize, &i64)| (row, [part as i32, index(place as i64)]);
        met.extend(rows.iter().enumerate().map(place));
    }
    // Stable, so that a row's occurrences stay in part order.
    met.sort_by_key(|&(row, _)| row);
    let first = |row: i64| index(met.partition_point(|&(other, _)| other < row) as i64);
    let first = (0..=keys).map(first).collect();
    (first, met.into_iter().flat_map(|(_, place)| place).collect())
}
