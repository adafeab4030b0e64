//! Random packings, anchors, windows and heads, and the dense reference: a mask over every (slot,
//! context) pair, differentiated by autograd in float64.

use dflash_draft::attention::{BlockPlan, Visibility, WindowRule};
use dflash_test_support::{ChaCha8Rng, Rng, alone};
use tch::{Device, Kind, Tensor};

#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) starts: Vec<usize>,
    pub(crate) anchors: Vec<usize>,
    pub(crate) block_size: usize,
    pub(crate) kv_heads: i64,
    pub(crate) group: i64,
    pub(crate) head_dim: i64,
    pub(crate) visibility: Visibility,
}

impl Case {
    pub(crate) fn random(random: &mut ChaCha8Rng) -> Self {
        // A long document's late anchors have a middle context large enough for its own call.
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

    pub(crate) fn plan(&self) -> BlockPlan {
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
    pub(crate) fn mask(&self, plan: &BlockPlan) -> Tensor {
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
pub(crate) fn random_inputs(random: &mut ChaCha8Rng, case: &Case, plan: &BlockPlan) -> Vec<Tensor> {
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
pub(crate) fn dense(case: &Case, inputs: &[Tensor], mask: &Tensor) -> Vec<Tensor> {
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
