//! The head of a draft: what becomes of the trunk's hidden states, in training and in decoding.
//!
//! The trunk is the same for all drafts: features of the target, layers, a final norm. A head turns its
//! hidden states into logits, beginning from their products with the target's frozen LM head, may have
//! parameters and a loss of its own, and proposes the tokens of a block, all at once or one by one.
//!
//! A head is one file under `heads/`, with two lines beside it there ([`HEADS`]), and its settings and its
//! [`SpeculatorType`] in `dflash-settings`.
//! Its parameters lie behind the trunk's in the draft's one flat buffer, so that checkpoints, optimizers
//! and collectives need not know it. They are a bucket of their own, whose gradients are final first.
//!
//! Shapes: `m` supervised slots of a chunk, `n` slots of a row or rows of a block, `v` tokens of the
//! draft's vocabulary.

use std::fmt::Debug;

use dflash_settings::{DraftSettings, ExportFormat, SpeculatorType};
use dflash_tensor::{Error, Result};
use tch::{Kind, Tensor};

use super::heads::HEADS;
use super::train::accumulate_product;
use super::{DraftConfig, HeadFields, ParameterSpec};
use crate::flops::{RowFlops, RowWork};

/// A kind of head.
pub trait HeadKind: Debug + Sync {
    /// The setting that asks for it.
    fn speculator_type(&self) -> SpeculatorType;

    /// What config.json says of a fresh head.
    fn fresh(&self, settings: &DraftSettings, start: HeadStart<'_>) -> HeadFields;

    /// The head that a configuration describes.
    ///
    /// # Errors
    /// A key that is missing or cannot be honoured.
    fn read(&self, config: &DraftConfig) -> Result<Box<dyn HeadConfig>>;
}

/// What a fresh head begins from, besides the settings.
#[derive(Clone, Copy, Debug)]
pub struct HeadStart<'a> {
    /// Tokens of the target.
    pub vocabulary: usize,
    /// Tokens that the draft can propose.
    pub draft_vocabulary: usize,
    /// The head of the draft to start from: what the settings leave open is as there.
    pub stored: Option<&'a HeadFields>,
}

/// A head by its numbers, without tensors.
pub trait HeadConfig: Debug {
    /// Its parameters, by the names of the checkpoint.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// The head whose parameters are `weights`.
    fn build(&self, weights: &HeadViews) -> Box<dyn Head>;

    /// Operations that it adds to those of a row.
    fn flops(&self, work: &RowWork) -> RowFlops;

    /// What its own term adds to the loss of a draft that gives every token the same probability.
    fn loss_of_guesses(&self) -> f64 {
        0.0
    }

    /// Why nothing serves it from files in `format`, if nothing does.
    fn unservable(&self, format: ExportFormat) -> Option<String>;
}

/// A head with its weights.
pub trait Head: Debug + Send {
    /// Whether the logits are the LM head's products and nothing else: then a row's do not depend on the
    /// token before it, and the objective's and the decoder's faster ways are open.
    fn is_plain(&self) -> bool {
        false
    }

    /// Names of the figures that it adds to a run's lines.
    fn metrics(&self) -> &'static [&'static str] {
        &[]
    }

    /// The logits [m, V] of a chunk's slots, from the products `base_mv` with the LM head.
    fn logits(&self, chunk: &HeadChunk<'_>, base_mv: Tensor, sums: &mut MetricSums) -> Tensor;

    /// A loss of its own, from the draft's and the target's logits [m, V]; adds the gradients of its own
    /// parameters. The target's logits are there where the objective needs them.
    fn auxiliary_loss(
        &self,
        chunk: &HeadChunk<'_>,
        logits_mv: &Tensor,
        target_mv: Option<&Tensor>,
        sums: &mut MetricSums,
    ) -> Option<AuxiliaryLoss> {
        let _ = (chunk, logits_mv, target_mv, sums);
        None
    }

    /// Adds the gradients of its parameters for `dlogits_mv`; what its logits add to the gradient of the
    /// hidden states, [m, H], if they depend on these other than by the LM head.
    fn backward(&self, chunk: &HeadChunk<'_>, dlogits_mv: &Tensor) -> Option<Tensor>;

    /// Has the tokens of one block chosen, row by row, as many as it finds worth verifying.
    fn propose(&self, block: &ProposalBlock<'_>, choose: &mut dyn Choose);
}

/// The supervised slots of some whole blocks.
#[derive(Debug)]
pub struct HeadChunk<'a> {
    /// Hidden states of all slots of the row [N, H].
    pub hidden_nh: &'a Tensor,
    /// Those of the chunk's slots [m, H].
    pub hidden_mh: &'a Tensor,
    /// The chunk's slots, counted in the row `[m]`.
    pub slots_m: &'a Tensor,
    /// The data's tokens, which the slots are to predict, in the draft's vocabulary `[m]`.
    pub tokens_m: &'a Tensor,
    /// The data's token before each of the row's predictions, in the target's vocabulary `[N]`; plain
    /// heads get none.
    pub previous_n: Option<&'a Tensor>,
    /// How much each of the chunk's slots counts by its distance from the anchor `[m]`, where that is how
    /// they are weighted.
    pub decay_m: Option<&'a Tensor>,
    /// Where gradients of the head's parameters are added up; `None` where nothing is learned.
    pub gradient: Option<&'a HeadViews>,
}

impl HeadChunk<'_> {
    /// The data's token before each of the chunk's predictions `[m]`.
    ///
    /// # Panics
    /// For a plain head.
    pub fn previous_m(&self) -> Tensor {
        let previous_n = self.previous_n.expect("a head that is not plain is told the tokens");
        previous_n.index_select(0, self.slots_m)
    }
}

/// What a head's own loss gives besides the gradients of its parameters.
#[derive(Debug)]
pub struct AuxiliaryLoss {
    /// The sum over the chunk's slots, a float64 scalar: it is divided as the objective's is.
    pub loss_sum: Tensor,
    /// Its gradient by the logits [m, V].
    pub dlogits_mv: Option<Tensor>,
    /// Its gradient by the hidden states [m, H].
    pub dhidden_mh: Option<Tensor>,
}

/// Sums that become a head's figures: of each the sum of values and that of their weights.
#[derive(Debug)]
pub struct MetricSums(Vec<[Tensor; 2]>);

impl MetricSums {
    /// Nothing yet, for so many figures.
    pub(crate) fn zeros(figures: usize, device: tch::Device) -> Self {
        let zero = || Tensor::zeros([], (Kind::Double, device));
        Self((0..figures).map(|_| [zero(), zero()]).collect())
    }

    /// Adds the values `[m]` of the figure with this index, one a slot.
    pub fn add(&mut self, figure: usize, values_m: &Tensor) {
        let [sum, weight] = &mut self.0[figure];
        *sum += values_m.sum(Kind::Double);
        *weight += values_m.numel() as f64;
    }

    /// All of them, one after the other.
    pub(crate) fn sums(&self) -> impl Iterator<Item = &Tensor> {
        self.0.iter().flatten()
    }
}

/// A head's weights, or their gradients, by name: views of a flat buffer.
#[derive(Debug, Default)]
pub struct HeadViews(Vec<(String, Tensor)>);

impl HeadViews {
    pub(super) fn new(views: impl Iterator<Item = (String, Tensor)>) -> Self {
        Self(views.collect())
    }

    /// The view `name`.
    ///
    /// # Panics
    /// When the head has no such parameter: a bug of the head.
    pub fn get(&self, name: &str) -> Tensor {
        let found = self.0.iter().find(|(own, _)| own == name);
        found.unwrap_or_else(|| panic!("the head lists no parameter {name}")).1.shallow_clone()
    }

    /// Adds to the gradient `name` of the weight of `y = x W^T`.
    pub fn add_product(&self, name: &str, dy: &Tensor, x: &Tensor) {
        accumulate_product(&self.get(name), dy, x);
    }

    /// Adds `rows_nr` [n, r] to the rows `ids_n` of the gradient `name` of a table [V, r]: those of one row
    /// in one order, on a GPU too.
    pub fn add_rows(&self, name: &str, ids_n: &Tensor, rows_nr: &Tensor) {
        let mut gradient_vr = self.get(name);
        let (rows_nr, tokens) = (rows_nr.to_kind(gradient_vr.kind()), gradient_vr.size()[0]);
        gradient_vr += Tensor::embedding_dense_backward(&rows_nr, ids_n, tokens, -1, false);
    }
}

/// The rows of a block whose tokens are wanted.
#[derive(Debug)]
pub struct ProposalBlock<'a> {
    /// Their hidden states [n, H].
    pub hidden_nh: &'a Tensor,
    /// The token before the first of them: the anchor, by the target's id.
    pub anchor: i64,
    /// The products of hidden states with the LM head.
    pub lm_head: &'a dyn LmHead,
}

/// The target's LM head, with the rows of the draft's vocabulary.
pub trait LmHead: Debug {
    /// The products [n, V].
    fn products(&self, hidden_nh: &Tensor) -> Tensor;
}

/// Who chooses tokens.
pub trait Choose {
    /// The token of the next row by its logits [1, V]; the target's id of it.
    fn choose(&mut self, logits_1v: &Tensor) -> i64;
}

/// Heads are checked where configurations come from files; behind that they are taken as they are.
pub(crate) const CHECKED_HEAD: &str = "a head is checked before its draft is laid out";

/// Refuses a configuration whose head this program does not run.
///
/// # Errors
/// [`Error::UnknownHead`], and as [`HeadKind::read`].
pub fn check_head(config: &DraftConfig) -> Result<()> {
    head_config(config).map(|_| ())
}

/// The head that `config` describes.
///
/// # Errors
/// [`Error::UnknownHead`], and as [`HeadKind::read`].
pub(crate) fn head_config(config: &DraftConfig) -> Result<Box<dyn HeadConfig>> {
    let kind = HEADS.iter().find(|kind| kind.speculator_type().name() == config.head.kind);
    let unknown = || {
        let known: Vec<&str> = HEADS.iter().map(|kind| kind.speculator_type().name()).collect();
        Error::UnknownHead { found: config.head.kind.clone(), known: known.join(", ") }
    };
    kind.ok_or_else(unknown)?.read(config)
}

/// Why nothing serves the head of `config` from files in `format`, if nothing does.
///
/// # Errors
/// As [`check_head`].
pub fn unservable(config: &DraftConfig, format: ExportFormat) -> Result<Option<String>> {
    Ok(head_config(config)?.unservable(format))
}

/// What the own term of the head of `config` adds to the loss of guesses.
///
/// # Panics
/// When the head was not checked: see [`check_head`].
pub fn loss_of_guesses(config: &DraftConfig) -> f64 {
    head_config(config).expect(CHECKED_HEAD).loss_of_guesses()
}

/// What config.json says of the fresh head that `settings` ask for: where they leave the kind open, one of
/// the stored draft's kind. A stored kind that is unknown is refused where the stored draft is read.
pub fn fresh_head(settings: &DraftSettings, start: HeadStart<'_>) -> HeadFields {
    let stored = || SpeculatorType::from_name(&start.stored?.kind);
    let wanted = settings.speculator_type.or_else(stored).unwrap_or(SpeculatorType::Dflash);
    let kind = HEADS.iter().find(|kind| kind.speculator_type() == wanted);
    kind.expect("each type that can be asked for is a kind of head").fresh(settings, start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_that_can_be_asked_for_is_a_head() {
        for &wanted in SpeculatorType::ALL {
            let kinds = HEADS.iter().filter(|kind| kind.speculator_type() == wanted);
            assert_eq!(kinds.count(), 1, "{wanted:?}");
        }
        assert_eq!(HEADS.len(), SpeculatorType::ALL.len());
    }
}
