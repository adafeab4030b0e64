//! The planned attention against a dense reference: random packings, anchors, windows and heads.
//!
//! The reference masks every (slot, context) pair and is differentiated by autograd in float64.
//! Ours runs in float64 and, on both paths (flash kernels, materialised scores), in float32.

use dflash_model::Kernels;
use dflash_model::attention::{
    AttentionShape, BlockAttention, BlockPlan, KeyValue, Visibility, WindowRule,
};
use dflash_test_support::{ChaCha8Rng, Rng, alone, random};
use tch::{Device, Kind, Tensor, no_grad};

const PATHS: [Kernels; 2] = [Kernels::Fast, Kernels::Portable];

/// One random case.
#[derive(Debug)]
struct Case {
    starts: Vec<usize>,
    anchors: Vec<usize>,
    block_size: usize,
    kv_heads: i64,
    group: i64,
    head_dim: i64,
    visibility: Visibility,
}

impl Case {
    fn random(random: &mut ChaCha8Rng) -> Self {
        // A long document's late anchors see a middle that is worth a call of its own.
        let (longest, densest) = if random.random_bool(0.3) { (500, 0.3) } else { (90, 1.0) };
        let mut starts = vec![0];
        for _ in 0..random.random_range(1..5) {
            starts.push(starts.last().unwrap() + random.random_range(1..longest));
        }
        let end = *starts.last().unwrap();
        let share = random.random_range(0.05..densest);
        let mut anchors: Vec<usize> = (0..end).filter(|_| random.random_bool(share)).collect();
        if anchors.is_empty() {
            anchors.push(random.random_range(0..end));
        }
        let window = if random.random_bool(0.2) { 300 } else { random.random_range(1..40) };
        let visibility = match random.random_range(0..4) {
            0 => Visibility::sliding(window),
            1 => Visibility {
                window: Some((window, WindowRule::Speculators)),
                causal_in_block: true,
            },
            2 => Visibility {
                window: Some((window, WindowRule::Speculators)),
                causal_in_block: false,
            },
            _ => Visibility::FULL,
        };
        Self {
            starts,
            anchors,
            block_size: random.random_range(2..9),
            kv_heads: random.random_range(1..4),
            group: random.random_range(1..4),
            head_dim: 2 * random.random_range(1..9),
            visibility,
        }
    }

    fn plan(&self) -> BlockPlan {
        BlockPlan::new(&self.starts, &self.anchors, self.block_size, &[self.visibility])
    }

    fn sees_slot(&self, slot: usize, other: usize) -> bool {
        let in_window = match self.visibility.window {
            Some((window, WindowRule::Serving)) => slot < other + window,
            _ => true,
        };
        !self.visibility.causal_in_block || other <= slot && in_window
    }

    /// Whether each slot sees each context row and each slot, [N, C + N].
    fn mask(&self, plan: &BlockPlan) -> Tensor {
        let sources: Vec<usize> = plan.context_sources().flatten().collect();
        let document =
            |position: usize| self.starts.partition_point(|&start| start <= position) - 1;
        let mut mask = Vec::new();
        for (block, &anchor) in self.anchors.iter().enumerate() {
            let start = self.starts[document(anchor)];
            for slot in 0..self.block_size {
                let seen = self.visibility.context(anchor - start, slot);
                mask.extend(sources.iter().map(|&source| {
                    document(source) == document(anchor) && seen.contains(&(source - start))
                }));
                mask.extend((0..plan.slots()).map(|other| {
                    let (other_block, other_slot) =
                        (other / self.block_size, other % self.block_size);
                    block == other_block && self.sees_slot(slot, other_slot)
                }));
            }
        }
        Tensor::from_slice(&mask).view([plan.slots() as i64, (sources.len() + plan.slots()) as i64])
    }
}

/// q [j, N, g, D], context k, v [j, C, D], own k, v [j, N, D], upstream gradient like q.
fn random_inputs(random: &mut ChaCha8Rng, case: &Case, plan: &BlockPlan) -> Vec<Tensor> {
    let _alone = alone();
    tch::manual_seed(random.random());
    let (slots, context) = (plan.slots() as i64, plan.context_rows() as i64);
    let (j, g, d) = (case.kv_heads, case.group, case.head_dim);
    [
        vec![j, slots, g, d],
        vec![j, context, d],
        vec![j, context, d],
        vec![j, slots, d],
        vec![j, slots, d],
        vec![j, slots, g, d],
    ]
    .iter()
    .map(|shape| Tensor::randn(shape, (Kind::Double, Device::Cpu)))
    .collect()
}

/// Output and gradients of q, context k, v, own k, v by the dense formula.
fn dense(case: &Case, inputs: &[Tensor], mask: &Tensor) -> Vec<Tensor> {
    let leaves: Vec<Tensor> =
        inputs[..5].iter().map(|x| x.copy().set_requires_grad(true)).collect();
    let k = Tensor::cat(&[&leaves[1], &leaves[3]], 1);
    let v = Tensor::cat(&[&leaves[2], &leaves[4]], 1);
    let scores = Tensor::einsum("jngd,jtd->jngt", &[&leaves[0], &k], None::<i64>)
        * (case.head_dim as f64).powf(-0.5);
    let hidden = mask.logical_not().unsqueeze(0).unsqueeze(2);
    let weights = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Double);
    let out = Tensor::einsum("jngt,jtd->jngd", &[&weights, &v], None::<i64>);
    (&out * &inputs[5]).sum(Kind::Double).backward();
    std::iter::once(out.detach()).chain(leaves.iter().map(Tensor::grad)).collect()
}

fn planned(
    case: &Case,
    plan: &BlockPlan,
    inputs: &[Tensor],
    (kind, kernels): (Kind, Kernels),
) -> Vec<Tensor> {
    let inputs: Vec<Tensor> = inputs.iter().map(|x| x.to_kind(kind)).collect();
    let shape = AttentionShape {
        queries_per_kv: case.group,
        head_dim: case.head_dim,
        device: Device::Cpu,
        kind,
        kernels,
    };
    let attention = BlockAttention::new(plan, &case.visibility, &shape);
    let pair =
        |k: &Tensor, v: &Tensor| KeyValue { k_jtd: k.shallow_clone(), v_jtd: v.shallow_clone() };
    let (context, own) = (pair(&inputs[1], &inputs[2]), pair(&inputs[3], &inputs[4]));
    let attended = attention.forward(&inputs[0], &context, &own);
    let gradient = attention.backward(&inputs[5], &inputs[0], (&context, &own), &attended);
    vec![
        attended.out_jngd,
        gradient.dq_jngd,
        gradient.context.k_jtd,
        gradient.context.v_jtd,
        gradient.own.k_jtd,
        gradient.own.v_jtd,
    ]
}

fn assert_close(case: &Case, found: &[Tensor], expected: &[Tensor], tolerance: f64) {
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        if expected.numel() == 0 {
            continue;
        }
        let scale = expected.abs().max().double_value(&[]).max(1.0);
        let difference = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
        assert!(
            difference <= tolerance * scale,
            "result {index} differs by {difference} in {case:?}"
        );
    }
}

#[test]
fn planned_attention_equals_the_dense_formula_with_all_gradients() {
    let mut random = random();
    for _ in 0..60 {
        let case = Case::random(&mut random);
        let plan = case.plan();
        let inputs = random_inputs(&mut random, &case, &plan);
        let expected = dense(&case, &inputs, &case.mask(&plan));
        no_grad(|| {
            let check = |kind, kernels, tolerance| {
                let found = planned(&case, &plan, &inputs, (kind, kernels));
                assert_close(&case, &found, &expected, tolerance);
            };
            check(Kind::Double, Kernels::Fast, 1e-10);
            for kernels in PATHS {
                check(Kind::Float, kernels, 2e-5);
            }
        });
    }
}

#[test]
fn nothing_leaks_from_what_a_block_must_not_see() {
    let mut random = random();
    for _ in 0..20 {
        let case = Case::random(&mut random);
        let plan = case.plan();
        let inputs = random_inputs(&mut random, &case, &plan);
        let mask = case.mask(&plan);
        let block = random.random_range(0..case.anchors.len());
        let slots = block * case.block_size..(block + 1) * case.block_size;
        // everything that no slot of the block sees becomes something else
        let hidden = mask
            .narrow(0, slots.start as i64, case.block_size as i64)
            .any_dim(0, false)
            .logical_not();
        let context = plan.context_rows() as i64;
        let hide = |x: &Tensor, start: i64, rows: i64| {
            let at = hidden.narrow(0, start, rows).view([1, rows, 1]);
            x.where_self(&at.logical_not(), &(x * -3.0 + 100.0))
        };
        let mut changed: Vec<Tensor> = inputs.iter().map(Tensor::copy).collect();
        for index in [1, 2] {
            changed[index] = hide(&inputs[index], 0, context);
            changed[index + 2] = hide(&inputs[index + 2], context, plan.slots() as i64);
        }
        for kernels in PATHS {
            let of_block = |inputs: &[Tensor]| {
                no_grad(|| planned(&case, &plan, inputs, (Kind::Float, kernels)))[0]
                    .narrow(1, slots.start as i64, case.block_size as i64)
                    .copy()
            };
            let expected = of_block(&inputs).to_kind(Kind::Double);
            assert_close(&case, &[of_block(&changed)], &[expected], 1e-6);
        }
    }
}

/// Relative error of the gradients in bfloat16 over 64 chunks: 2e-4 to 4e-4 was measured with sums in
/// float32, since each chunk's part is rounded once; 1.5e-2 with sums in bfloat16.
const BF16_SUM: f64 = 1e-3;

/// Every chunk behind a context row adds to that row's gradients: in bfloat16, whose sums stop
/// growing at 256 addends of one size, the sum itself has to be wider.
#[test]
fn in_bf16_a_context_rows_gradients_over_many_chunks_are_those_of_float64() {
    const SEEN_BY_ALL: i64 = 130;
    let anchors = SEEN_BY_ALL as usize..SEEN_BY_ALL as usize + 512;
    let case = Case {
        starts: vec![0, anchors.end],
        anchors: anchors.collect(),
        block_size: 8,
        kv_heads: 2,
        group: 8,
        head_dim: 8,
        visibility: Visibility::FULL,
    };
    let plan = case.plan();
    let chunks = plan.chunks(&case.visibility, case.group as usize).len();
    assert!(chunks >= 64, "{chunks} chunks");
    // Queries and upstream gradients of one sign mostly, so that the sums grow from chunk to chunk.
    let inputs: Vec<Tensor> = random_inputs(&mut random(), &case, &plan)
        .iter()
        .zip([0.5, 0.0, 0.0, 0.0, 0.0, 1.0])
        .map(|(x, mean)| (x * 0.5 + mean).to_kind(Kind::BFloat16).to_kind(Kind::Double))
        .collect();
    let context = |kind, kernels| {
        let results = no_grad(|| planned(&case, &plan, &inputs, (kind, kernels)));
        [&results[2], &results[3]].map(|x| x.narrow(1, 0, SEEN_BY_ALL).to_kind(Kind::Double))
    };
    let expected = context(Kind::Double, Kernels::Fast);
    for kernels in PATHS {
        for (found, expected) in context(Kind::BFloat16, kernels).iter().zip(&expected) {
            let error = ((found - expected).norm() / expected.norm()).double_value(&[]);
            assert!(error <= BF16_SUM, "{kernels:?} is off by {error:e}");
        }
    }
}
