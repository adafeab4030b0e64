//! Attention parts by halving: one variable-length call for the blocks with their edges, one for
//! the cores, and one per depth of the halves. See `rectangles` for the splitting.
//!
//! Rows of a call are gathered unless they are contiguous. Within a call no query and no key occurs
//! twice, except edges, so results and gradients are scattered without overlap. A slot's heads are
//! in checkpoint order, as the kernels expect.

use std::ops::Range;

use dflash_tensor::fused::HeadOrder;
use dflash_tensor::ops::accumulate_kind;
use dflash_torch_sys::flash::Window;
use tch::kind::Element;
use tch::{Device, Tensor};

use super::plan::{BlockPlan, Visibility, WindowRule};
use super::rectangles::Rectangle;
use super::varlen::{Call, Lengths, Results};
use super::{Attended, AttentionGradient, AttentionShape, KeyValue};

/// Attention of one layer type over one packed row: its calls.
#[derive(Debug)]
pub(super) struct HalvesAttention {
    own: Own,
    levels: Vec<Level>,
    queries_per_kv: i64,
}

/// The call of the blocks over their edges and themselves.
#[derive(Debug)]
struct Own {
    /// The keys, as row numbers of the concatenated context and own rows; `None` if no block has an
    /// edge and the keys are just the own rows.
    keys: Option<Tensor>,
    call: Call,
}

/// A call of rectangles that are disjoint in queries and in keys.
#[derive(Debug)]
struct Level {
    slots: RowSet,
    context: RowSet,
    call: Call,
}

#[derive(Debug)]
enum RowSet {
    /// First row and count.
    Span(i64, i64),
    /// Row numbers, int64, ascending.
    Listed(Tensor),
}

impl RowSet {
    /// The selected rows of `x` in dimension `dim`; a view for a span.
    fn take(&self, x: &Tensor, dim: i64) -> Tensor {
        match self {
            Self::Span(start, length) => x.narrow(dim, *start, *length),
            Self::Listed(rows) => x.index_select(dim, rows),
        }
    }

    /// Overwrites the selected rows of `x` with `values`.
    fn put(&self, x: &Tensor, dim: i64, values: &Tensor) {
        match self {
            Self::Span(..) => self.take(x, dim).copy_(values),
            Self::Listed(rows) => {
                let _ = x.shallow_clone().index_copy_(dim, rows, values);
            }
        }
    }

    /// Adds `values` to the selected rows of `x`, in its type.
    fn add(&self, x: &Tensor, values: &Tensor) {
        match self {
            Self::Span(..) => {
                let _ = self.take(x, 0).g_add_(values);
            }
            Self::Listed(rows) => add_rows(x, rows, values),
        }
    }
}

fn add_rows(x: &Tensor, rows: &Tensor, values: &Tensor) {
    let _ = x.shallow_clone().index_add_(0, rows, &values.to_kind(x.kind()));
}

/// Keys and values by row, [rows, kv heads, D].
pub(super) struct KeyRows {
    pub(super) k: Tensor,
    pub(super) v: Tensor,
}

impl KeyRows {
    pub(super) fn of(x: &KeyValue) -> Self {
        Self { k: x.k_jtd.transpose(0, 1), v: x.v_jtd.transpose(0, 1) }
    }

    pub(super) fn map(&self, take: impl Fn(&Tensor) -> Tensor) -> Self {
        Self { k: take(&self.k), v: take(&self.v) }
    }

    pub(super) fn by_head(&self) -> KeyValue {
        KeyValue { k_jtd: self.k.transpose(0, 1), v_jtd: self.v.transpose(0, 1) }
    }
}

/// Merge of the parts so far: out [slots, heads, D], lse [heads, slots]; float32 for halves.
struct Merged {
    out: Tensor,
    lse: Tensor,
}

impl Merged {
    fn add(&self, rows: &RowSet, out: &Tensor, lse: &Tensor) {
        let (mut merged, old) = (rows.take(&self.out, 0), rows.take(&self.lse, 1));
        let share = (lse - &old).sigmoid().tr().unsqueeze(-1);
        let _ = merged.lerp_tensor_(&out.to_kind(merged.kind()), &share);
        if let RowSet::Listed(_) = rows {
            rows.put(&self.out, 0, &merged);
        }
        rows.put(&self.lse, 1, &old.logaddexp(lse));
    }
}

impl HalvesAttention {
    /// Prepares the calls of `plan` for layers with `visibility`.
    pub(super) fn new(plan: &BlockPlan, visibility: &Visibility, shape: &AttentionShape) -> Self {
        let rectangles = plan.rectangles(visibility);
        let own = OwnPlan::new(plan, visibility, &rectangles.edges);
        let levels: Vec<LevelPlan> = rectangles
            .levels
            .iter()
            .map(|level| LevelPlan::new(level, plan.block_size()))
            .collect();
        // One copy to the device for all lengths, one for all rows.
        let all_lengths = std::iter::once(&own.lengths).chain(levels.iter().map(|it| &it.lengths));
        let lengths: Vec<&[i32]> =
            all_lengths.flat_map(|lengths| [&lengths.queries[..], &lengths.keys]).collect();
        let mut lengths = upload(&lengths, shape.device).into_iter();
        let lists: Vec<&[i64]> = std::iter::once(&own.keys[..])
            .chain(levels.iter().flat_map(|level| [level.slots.listed(), level.context.listed()]))
            .collect();
        let mut lists = upload(&lists, shape.device).into_iter();
        let mut next = || lists.next().expect("a list for each");
        let mut call = |of: &Lengths| {
            let mut next = || lengths.next().expect("two lists a call");
            Call::new(of, next(), next(), shape)
        };
        let keys = next();
        let own = Own { call: call(&own.lengths), keys: (!own.keys.is_empty()).then_some(keys) };
        let level = |level: LevelPlan| Level {
            slots: level.slots.on_device(next()),
            context: level.context.on_device(next()),
            call: call(&level.lengths),
        };
        let levels = levels.into_iter().map(level).collect();
        Self { own, levels, queries_per_kv: shape.queries_per_kv }
    }

    /// See [`super::BlockAttention::forward`].
    pub(super) fn forward(&self, q_jngd: &Tensor, context: &KeyValue, own: &KeyValue) -> Attended {
        let q = by_row(q_jngd);
        let (context, own) = (KeyRows::of(context), KeyRows::of(own));
        let keys = self.own.keys(&context, own);
        let (out, lse) = self.own.call.forward(&q, &keys.k, &keys.v);
        let merged = Merged { out: out.to_kind(accumulate_kind(&out)), lse };
        for level in &self.levels {
            let keys = context.map(|x| level.context.take(x, 0));
            let (out, lse) = level.call.forward(&level.slots.take(&q, 0), &keys.k, &keys.v);
            merged.add(&level.slots, &out, &lse);
        }
        let group = [-1, self.queries_per_kv];
        Attended {
            out_jngd: merged.out.to_kind(q.kind()).unflatten(1, group).transpose(0, 1),
            lse_jng: merged.lse.unflatten(0, group).transpose(1, 2),
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
        let q = by_row(q_jngd);
        let whole = Results {
            out: by_row(&attended.out_jngd),
            lse: attended.lse_jng.transpose(1, 2).flatten(0, 1),
            dout: by_row(dout_jngd),
        };
        let sums = KeyRows::of(&context.zeros_to_sum());
        let (context, own) = (KeyRows::of(context), KeyRows::of(own));
        let (dq, down) = self.own.backward(&whole, &q, &context, own, &sums);
        for level in &self.levels {
            let results = Results {
                out: level.slots.take(&whole.out, 0),
                lse: level.slots.take(&whole.lse, 1).contiguous(),
                dout: level.slots.take(&whole.dout, 0),
            };
            let keys = context.map(|x| level.context.take(x, 0));
            let q = level.slots.take(&q, 0);
            let gradient = level.call.backward(&results, &q, &keys.k, &keys.v);
            level.slots.add(&dq, &gradient.dq);
            level.context.add(&sums.k, &gradient.dk);
            level.context.add(&sums.v, &gradient.dv);
        }
        AttentionGradient {
            dq_jngd: dq.unflatten(1, [-1, self.queries_per_kv]).transpose(0, 1),
            context: sums.by_head(),
            own: down.by_head(),
        }
    }
}

impl Own {
    fn keys(&self, context: &KeyRows, own: KeyRows) -> KeyRows {
        let Some(rows) = &self.keys else { return own };
        let pick =
            |context: &Tensor, own: &Tensor| Tensor::cat(&[context, own], 0).index_select(0, rows);
        KeyRows { k: pick(&context.k, &own.k), v: pick(&context.v, &own.v) }
    }

    /// Gradients of the queries, to be accumulated, and of the own keys and values; those of edges
    /// are added to `sums`.
    fn backward(
        &self,
        whole: &Results,
        q: &Tensor,
        context: &KeyRows,
        own: KeyRows,
        sums: &KeyRows,
    ) -> (Tensor, KeyRows) {
        let slots = q.size()[0];
        let keys = self.keys(context, own);
        let gradient = self.call.backward(whole, q, &keys.k, &keys.v);
        let of_keys = KeyRows { k: gradient.dk, v: gradient.dv };
        let down = match &self.keys {
            None => of_keys,
            Some(rows) => {
                let part = |sum: &Tensor, d: &Tensor| {
                    let mut size = sum.size();
                    let context = size[0];
                    size[0] += slots;
                    let all = Tensor::zeros(&size[..], (sum.kind(), sum.device()));
                    add_rows(&all, rows, d);
                    let _ = sum.shallow_clone().g_add_(&all.narrow(0, 0, context));
                    all.narrow(0, context, slots)
                };
                KeyRows { k: part(&sums.k, &of_keys.k), v: part(&sums.v, &of_keys.v) }
            }
        };
        (gradient.dq.to_kind(accumulate_kind(q)), down)
    }
}

/// [kv heads, N, group, D] as [N, heads, D]; a copy if the memory order differs.
pub(super) fn by_row(x_jngd: &Tensor) -> Tensor {
    HeadOrder::ByKeyHead.rows(x_jngd).flatten(1, 2)
}

/// Runs of rows in ascending order; adjacent runs are joined.
#[derive(Debug, Default)]
pub(super) struct RowPlan {
    spans: Vec<Range<usize>>,
    list: Vec<i64>,
}

impl RowPlan {
    fn new(ranges: impl Iterator<Item = Range<usize>>) -> Self {
        let mut plan = Self::default();
        for range in ranges {
            plan.list.extend(range.clone().map(|row| row as i64));
            match plan.spans.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => plan.spans.push(range),
            }
        }
        plan
    }

    /// The rows, if they are a single span.
    pub(super) fn span(&self) -> Option<&Range<usize>> {
        match &self.spans[..] {
            [span] => Some(span),
            _ => None,
        }
    }

    pub(super) fn rows(&self) -> &[i64] {
        &self.list
    }

    /// The rows to gather; none if they are a single span.
    fn listed(&self) -> &[i64] {
        if self.span().is_some() { &[] } else { &self.list }
    }

    fn on_device(&self, listed: Tensor) -> RowSet {
        match self.span() {
            Some(span) => RowSet::Span(span.start as i64, span.len() as i64),
            None => RowSet::Listed(listed),
        }
    }
}

/// A level before it is copied to a device.
#[derive(Debug)]
pub(super) struct LevelPlan {
    pub(super) slots: RowPlan,
    pub(super) context: RowPlan,
    pub(super) lengths: Lengths,
}

impl LevelPlan {
    pub(super) fn new(level: &[Rectangle], block_size: usize) -> Self {
        let slots = |anchors: &Range<usize>| anchors.start * block_size..anchors.end * block_size;
        let lengths = level.iter().map(|it| (slots(&it.anchors).len(), it.context.len()));
        Self {
            lengths: Lengths::new(lengths, Window::ALL),
            slots: RowPlan::new(level.iter().map(|it| slots(&it.anchors))),
            context: RowPlan::new(level.iter().map(|it| it.context.clone())),
        }
    }
}

/// The blocks' own call before it is copied to a device.
#[derive(Debug)]
pub(super) struct OwnPlan {
    /// Row numbers of the concatenated context and own rows; empty if no block has an edge.
    pub(super) keys: Vec<i64>,
    pub(super) lengths: Lengths,
}

impl OwnPlan {
    pub(super) fn new(plan: &BlockPlan, visibility: &Visibility, edges: &[Range<usize>]) -> Self {
        let block_size = plan.block_size();
        let window = own_window(visibility, block_size);
        let lengths = edges.iter().map(|edge| (block_size, edge.len() + block_size));
        let lengths = Lengths::new(lengths, window);
        let block = |(index, edge): (usize, &Range<usize>)| {
            let own = plan.context_rows() + index * block_size;
            edge.clone().chain(own..own + block_size).map(|row| row as i64)
        };
        let keys = match edges.iter().all(Range::is_empty) {
            true => Vec::new(),
            false => edges.iter().enumerate().flat_map(block).collect(),
        };
        Self { keys, lengths }
    }
}

/// Window of a slot over its block's edge followed by its slots. It moves with the slot: the edge's
/// length is the difference between the first and last slot's view.
fn own_window(visibility: &Visibility, block_size: usize) -> Window {
    let right = visibility.causal_in_block.then_some(0);
    let left = match visibility.window {
        Some((window, WindowRule::Serving)) => {
            assert!(visibility.causal_in_block, "a window as it is served is causal in the block");
            Some(window.min(block_size) as i64 - 1)
        }
        _ => None,
    };
    Window { left, right }
}

/// Uploads the lists in one copy and returns views.
pub(super) fn upload<T: Element + Clone>(lists: &[&[T]], device: Device) -> Vec<Tensor> {
    let all = dflash_tensor::upload(&lists.concat(), device);
    let mut start = 0;
    let view = |list: &&[T]| {
        start += list.len() as i64;
        all.narrow(0, start - list.len() as i64, list.len() as i64)
    };
    lists.iter().map(view).collect()
}

#[cfg(test)]
mod tests {
    use dflash_kernels::kernels::Kernels;
    use dflash_test_support::random;
    use tch::{Kind, no_grad};

    use super::*;
    use crate::attention::Method;
    use crate::attention::case::{Case, dense, random_inputs};
    use crate::flops::visible_pairs;

    fn attention(case: &Case, plan: &BlockPlan) -> HalvesAttention {
        let shape = AttentionShape {
            queries_per_kv: case.group,
            head_dim: case.head_dim,
            device: Device::Cpu,
            kind: Kind::Double,
            kernels: Kernels::Portable,
            method: Method::Halves,
        };
        HalvesAttention::new(plan, &case.visibility, &shape)
    }

    impl RowSet {
        fn numbers(&self) -> Vec<i64> {
            match self {
                Self::Span(start, length) => (*start..start + length).collect(),
                Self::Listed(rows) => Vec::<i64>::try_from(rows).unwrap(),
            }
        }
    }

    /// How often each slot meets each context row and each slot, and the pairs per call, from the
    /// calls' arguments.
    fn met(attention: &HalvesAttention, plan: &BlockPlan) -> (Vec<i64>, Vec<i64>) {
        let (slots, context) = (plan.slots() as i64, plan.context_rows() as i64);
        let columns = (context + slots) as usize;
        let mut met = vec![0; slots as usize * columns];
        let mut pairs = Vec::new();
        let own_keys = match &attention.own.keys {
            Some(rows) => Vec::<i64>::try_from(rows).unwrap(),
            None => (context..context + slots).collect(),
        };
        let own = (&attention.own.call, (0..slots).collect(), own_keys);
        let levels =
            attention.levels.iter().map(|it| (&it.call, it.slots.numbers(), it.context.numbers()));
        let calls: Vec<(&Call, Vec<i64>, Vec<i64>)> = std::iter::once(own).chain(levels).collect();
        for (call, queries, keys) in calls {
            let before: i64 = met.iter().sum();
            call.for_each_pair(|query, key| {
                met[queries[query] as usize * columns + keys[key] as usize] += 1;
            });
            pairs.push(met.iter().sum::<i64>() - before);
        }
        (met, pairs)
    }

    #[test]
    fn the_calls_compute_every_visible_pair_once_and_no_other() {
        let mut random = random();
        for _ in 0..60 {
            let case = Case::random(&mut random);
            let plan = case.plan();
            let (met, pairs) = met(&attention(&case, &plan), &plan);
            let mask = case.mask(&plan).to_kind(Kind::Int64);
            assert!(met == Vec::<i64>::try_from(mask.flatten(0, 1)).unwrap(), "{case:?}");
            // The reported arithmetic equals the actual arithmetic.
            assert_eq!(pairs.iter().sum::<i64>(), visible_pairs(&plan, &case.visibility) as i64);
            assert_eq!(mask.sum(None).int64_value(&[]), pairs.iter().sum::<i64>());
        }
    }

    #[test]
    fn within_a_level_no_row_comes_twice() {
        let mut random = random();
        for _ in 0..60 {
            let case = Case::random(&mut random);
            for level in attention(&case, &case.plan()).levels {
                for rows in [level.slots.numbers(), level.context.numbers()] {
                    assert!(rows.is_sorted_by(|a, b| a < b), "{case:?}");
                }
            }
        }
    }

    /// The arguments of a GPU kernel, passed to a reference implementation.
    #[test]
    fn kernels_that_take_the_calls_arguments_give_the_dense_formula_with_all_gradients() {
        let mut random = random();
        for _ in 0..60 {
            let case = Case::random(&mut random);
            let plan = case.plan();
            let inputs = random_inputs(&mut random, &case, &plan);
            let expected = dense(&case, &inputs, &case.mask(&plan));
            let mut attention = attention(&case, &plan);
            attention.own.call.refer();
            attention.levels.iter_mut().for_each(|level| level.call.refer());
            let pair = |index: usize| KeyValue {
                k_jtd: inputs[index].shallow_clone(),
                v_jtd: inputs[index + 1].shallow_clone(),
            };
            let (context, own) = (pair(1), pair(3));
            let found = no_grad(|| {
                let attended = attention.forward(&inputs[0], &context, &own);
                let gradient =
                    attention.backward(&inputs[5], &inputs[0], &context, &own, &attended);
                let AttentionGradient { dq_jngd, context, own } = gradient;
                [attended.out_jngd, dq_jngd, context.k_jtd, context.v_jtd, own.k_jtd, own.v_jtd]
            });
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.size(), expected.size());
                if expected.numel() > 0 {
                    let difference = (found - expected).abs().max().double_value(&[]);
                    assert!(difference <= 1e-10, "result {index}: {difference} in {case:?}");
                }
            }
        }
    }
}
