//! Trains the demo's target: next-token prediction over packed conversations.
//!
//! Only assistant turns have a loss, as for real chat models. Shapes: `t` tokens of a batch, `s`
//! supervised tokens among them, `h` hidden.

use std::sync::atomic::{AtomicBool, Ordering};

use dflash_chat::{ChatTokenizer, Conversation, SegmentCache};
use dflash_data::Sample;
use dflash_draft::{Fresh, Parameter, ParameterSpec, Role};
use dflash_prepare::{Refusal, conversation_rows};
use dflash_settings::{SchedulerType, Warmup};
use dflash_target::Target;
use dflash_train::optimizer::{
    AdamWConfig, Groups, Optimizer, OptimizerConfig, WeightDecay, gradient_norm,
};
use dflash_train::schedule::Schedule;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use tch::{Reduction, Tensor, no_grad};

use crate::corpus::{Exchange, messages};
use crate::error::Error;
use crate::run::Event;

/// Peak learning rate; small models allow a high one.
const PEAK_RATE: f64 = 3e-3;
/// Decay of the average of squared gradients: faster than usual, because the whole run is a few
/// hundred steps.
const BETA2: f64 = 0.98;
const WEIGHT_DECAY: f64 = 0.05;
/// Gradients with a larger norm are scaled down.
const MAX_NORM: f64 = 1.0;
const SCHEDULE: Schedule = Schedule {
    kind: SchedulerType::Cosine,
    warmup: Warmup::Share(0.05),
    decay_ratio: 0.0,
    minimum: 0.1,
};

/// How long to train, and on how much.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) steps: usize,
    /// Tokens of one step; the last document may exceed it.
    pub(crate) tokens: usize,
    /// Order of the documents.
    pub(crate) seed: u64,
}

/// Renders a conversation and marks its answers, as `dflash prepare` does.
pub(crate) fn document(tokenizer: &ChatTokenizer, turns: &[Exchange]) -> Result<Sample, Error> {
    let conversation = Conversation { messages: messages(turns), tools: None };
    match conversation_rows(tokenizer, &conversation, &mut SegmentCache::default(), usize::MAX) {
        // One sample for all turns, because the template does not rewrite history.
        Ok(mut rows) => Ok(rows.samples.remove(0)),
        Err(Refusal::Failed(error)) => Err(error.into()),
        Err(refusal) => panic!("a conversation of the corpus has answers: {refusal:?}"),
    }
}

/// Trains `target` in place; `observe` is called after every step.
pub(crate) fn train(
    target: &Target,
    documents: &[Sample],
    plan: Plan,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(Event),
) -> Result<(), Error> {
    let mut weights = Weights::new(target);
    let mut batches = Batches::new(documents, plan);
    for step in 0..plan.steps {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted { step, steps: plan.steps });
        }
        let batch = batches.next_batch();
        let loss = loss(target, &batch);
        let rate = PEAK_RATE * SCHEDULE.of_step(step as u64, plan.steps as u64);
        weights.backward_step(&loss, rate);
        observe(Event::Step { step: step + 1, steps: plan.steps, loss: loss.double_value(&[]) });
    }
    Ok(())
}

fn loss(target: &Target, batch: &Batch) -> Tensor {
    let last = target.num_layers() as u32;
    let ids_t = Tensor::from_slice(&batch.ids).to_device(target.device());
    let hidden_th = target.forward_packed(&ids_t, &batch.starts, &[last]).remove(0);
    let labels_s = Tensor::from_slice(&batch.supervised).to_device(target.device());
    let hidden_sh = hidden_th.index_select(0, &(&labels_s - 1));
    target.logits(&hidden_sh).cross_entropy_loss::<Tensor>(
        &ids_t.index_select(0, &labels_s),
        None,
        Reduction::Mean,
        -100,
        0.0,
    )
}

/// The target's parameters, and a copy of them as one buffer, which the optimizer works on.
struct Weights {
    parameters: Vec<(Parameter, Tensor)>,
    flat: Tensor,
    optimizer: Optimizer,
}

impl Weights {
    fn new(target: &Target) -> Self {
        let mut elements = 0;
        let place = |(name, tensor): (String, Tensor)| {
            // What is not a matrix of this target is a norm's weight; it has its values already.
            let role = if tensor.dim() > 1 { Role::Matrix } else { Role::Vector };
            let spec = ParameterSpec::new(name, &tensor.size(), role, Fresh::Zeros);
            let parameter = Parameter { spec, offset: elements };
            elements += parameter.elements();
            (parameter, tensor)
        };
        let parameters: Vec<_> = target.parameters().into_iter().map(place).collect();
        let flat = flattened(parameters.iter().map(|(_, tensor)| tensor.detach()));
        let listed: Vec<_> = parameters.iter().map(|(parameter, _)| parameter.clone()).collect();
        let config = OptimizerConfig {
            adamw: AdamWConfig { beta2: BETA2, ..AdamWConfig::default() },
            weight_decay: WeightDecay { matrices: WEIGHT_DECAY, norms: 0.0 },
            ..OptimizerConfig::default()
        };
        let optimizer = Optimizer::new(&config, Groups::of(&listed, &(0..elements)), &flat);
        Self { parameters, flat, optimizer }
    }

    /// Runs the backward pass of `loss` and updates every parameter.
    fn backward_step(&mut self, loss: &Tensor, rate: f64) {
        self.parameters.iter_mut().for_each(|(_, tensor)| tensor.zero_grad());
        loss.backward();
        no_grad(|| {
            let gradient = flattened(self.parameters.iter().map(|(_, tensor)| tensor.grad()));
            let norm = gradient_norm(&gradient).double_value(&[]);
            self.optimizer.step(&mut self.flat, &(gradient * (MAX_NORM / norm).min(1.0)), rate);
            for (parameter, tensor) in &mut self.parameters {
                tensor.copy_(&parameter.view(&self.flat));
            }
        });
    }
}

fn flattened(tensors: impl Iterator<Item = Tensor>) -> Tensor {
    Tensor::cat(&tensors.map(|tensor| tensor.flatten(0, -1)).collect::<Vec<_>>(), 0)
}

/// Documents laid end to end.
#[derive(Debug, Default)]
struct Batch {
    ids: Vec<i64>,
    starts: Vec<i64>,
    /// Positions of tokens that the model must predict.
    supervised: Vec<i64>,
}

/// An endless walk over the documents, reshuffled on every pass.
struct Batches<'a> {
    documents: &'a [Sample],
    plan: Plan,
    order: Vec<usize>,
    random: ChaCha8Rng,
}

impl<'a> Batches<'a> {
    fn new(documents: &'a [Sample], plan: Plan) -> Self {
        let random = ChaCha8Rng::seed_from_u64(plan.seed);
        Self { documents, plan, order: Vec::new(), random }
    }

    fn next_batch(&mut self) -> Batch {
        let mut batch = Batch::default();
        while batch.ids.len() < self.plan.tokens {
            let document = self.next_document();
            let start = batch.ids.len() as i64;
            batch.starts.push(start);
            batch.ids.extend(&document.input_ids);
            let marked = (start..).zip(&document.loss_mask).filter(|(_, supervised)| **supervised);
            batch.supervised.extend(marked.map(|(position, _)| position));
        }
        batch.starts.push(batch.ids.len() as i64);
        batch
    }

    fn next_document(&mut self) -> &'a Sample {
        if self.order.is_empty() {
            self.order = (0..self.documents.len()).collect();
            self.order.shuffle(&mut self.random);
        }
        &self.documents[self.order.pop().expect("just filled")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::conversations;
    use crate::tokenizer;
    use dflash_target::TargetConfig;
    use tch::Device;

    fn prepared() -> (ChatTokenizer, Vec<Sample>) {
        let dir = tempfile::tempdir().unwrap();
        let corpus = conversations(60, 0);
        tokenizer::write(&tokenizer::train(&corpus, 500).unwrap(), dir.path()).unwrap();
        let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
        let documents = corpus.iter().map(|turns| document(&tokenizer, turns).unwrap()).collect();
        (tokenizer, documents)
    }

    fn target(layers: usize, vocabulary: usize) -> Target {
        Target::random(TargetConfig::qwen3(32, layers, vocabulary as i64), 0, Device::Cpu)
    }

    #[test]
    fn exactly_the_answers_are_supervised() {
        let (tokenizer, documents) = prepared();
        for (turns, document) in conversations(60, 0).iter().zip(&documents) {
            let marked = document.input_ids.iter().zip(&document.loss_mask);
            let ids: Vec<i64> = marked.filter(|(_, mask)| **mask).map(|(&id, _)| id).collect();
            let expect: String =
                turns.iter().map(|turn| format!("{}<|im_end|>", turn.answer)).collect();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), expect);
        }
    }

    #[test]
    fn a_batch_shifts_positions_and_an_epoch_sees_all() {
        let document =
            |n: i64| Sample { input_ids: vec![n; 3], loss_mask: vec![false, false, true] };
        let documents = [document(7), document(8)];
        let plan = Plan { steps: 1, tokens: 6, seed: 0 };
        let batch = Batches::new(&documents, plan).next_batch();
        assert_eq!((batch.starts, batch.supervised), (vec![0, 3, 6], vec![2, 5]));
        let mut seen = batch.ids;
        seen.dedup();
        seen.sort_unstable();
        assert_eq!(seen, [7, 8]);
    }

    #[test]
    fn a_few_steps_lower_the_loss() {
        let (tokenizer, documents) = prepared();
        let target = target(2, tokenizer.len());
        let mut losses = Vec::new();
        let plan = Plan { steps: 30, tokens: 400, seed: 0 };
        let mut observe = |event| {
            if let Event::Step { loss, .. } = event {
                losses.push(loss);
            }
        };
        train(&target, &documents, plan, &AtomicBool::new(false), &mut observe).unwrap();
        assert!(losses[0] > 5.0 && losses[29] < losses[0] - 0.8, "{losses:?}");
    }

    #[test]
    fn the_first_step_is_as_long_as_the_rate_and_only_matrices_decay() {
        let target = target(1, 50);
        let mut weights = Weights::new(&target);
        let before = weights.flat.copy();
        let (ids, supervised) = ((0..20).collect(), (1..20).collect());
        let batch = Batch { ids, starts: vec![0, 20], supervised };
        let rate = 0.125;
        weights.backward_step(&loss(&target, &batch), rate);
        for ((parameter, _), (name, tensor)) in weights.parameters.iter().zip(target.parameters()) {
            let decay =
                if parameter.role == Role::Matrix { 1.0 - rate * WEIGHT_DECAY } else { 1.0 };
            let moved = tensor.detach() - parameter.view(&before) * decay;
            let longest = moved.abs().max().double_value(&[]);
            assert!((longest - rate).abs() < 1e-4, "{name}: {longest}");
        }
    }
}
