//! What drafting needs of the two models: how a block is made, and which tokens it proposes.

use dflash_model::draft::Draft;
use dflash_model::objective::DraftVocabulary;
use dflash_model::ops::most_likely;
use dflash_model::target::{KvCache, PrunedRows, Target, check_layer_ids};
use tch::{Kind, Tensor, no_grad};

use crate::Error;
use crate::sampling::{Proposed, Sampler};

/// A draft on its target.
#[derive(Debug)]
pub(crate) struct Drafter<'a> {
    pub(crate) target: &'a Target,
    pub(crate) draft: &'a Draft,
    /// Embeddings of the B-1 mask tokens [B-1, H].
    masks_bh: Tensor,
    /// Output projection of a draft with a vocabulary of its own; else it is the target's.
    pub(crate) head: Option<PrunedHead>,
}

/// The part of the target's lm_head that the draft was trained with.
#[derive(Debug)]
pub(crate) struct PrunedHead {
    /// The selected tokens `[v]`, ascending.
    ids_v: Tensor,
    /// Their columns of the lm_head [H, v].
    lm_head_hv: Tensor,
    /// These, where few rows are packed.
    pub(crate) few: Option<PrunedRows>,
}

/// Refuses to verify so many tokens at a time where the target could not take them back.
///
/// # Errors
/// [`Error::LongBlock`].
pub(crate) fn check_block(target: &Target, tokens: usize) -> Result<(), Error> {
    let most = KvCache::MOST_VERIFIED;
    match target.carries_state() && tokens > most {
        true => Err(Error::LongBlock { tokens, most }),
        false => Ok(()),
    }
}

impl<'a> Drafter<'a> {
    /// # Errors
    /// [`Error::LongBlock`], and [`Error::Mismatch`] when draft and target differ in size, or the vocabulary was selected from
    /// another number of tokens; a layer id or mask token that the target does not have.
    pub(crate) fn new(
        target: &'a Target,
        draft: &'a Draft,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Result<Self, Error> {
        check_fit(target, draft, vocabulary)?;
        let config = draft.config();
        check_block(target, config.block_size)?;
        let masks = vec![config.mask_token_id; config.block_size - 1];
        let masks_bh =
            no_grad(|| target.rows(&Tensor::from_slice(&masks).to_device(target.device())));
        let head = vocabulary.map(|vocabulary| PrunedHead::new(target, vocabulary));
        Ok(Self { target, draft, masks_bh, head })
    }

    /// Slots of a block, the anchor's included.
    pub(crate) fn block_size(&self) -> usize {
        self.draft.config().block_size
    }

    /// The embeddings [S*B, H] of a block behind each of `bonus_s` `[S]`.
    pub(crate) fn blocks(&self, bonus_s: &Tensor) -> Tensor {
        let bonus_s1h = self.target.rows(bonus_s).unsqueeze(1);
        let masks_sbh = self.masks_bh.unsqueeze(0).expand([bonus_s.size()[0], -1, -1], false);
        Tensor::cat(&[bonus_s1h, masks_sbh], 1).flatten(0, 1)
    }

    /// The rows [S*n, H] of blocks' states [S*B, H] behind their anchors, of each block the first `n`.
    pub(crate) fn behind_anchors(&self, states_nh: &Tensor, n: usize) -> Tensor {
        let slots = self.block_size() as i64;
        let blocks_sbh = states_nh.unflatten(0, [states_nh.size()[0] / slots, slots]);
        blocks_sbh.narrow(1, 1, n as i64).flatten(0, 1)
    }

    /// The most likely token `[N]` by each row [N, H] of normed states.
    pub(crate) fn most_likely(&self, normed_nh: &Tensor) -> Tensor {
        match &self.head {
            None => self.target.most_likely_of_normed(normed_nh),
            Some(head) => head.ids_v.index_select(0, &most_likely(&normed_nh.mm(&head.lm_head_hv))),
        }
    }

    /// Tokens by rows [N, H] of normed states, chosen by `sampler` at the positions from `first` on.
    pub(crate) fn choose(&self, normed_nh: &Tensor, sampler: &Sampler, first: usize) -> Proposed {
        if sampler.is_greedy() {
            return Proposed { ids: to_host(&self.most_likely(normed_nh)), shares: None };
        }
        let shares_nv = match &self.head {
            None => sampler.distributions(&self.target.lm_head(normed_nh)),
            Some(head) => {
                let own_nv = sampler.distributions(&normed_nh.mm(&head.lm_head_hv));
                head.widen(&own_nv, self.target)
            }
        };
        sampler.propose(shares_nv, first)
    }
}

impl PrunedHead {
    fn new(target: &Target, vocabulary: &DraftVocabulary) -> Self {
        let ids_v = Tensor::from_slice(vocabulary.selected()).to_device(target.device());
        let lm_head_hv = no_grad(|| target.lm_head_columns(&ids_v));
        let few = target.pruned_rows(&lm_head_hv, vocabulary.selected());
        Self { ids_v, lm_head_hv, few }
    }

    /// Distributions over the selected tokens as ones over all of the target's, zero elsewhere.
    fn widen(&self, distributions_bv: &Tensor, target: &Target) -> Tensor {
        let shape = [distributions_bv.size()[0], target.vocab_size()];
        let options = (distributions_bv.kind(), distributions_bv.device());
        Tensor::zeros(shape, options).index_copy(1, &self.ids_v, distributions_bv)
    }
}

/// Token ids on the host.
pub(crate) fn to_host(ids: &Tensor) -> Vec<i64> {
    Vec::try_from(ids.to_kind(Kind::Int64)).expect("token ids are integers")
}

fn check_fit(
    target: &Target,
    draft: &Draft,
    vocabulary: Option<&DraftVocabulary>,
) -> Result<(), Error> {
    let config = draft.config();
    let rows = target.vocab_size();
    let pairs = [
        ("hidden_size", config.hidden_size, target.hidden_size()),
        ("vocab_size", config.vocab_size, rows),
        (
            "the number of target layers",
            config.num_target_layers.unwrap_or(target.num_layers()) as i64,
            target.num_layers() as i64,
        ),
        (
            "the number of tokens that its vocabulary was selected from",
            vocabulary.map_or(rows, |vocabulary| vocabulary.target_size() as i64),
            rows,
        ),
    ];
    if let Some(&(what, draft, target)) = pairs.iter().find(|(_, draft, target)| draft != target) {
        return Err(Error::Mismatch { what, draft, target });
    }
    check_layer_ids(&config.target_layer_ids, target.num_layers())?;
    let mask = config.mask_token_id;
    if !(0..rows).contains(&mask) {
        return Err(Error::Mismatch { what: "mask_token_id", draft: mask, target: rows });
    }
    Ok(())
}
