//! The head of a draft: what turns the trunk's hidden states into logits and proposals.
//!
//! The trunk is the same for all drafts: features of the target, layers, a final norm. A head
//! starts from the products of its hidden states with the target's frozen LM head. It may have
//! parameters and its own loss, and proposes the tokens of a block, all at once or one by one.
//!
//! A head is a file under `heads/` with two lines next to it ([`HEADS`]), and its settings and
//! [`SpeculatorType`] in `dflash-settings`. Its parameters follow the trunk's in the draft's flat
//! buffer, so checkpoints, optimizers and collectives need no special cases. They form one bucket,
//! whose gradients are final first.
//!
//! Shapes: `m` supervised slots of a chunk, `n` slots of a row or rows of a block, `v` tokens of
//! the draft's vocabulary.

use std::fmt::Debug;

use dflash_settings::{DraftSettings, ExportFormat, SpeculatorType};
use dflash_tensor::{Error, Result};
use tch::{Kind, Tensor};

use super::heads::HEADS;
use super::train::accumulate_product;
use super::{DraftConfig, HeadFields, ParameterSpec};
use crate::flops::{RowFlops, RowWork};

/// A type of head.
pub trait HeadKind: Debug + Sync {
    /// The setting that selects it.
    fn speculator_type(&self) -> SpeculatorType;

    /// The config.json fields of a fresh head.
    fn fresh(&self, settings: &DraftSettings, start: HeadStart<'_>) -> HeadFields;

    /// Reads the head of a configuration.
    ///
    /// # Errors
    /// A missing or unsupported key.
    fn read(&self, config: &DraftConfig) -> Result<Box<dyn HeadConfig>>;
}

/// Inputs of a fresh head other than the settings.
#[derive(Clone, Copy, Debug)]
pub struct HeadStart<'a> {
    /// Size of the target's vocabulary.
    pub vocabulary: usize,
    /// Size of the draft's vocabulary.
    pub draft_vocabulary: usize,
    /// The initial draft's head, which provides values for unset settings.
    pub stored: Option<&'a HeadFields>,
}

/// A head's configuration, without tensors.
pub trait HeadConfig: Debug {
    /// Its parameters, by checkpoint name.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// The head with the parameters `weights`.
    fn build(&self, weights: &HeadViews) -> Box<dyn Head>;

    /// Additional operations per row.
    fn flops(&self, work: &RowWork) -> RowFlops;

    /// Value of the head's loss term for a draft that gives every token the same probability.
    fn loss_of_guesses(&self) -> f64 {
        0.0
    }

    /// Why no engine serves this head from files in `format`; `None` if one does.
    fn unservable(&self, format: ExportFormat) -> Option<String>;
}

/// A head with its weights.
pub trait Head: Debug + Send {
    /// Whether the logits are just the LM head's output. Then a row's logits do not depend on the
    /// previous token, and faster code paths of objective and decoder apply.
    fn is_plain(&self) -> bool {
        false
    }

    /// Names of the additional metrics.
    fn metrics(&self) -> &'static [&'static str] {
        &[]
    }

    /// Logits [m, V] of a chunk's slots from the LM head's output `base_mv`.
    fn logits(&self, chunk: &HeadChunk<'_>, base_mv: Tensor, sums: &mut MetricSums) -> Tensor;

    /// The head's own loss, from the draft's and the target's logits [m, V]; adds the gradients of
    /// the head's parameters. The target's logits are present if the objective needs them.
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

    /// Adds the gradients of the head's parameters for `dlogits_mv`. Returns the head's additional
    /// gradient of the hidden states [m, H], if its logits depend on them other than through the LM
    /// head.
    fn backward(&self, chunk: &HeadChunk<'_>, dlogits_mv: &Tensor) -> Option<Tensor>;

    /// Chooses the tokens of one block, row by row, as many as it considers worth verifying.
    fn propose(&self, block: &ProposalBlock<'_>, choose: &mut dyn Choose);
}

/// Supervised slots of several whole blocks.
#[derive(Debug)]
pub struct HeadChunk<'a> {
    /// Hidden states of all slots of the row [N, H].
    pub hidden_nh: &'a Tensor,
    /// Hidden states of the chunk's slots [m, H].
    pub hidden_mh: &'a Tensor,
    /// Indices of the chunk's slots in the row `[m]`.
    pub slots_m: &'a Tensor,
    /// Target tokens of the slots, from the data, in the draft's vocabulary `[m]`.
    pub tokens_m: &'a Tensor,
    /// The data's token before each slot's prediction, in the target's vocabulary `[N]`; `None` for
    /// plain heads.
    pub previous_n: Option<&'a Tensor>,
    /// Weights of the chunk's slots by distance from the anchor `[m]`, if that weighting is used.
    pub decay_m: Option<&'a Tensor>,
    /// Accumulates gradients of the head's parameters; `None` outside training.
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

/// Result of a head's own loss, apart from its parameter gradients.
#[derive(Debug)]
pub struct AuxiliaryLoss {
    /// Sum over the chunk's slots, a float64 scalar; divided like the objective.
    pub loss_sum: Tensor,
    /// Gradient of the logits [m, V].
    pub dlogits_mv: Option<Tensor>,
    /// Gradient of the hidden states [m, H].
    pub dhidden_mh: Option<Tensor>,
}

/// Accumulators of a head's metrics: per metric the sum of values and the sum of weights.
#[derive(Debug)]
pub struct MetricSums(Vec<[Tensor; 2]>);

impl MetricSums {
    /// Zeros for `figures` metrics.
    pub(crate) fn zeros(figures: usize, device: tch::Device) -> Self {
        let zero = || Tensor::zeros([], (Kind::Double, device));
        Self((0..figures).map(|_| [zero(), zero()]).collect())
    }

    /// Adds one value per slot, `[m]`, to metric number `figure`.
    pub fn add(&mut self, figure: usize, values_m: &Tensor) {
        let [sum, weight] = &mut self.0[figure];
        *sum += values_m.sum(Kind::Double);
        *weight += values_m.numel() as f64;
    }

    pub(crate) fn sums(&self) -> impl Iterator<Item = &Tensor> {
        self.0.iter().flatten()
    }
}

/// A head's weights or gradients by name, as views of a flat buffer.
#[derive(Debug, Default)]
pub struct HeadViews(Vec<(String, Tensor)>);

impl HeadViews {
    pub(super) fn new(views: impl Iterator<Item = (String, Tensor)>) -> Self {
        Self(views.collect())
    }

    /// The view `name`.
    ///
    /// # Panics
    /// If the head has no such parameter: a bug of the head.
    pub fn get(&self, name: &str) -> Tensor {
        let found = self.0.iter().find(|(own, _)| own == name);
        found.unwrap_or_else(|| panic!("the head lists no parameter {name}")).1.shallow_clone()
    }

    /// Adds to the gradient `name` of the weight in `y = x W^T`.
    pub fn add_product(&self, name: &str, dy: &Tensor, x: &Tensor) {
        accumulate_product(&self.get(name), dy, x);
    }

    /// Adds `rows_nr` [n, r] to the rows `ids_n` of the gradient `name` of a table [V, r]. Repeated
    /// rows are summed in a fixed order, on a GPU too.
    pub fn add_rows(&self, name: &str, ids_n: &Tensor, rows_nr: &Tensor) {
        let mut gradient_vr = self.get(name);
        let (rows_nr, tokens) = (rows_nr.to_kind(gradient_vr.kind()), gradient_vr.size()[0]);
        gradient_vr += Tensor::embedding_dense_backward(&rows_nr, ids_n, tokens, -1, false);
    }
}

/// The rows of a block to propose tokens for.
#[derive(Debug)]
pub struct ProposalBlock<'a> {
    /// Their hidden states [n, H].
    pub hidden_nh: &'a Tensor,
    /// The anchor, the token before the first row, as a target id.
    pub anchor: i64,
    /// The LM head.
    pub lm_head: &'a dyn LmHead,
}

/// The target's LM head, restricted to the draft's vocabulary.
pub trait LmHead: Debug {
    /// LM-head output [n, V].
    fn products(&self, hidden_nh: &Tensor) -> Tensor;
}

/// Chooses tokens from logits.
pub trait Choose {
    /// Chooses the next row's token from its logits [1, V]; returns its target id.
    fn choose(&mut self, logits_1v: &Tensor) -> i64;
}

/// Heads are checked when a configuration is read; later code relies on that.
pub(crate) const CHECKED_HEAD: &str = "a head is checked before its draft is laid out";

/// Checks that the configuration's head is supported.
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

/// Why no engine serves the head of `config` from files in `format`; `None` if one does.
///
/// # Errors
/// As [`check_head`].
pub fn unservable(config: &DraftConfig, format: ExportFormat) -> Result<Option<String>> {
    Ok(head_config(config)?.unservable(format))
}

/// Value of the head's own loss term for uniform predictions.
///
/// # Panics
/// If the head was not checked: see [`check_head`].
pub fn loss_of_guesses(config: &DraftConfig) -> f64 {
    head_config(config).expect(CHECKED_HEAD).loss_of_guesses()
}

/// The config.json fields of the fresh head selected by `settings`, or else of the stored draft's
/// type. Unknown stored types are rejected when the stored draft is read.
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
