//! Trains the demo's target: next-token prediction over packed conversations.
//!
//! Only assistant turns carry loss, as in the chat models it stands for. Shapes: `t` tokens of a
//! batch, `s` supervised tokens among them, `h` hidden.

use std::sync::atomic::{AtomicBool, Ordering};

use dflash_model::target::Target;
use dflash_text::ChatTokenizer;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use tch::{Reduction, Tensor};

use crate::corpus::{Exchange, messages};
use crate::error::Error;
use crate::optimizer::{AdamW, rate_at};
use crate::run::Event;

/// Peak learning rate; small models bear a high one.
const PEAK_RATE: f64 = 3e-3;

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Document {
    ids: Vec<i64>,
    /// Positions of tokens that the model must predict.
    supervised: Vec<i64>,
}

/// How long and on how much to train.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// Optimizer steps.
    pub(crate) steps: usize,
    /// Tokens of one step; the last document may reach past it.
    pub(crate) tokens: usize,
    /// Order of the documents.
    pub(crate) seed: u64,
}

/// Renders a conversation and marks its answers, end tokens included.
pub(crate) fn document(tokenizer: &ChatTokenizer, turns: &[Exchange]) -> Result<Document, Error> {
    let all = messages(turns);
    let ids = tokenizer.render_ids(&all, None, false)?;
    let mut supervised = Vec::new();
    for answer in (1..all.len()).step_by(2) {
        let from = tokenizer.render_ids(&all[..answer], None, true)?.len();
        // The template closes every turn with the end token and a newline; only the former counts.
        let to = tokenizer.render_ids(&all[..=answer], None, false)?.len() - 1;
        supervised.extend(from as i64..to as i64);
    }
    Ok(Document { ids, supervised })
}

/// Trains `target` in place; every step is told to `observe`.
pub(crate) fn train(
    target: &Target,
    documents: &[Document],
    plan: Plan,
    stop: &AtomicBool,
    observe: &mut dyn FnMut(Event),
) -> Result<(), Error> {
    let mut optimizer = AdamW::new(target.parameters().into_iter().map(|(_, tensor)| tensor));
    let mut batches = Batches::new(documents, plan);
    for step in 0..plan.steps {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted { step, steps: plan.steps });
        }
        let batch = batches.next_batch();
        let loss = loss(target, &batch);
        optimizer.backward_step(&loss, rate_at(step, plan.steps, PEAK_RATE));
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

/// Documents laid end to end.
#[derive(Debug, Default)]
struct Batch {
    ids: Vec<i64>,
    starts: Vec<i64>,
    supervised: Vec<i64>,
}

/// An endless walk over the documents, shuffled again each time round.
struct Batches<'a> {
    documents: &'a [Document],
    plan: Plan,
    order: Vec<usize>,
    random: ChaCha8Rng,
}

impl<'a> Batches<'a> {
    fn new(documents: &'a [Document], plan: Plan) -> Self {
        let random = ChaCha8Rng::seed_from_u64(plan.seed);
        Self { documents, plan, order: Vec::new(), random }
    }

    fn next_batch(&mut self) -> Batch {
        let mut batch = Batch::default();
        while batch.ids.len() < self.plan.tokens {
            let document = self.next_document();
            let start = batch.ids.len() as i64;
            batch.starts.push(start);
            batch.ids.extend(&document.ids);
            batch.supervised.extend(document.supervised.iter().map(|position| start + position));
        }
        batch.starts.push(batch.ids.len() as i64);
        batch
    }

    fn next_document(&mut self) -> &'a Document {
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
    use dflash_model::target::TargetConfig;
    use tch::Device;

    fn prepared() -> (ChatTokenizer, Vec<Document>) {
        let dir = tempfile::tempdir().unwrap();
        let corpus = conversations(60, 0);
        tokenizer::write(&tokenizer::train(&corpus, 500).unwrap(), dir.path()).unwrap();
        let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
        let documents = corpus.iter().map(|turns| document(&tokenizer, turns).unwrap()).collect();
        (tokenizer, documents)
    }

    #[test]
    fn exactly_the_answers_are_supervised() {
        let (tokenizer, documents) = prepared();
        for (turns, document) in conversations(60, 0).iter().zip(&documents) {
            let ids: Vec<i64> =
                document.supervised.iter().map(|&p| document.ids[p as usize]).collect();
            let expect: String =
                turns.iter().map(|turn| format!("{}<|im_end|>", turn.answer)).collect();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), expect);
        }
    }

    #[test]
    fn a_batch_shifts_positions_and_an_epoch_sees_all() {
        let document = |n: i64| Document { ids: vec![n; 3], supervised: vec![2] };
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
        let target =
            Target::random(TargetConfig::qwen3(32, 2, tokenizer.len() as i64), 0, Device::Cpu);
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
    fn a_set_flag_stops_before_the_next_step() {
        let (tokenizer, documents) = prepared();
        let target =
            Target::random(TargetConfig::qwen3(32, 1, tokenizer.len() as i64), 0, Device::Cpu);
        let plan = Plan { steps: 5, tokens: 100, seed: 0 };
        let stopped = train(&target, &documents, plan, &AtomicBool::new(true), &mut |_| ());
        assert!(matches!(stopped, Err(Error::Interrupted { step: 0, steps: 5 })));
    }
}
