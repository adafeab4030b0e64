//! DFlash with a low-rank Markov term: the previous token changes a token's logits.
//!
//! For a slot whose previous token is x the logits are `z + W2 W1[x]`, where z is the output of the
//! target's LM head. In training x is the data's token; in decoding it is the token just proposed,
//! so a block is chosen token by token. Both tables are embeddings: W1 by target ids, W2 by ids of
//! the draft's vocabulary. W2 starts at zero, so a fresh draft equals a DFlash draft.
//!
//! No engine serves such a draft: it is a minimal example of a head. Shapes: `r` the rank; others
//! as in [`super::super::head`].

use dflash_settings::{DEFAULT_MARKOV_RANK, DraftSettings, ExportFormat, SpeculatorType};
use dflash_tensor::{Error, Result};
use serde_json::{Map, json};
use tch::Tensor;

use crate::draft::head::{
    Choose, Head, HeadChunk, HeadConfig, HeadKind, HeadStart, HeadViews, MetricSums, ProposalBlock,
};
use crate::draft::{DraftConfig, Fresh, HeadFields, ParameterSpec};
use crate::flops::{RowFlops, RowWork};

/// Its keys in config.json.
const RANK: &str = "markov_rank";
const DRAFT_VOCABULARY: &str = "draft_vocab_size";

const W1: &str = "markov_head.markov_w1.weight";
const W2: &str = "markov_head.markov_w2.weight";

/// Standard deviation of a fresh W1: small relative to the LM-head output that the term is added
/// to.
const W1_DEVIATION: f64 = 0.02;

/// The type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Markov;

impl HeadKind for Markov {
    fn speculator_type(&self) -> SpeculatorType {
        SpeculatorType::Markov
    }

    fn fresh(&self, settings: &DraftSettings, start: HeadStart<'_>) -> HeadFields {
        let kind = self.speculator_type().name().to_owned();
        let stored = start.stored.filter(|head| head.kind == kind);
        let stored = stored.and_then(|head| head.keys.get(RANK).cloned());
        let rank = settings.markov.markov_rank.map(|rank| json!(rank)).or(stored);
        let mut keys = Map::new();
        keys.insert(RANK.into(), rank.unwrap_or_else(|| json!(DEFAULT_MARKOV_RANK)));
        keys.insert(DRAFT_VOCABULARY.into(), json!(start.draft_vocabulary));
        HeadFields { kind, keys, ..HeadFields::default() }
    }

    fn read(&self, config: &DraftConfig) -> Result<Box<dyn HeadConfig>> {
        let number = |key: &'static str, most: i64| {
            let found = config.head.keys.get(key);
            let fits = |number: &i64| (1..=most).contains(number);
            found.and_then(|value| value.as_i64()).filter(fits).ok_or_else(|| Error::Head {
                kind: SpeculatorType::Markov.name(),
                key,
                found: found.map_or_else(|| "missing".into(), ToString::to_string),
                expected: "a positive number, at most the target's tokens, is needed",
            })
        };
        let vocabulary = config.vocab_size;
        Ok(Box::new(MarkovConfig {
            rank: number(RANK, vocabulary)?,
            vocabulary,
            draft_vocabulary: number(DRAFT_VOCABULARY, vocabulary)?,
        }))
    }
}

#[derive(Clone, Copy, Debug)]
struct MarkovConfig {
    rank: i64,
    vocabulary: i64,
    draft_vocabulary: i64,
}

impl HeadConfig for MarkovConfig {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let Self { rank, vocabulary, draft_vocabulary } = *self;
        vec![
            ParameterSpec::embedding(W1, [vocabulary, rank], Fresh::Normal(W1_DEVIATION)),
            ParameterSpec::embedding(W2, [draft_vocabulary, rank], Fresh::Zeros),
        ]
    }

    fn build(&self, weights: &HeadViews) -> Box<dyn Head> {
        Box::new(MarkovHead { w1_vr: weights.get(W1), w2_vr: weights.get(W2) })
    }

    fn flops(&self, work: &RowWork) -> RowFlops {
        let product = 2.0 * work.active_slots * self.rank as f64 * self.draft_vocabulary as f64;
        RowFlops { forward: product, backward: 2.0 * product }
    }

    fn unservable(&self, _: ExportFormat) -> Option<String> {
        let name = SpeculatorType::Markov.name();
        Some(format!(
            "no engine supports the head of this draft, {name}; use dflash generate, serve or eval"
        ))
    }
}

#[derive(Debug)]
struct MarkovHead {
    w1_vr: Tensor,
    w2_vr: Tensor,
}

impl MarkovHead {
    /// `base_nv` plus the term for the tokens `previous_n`, in the type of `base_nv`.
    fn with_term(&self, base_nv: &Tensor, previous_n: &Tensor) -> Tensor {
        let previous_nr = self.w1_vr.index_select(0, previous_n);
        base_nv + previous_nr.matmul(&self.w2_vr.tr()).to_kind(base_nv.kind())
    }
}

/// Cross-entropy `[m]` of `tokens_m` under logits [m, V].
fn cross_entropy(logits_mv: &Tensor, tokens_m: &Tensor) -> Tensor {
    let own_m = logits_mv.gather(1, &tokens_m.unsqueeze(1), false).squeeze_dim(1);
    logits_mv.logsumexp([1i64].as_slice(), false) - own_m
}

impl Head for MarkovHead {
    /// The term's reduction of the data token's cross-entropy, in nats.
    fn metrics(&self) -> &'static [&'static str] {
        &["markov_gain"]
    }

    fn logits(&self, chunk: &HeadChunk<'_>, base_mv: Tensor, sums: &mut MetricSums) -> Tensor {
        let logits_mv = self.with_term(&base_mv, &chunk.previous_m());
        let [before, after] =
            [&base_mv, &logits_mv].map(|logits| cross_entropy(logits, chunk.tokens_m));
        sums.add(0, &(before - after));
        logits_mv
    }

    fn backward(&self, chunk: &HeadChunk<'_>, dlogits_mv: &Tensor) -> Option<Tensor> {
        let gradient = chunk.gradient?;
        let previous_m = chunk.previous_m();
        let previous_mr = self.w1_vr.index_select(0, &previous_m);
        let dlogits_mv = dlogits_mv.to_kind(self.w2_vr.kind());
        gradient.add_product(W2, &dlogits_mv, &previous_mr);
        gradient.add_rows(W1, &previous_m, &dlogits_mv.matmul(&self.w2_vr));
        None
    }

    fn propose(&self, block: &ProposalBlock<'_>, choose: &mut dyn Choose) {
        let base_nv = block.lm_head.products(block.hidden_nh);
        let mut previous = block.anchor;
        for row in 0..base_nv.size()[0] {
            let previous_1 = Tensor::from_slice(&[previous]).to_device(base_nv.device());
            previous = choose.choose(&self.with_term(&base_nv.narrow(0, row, 1), &previous_1));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use dflash_test_support::seeded;
    use tch::{Device, Kind};

    use super::*;
    use crate::draft::{BlockShape, LmHead};
    use crate::objective::{
        BlockLabels, Denominator, DraftVocabulary, ElementLoss, HeadPass, LabelSource, LabelledRow,
        Objective, TargetDistribution, Weighting,
    };
    use dflash_tensor::{Kernels, LogitTransform};

    const WIDE: (Kind, Device) = (Kind::Double, Device::Cpu);
    const BLOCK: usize = 4;
    const GAMMA: f64 = 3.0;

    fn config(head: serde_json::Value) -> Result<DraftConfig> {
        let config = json!({
            "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
            "rope_theta": 100.0, "vocab_size": 11, "max_position_embeddings": 32, "block_size": 4,
            "dflash_config": {"mask_token_id": 8, "target_layer_ids": [0, 1], "head": head}
        });
        Ok(DraftConfig::parse(Path::new("config.json"), &config.to_string())?)
    }

    fn head(w1_vr: &Tensor, w2_vr: &Tensor) -> MarkovHead {
        MarkovHead { w1_vr: w1_vr.shallow_clone(), w2_vr: w2_vr.shallow_clone() }
    }

    fn views(w1_vr: &Tensor, w2_vr: &Tensor) -> HeadViews {
        let named = [(W1, w1_vr), (W2, w2_vr)];
        HeadViews::new(named.into_iter().map(|(name, own)| (name.into(), own.shallow_clone())))
    }

    /// The loss as defined, with autograd operations: cross-entropy alone, or plus the divergence
    /// from the target's distribution.
    fn defined(
        [hidden_nh, w1_vr, w2_vr, lm_head_vh]: [&Tensor; 4],
        labels: &BlockLabels,
        previous: &[i64],
        target_mv: Option<&Tensor>,
    ) -> Tensor {
        let slots = Tensor::from_slice(labels.slots());
        let previous_m = Tensor::from_slice(previous).index_select(0, &slots);
        let term_mv = w1_vr.index_select(0, &previous_m).matmul(&w2_vr.tr());
        let logits_mv = hidden_nh.index_select(0, &slots).matmul(&lm_head_vh.tr()) + term_mv;
        let log_q = logits_mv.log_softmax(-1, Kind::Double);
        let tokens = Tensor::from_slice(labels.tokens()).unsqueeze(1);
        let mut loss_m = -log_q.gather(1, &tokens, false).squeeze_dim(1);
        if let Some(target_mv) = target_mv {
            let log_p = target_mv.log_softmax(-1, Kind::Double);
            let kl = (log_p.exp() * (&log_p - &log_q)).sum_dim_intlist(-1, false, Kind::Double);
            loss_m += kl * 0.5;
        }
        let weight = |&slot: &i64| (-((slot % BLOCK as i64 - 1) as f64) / GAMMA).exp();
        let weights: Vec<f64> = labels.slots().iter().map(weight).collect();
        (loss_m * Tensor::from_slice(&weights)).sum(Kind::Double)
    }

    #[test]
    fn gradients_are_those_of_autograd() {
        let _draws = seeded(tch::manual_seed);
        for (pruned, with_distribution) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let row = LabelledRow {
                input_ids: &[3, 1, 4, 1, 5, 9, 2, 6, 5, 3],
                loss_mask: &[true, true, true, false, true, true, true, true, true, true],
                document_starts: &[0, 7, 10],
            };
            let selected = if pruned { vec![1, 2, 3, 4, 5, 9] } else { (0..11).collect() };
            let vocabulary = DraftVocabulary::new(selected.clone(), 11);
            let anchors = [0, 2, 7];
            let block = BlockShape::fill_in(BLOCK);
            let labels = BlockLabels::new(row, &anchors, block, Some(&vocabulary));
            // the token before row k of a block is at its anchor plus k - 1
            let before = |slot: usize| anchors[slot / BLOCK] + (slot % BLOCK).saturating_sub(1);
            let previous: Vec<i64> =
                (0..3 * BLOCK).map(|slot| row.input_ids[before(slot).min(9)]).collect();
            let tokens = selected.len() as i64;
            let normal = |shape: [i64; 2]| Tensor::randn(shape, WIDE).set_requires_grad(true);
            let (hidden_nh, w1_vr, w2_vr) = (normal([12, 5]), normal([11, 3]), normal([tokens, 3]));
            let lm_head_vh = Tensor::randn([tokens, 5], WIDE);
            let normed_rh = Tensor::randn([10, 5], WIDE);
            let rows_m = labels.distribution_rows_on(Device::Cpu);
            let target_mv = normed_rh.index_select(0, &rows_m).matmul(&lm_head_vh.tr());
            let target_mv = with_distribution.then_some(&target_mv);
            let parts = [&hidden_nh, &w1_vr, &w2_vr, &lm_head_vh];
            let loss = defined(parts, &labels, &previous, target_mv);
            loss.backward();

            let [dw1_vr, dw2_vr] = [&w1_vr, &w2_vr].map(Tensor::zeros_like);
            let gradient = views(&dw1_vr.detach(), &dw2_vr.detach());
            let head = head(&w1_vr.detach(), &w2_vr.detach());
            let mut terms = vec![(ElementLoss::CrossEntropy, 1.0)];
            terms.extend(with_distribution.then_some((ElementLoss::Kl, 0.5)));
            let objective = Objective {
                terms,
                weighting: Weighting::Decay { gamma: GAMMA },
                denominator: Denominator::Weights,
                labels: LabelSource::Data,
                // a few slots per chunk, so gradients accumulate over chunks
                chunk_bytes: 300,
                kernels: Kernels::Fast,
            };
            let pass = HeadPass { head: &head, lm_head_vh: &lm_head_vh, gradient: Some(&gradient) };
            let output = LogitTransform::identity();
            let head_vh = lm_head_vh.shallow_clone();
            let target_distribution = with_distribution.then_some(TargetDistribution {
                normed_rh,
                rows_m,
                head_vh,
                output,
            });
            let found = tch::no_grad(|| {
                objective.evaluate(pass, &hidden_nh.detach(), &labels, target_distribution.as_ref())
            });
            let near = |what: &str, found: &Tensor, expected: &Tensor| {
                let off = (found - expected).abs().max().double_value(&[]);
                assert!(
                    off < 1e-9,
                    "{what}, pruned {pruned}, target distribution {with_distribution}: {off}"
                );
                assert!(expected.abs().max().double_value(&[]) > 1e-3, "{what} has a gradient");
            };
            near("w1", &gradient.get(W1), &w1_vr.grad());
            near("w2", &gradient.get(W2), &w2_vr.grad());
            near("hidden", &found.dhidden_nh, &hidden_nh.grad());
            let report = found.statistics.report(0.0);
            let loss = loss.double_value(&[]);
            assert!((report.loss * report.denominator - loss).abs() < 1e-9, "{}", report.loss);
            assert!(matches!(report.of_head[..], [("markov_gain", gain)] if gain.is_finite()));
        }
    }

    /// Uniform logits.
    #[derive(Debug)]
    struct Level;

    impl LmHead for Level {
        fn products(&self, hidden_nh: &Tensor) -> Tensor {
            Tensor::zeros([hidden_nh.size()[0], 5], WIDE)
        }
    }

    #[derive(Default)]
    struct Best(Vec<i64>);

    impl Choose for Best {
        fn choose(&mut self, logits_1v: &Tensor) -> i64 {
            self.0.push(logits_1v.argmax(1, false).int64_value(&[0]));
            self.0[self.0.len() - 1]
        }
    }

    #[test]
    fn each_proposal_follows_from_the_one_before() {
        // token x asks for x + 2, modulo five
        let w1_vr = Tensor::eye(5, WIDE);
        let head = head(&w1_vr, &w1_vr.roll([2], [0]));
        let hidden_nh = &Tensor::zeros([4, 8], WIDE);
        let block = ProposalBlock { hidden_nh, anchor: 1, lm_head: &Level };
        let mut best = Best::default();
        head.propose(&block, &mut best);
        assert_eq!(best.0, [3, 0, 2, 4]);
    }

    #[test]
    fn a_fresh_draft_is_a_dflash_one_with_two_tables_behind() {
        let keys = json!({"kind": "markov", "markov_rank": 3, "draft_vocab_size": 7});
        let config = config(keys).unwrap();
        let draft = crate::draft::Draft::init(config.clone(), Device::Cpu, |shape| {
            Tensor::ones(shape, (Kind::Float, Device::Cpu))
        });
        let layout = draft.layout();
        let plain = DraftConfig { head: HeadFields::default(), ..config };
        let plain = crate::draft::DraftLayout::new(&plain);
        let [.., w1, w2] = layout.parameters() else { panic!("there are some") };
        assert_eq!(
            (&*w1.name, &*w1.shape, &*w2.name, &*w2.shape),
            (W1, &[11, 3][..], W2, &[7, 3][..])
        );
        assert_eq!(
            (w1.offset, layout.buckets().len()),
            (plain.elements(), plain.buckets().len() + 1)
        );
        assert_eq!(w2.view(draft.flat()).abs().max().double_value(&[]), 0.0);
    }

    #[test]
    fn what_does_not_make_a_head_is_named() {
        let check = |head: serde_json::Value, expected: &str| {
            let message = crate::draft::check_head(&config(head).unwrap()).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        };
        check(json!({"kind": "markov", "draft_vocab_size": 7}), "markov_rank");
        check(json!({"kind": "markov", "markov_rank": 0, "draft_vocab_size": 7}), "is 0");
        check(json!({"kind": "markov", "markov_rank": 2, "draft_vocab_size": 12}), "is 12");
        check(json!({"kind": "other"}), "it knows dflash, markov");
    }
}
