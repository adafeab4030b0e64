//! A draft combined with its target: builds blocks and proposes tokens.

use dflash_draft::objective::DraftVocabulary;
use dflash_draft::{BlockShape, Choose, Draft, LmHead, LoadedDraft, ProposalBlock};
use dflash_target::{KvCache, PrunedRows, Target, check_layer_ids};
use dflash_tensor::ops::most_likely;
use tch::{Kind, Tensor, no_grad};

use crate::Error;
use crate::sampling::{Proposed, Sampler};

/// A draft with its target.
#[derive(Debug)]
pub(crate) struct Drafter<'a> {
    pub(crate) target: &'a Target,
    pub(crate) draft: &'a Draft,
    /// Embeddings of a block's mask tokens [B-1, H].
    masks_bh: Tensor,
    /// Output projection of a draft with a pruned vocabulary; otherwise the target's is used.
    pub(crate) pruned: Option<PrunedHead>,
}

/// The part of the target's lm_head that the draft was trained with.
#[derive(Debug)]
pub(crate) struct PrunedHead {
    /// The selected tokens `[v]`, ascending.
    ids_v: Tensor,
    /// Their lm_head columns [H, v].
    lm_head_hv: Tensor,
    /// The packed columns, if few rows are packed.
    pub(crate) few: Option<PrunedRows>,
}

/// Checks that the target can undo a verification of `tokens` tokens.
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
    /// [`Error::LongBlock`]; [`Error::Mismatch`] if draft and target differ in size or vocabulary
    /// size; a layer id or mask token that the target does not have.
    pub(crate) fn new(target: &'a Target, loaded: &'a LoadedDraft) -> Result<Self, Error> {
        check_fit(target, loaded)?;
        let LoadedDraft { draft, vocabulary } = loaded;
        let config = draft.config();
        // The bonus token is verified with them.
        check_block(target, config.block().proposals() + 1)?;
        let masks = vec![config.mask_token_id; config.block().masks()];
        let masks_bh =
            no_grad(|| target.rows(&Tensor::from_slice(&masks).to_device(target.device())));
        let pruned = vocabulary.as_ref().map(|vocabulary| PrunedHead::new(target, vocabulary));
        Ok(Self { target, draft, masks_bh, pruned })
    }

    pub(crate) fn block(&self) -> BlockShape {
        self.draft.config().block()
    }

    /// Block embeddings [S*B, H] starting with each of `bonus_s` `[S]`.
    pub(crate) fn blocks(&self, bonus_s: &Tensor) -> Tensor {
        let bonus_s1h = self.target.rows(bonus_s).unsqueeze(1);
        let masks_sbh = self.masks_bh.unsqueeze(0).expand([bonus_s.size()[0], -1, -1], false);
        Tensor::cat(&[bonus_s1h, masks_sbh], 1).flatten(0, 1)
    }

    /// The predicting rows [S*n, H] of block states [S*B, H]: the first `n` of each block.
    pub(crate) fn predicting(&self, states_nh: &Tensor, n: usize) -> Tensor {
        let BlockShape { rows, first_predicting } = self.block();
        let blocks_sbh = states_nh.unflatten(0, [-1, rows as i64]);
        blocks_sbh.narrow(1, first_predicting as i64, n as i64).flatten(0, 1)
    }

    /// Argmax token `[N]` for each row [N, H] of normed states.
    pub(crate) fn most_likely(&self, normed_nh: &Tensor) -> Tensor {
        match &self.pruned {
            None => self.target.most_likely_of_normed(normed_nh),
            Some(head) => head.ids_v.index_select(0, &most_likely(&normed_nh.mm(&head.lm_head_hv))),
        }
    }

    /// Tokens for rows [n, H] of a block's normed states, the first of which follows the token
    /// `anchor`; chosen by `sampler` for the positions from `first` on.
    pub(crate) fn choose(
        &self,
        normed_nh: &Tensor,
        anchor: i64,
        sampler: &Sampler,
        first: usize,
    ) -> Proposed {
        if self.draft.head().is_plain() {
            return match sampler.is_greedy() {
                true => Proposed { ids: to_host(&self.most_likely(normed_nh)), shares: None },
                false => self.chosen(&self.products(normed_nh), sampler, first),
            };
        }
        let (ids, shares) = (Vec::new(), Vec::new());
        let mut walk = Walk { drafter: self, sampler, first, ids, shares };
        let block = ProposalBlock { hidden_nh: normed_nh, anchor, lm_head: self };
        self.draft.head().propose(&block, &mut walk);
        let Walk { ids, shares, .. } = walk;
        Proposed { ids, shares: (!shares.is_empty()).then(|| Tensor::cat(&shares, 0)) }
    }

    /// Tokens, as target ids, for rows of logits [n, V] over the draft's vocabulary.
    fn chosen(&self, logits_nv: &Tensor, sampler: &Sampler, first: usize) -> Proposed {
        if sampler.is_greedy() {
            let best = most_likely(logits_nv);
            let ids = self.pruned.as_ref().map(|head| head.ids_v.index_select(0, &best));
            return Proposed { ids: to_host(&ids.unwrap_or(best)), shares: None };
        }
        let own_nv = sampler.distributions(logits_nv);
        let shares_nv = match &self.pruned {
            None => own_nv,
            Some(head) => head.widen(&own_nv, self.target),
        };
        sampler.propose(shares_nv, first)
    }
}

impl LmHead for Drafter<'_> {
    fn products(&self, hidden_nh: &Tensor) -> Tensor {
        match &self.pruned {
            None => self.target.lm_head(hidden_nh),
            Some(head) => hidden_nh.mm(&head.lm_head_hv),
        }
    }
}

/// Tokens that a head chooses one after the other.
struct Walk<'a> {
    drafter: &'a Drafter<'a>,
    sampler: &'a Sampler,
    /// Position of the first token.
    first: usize,
    ids: Vec<i64>,
    /// The distribution of each token [1, V], if verification needs it.
    shares: Vec<Tensor>,
}

impl Choose for Walk<'_> {
    fn choose(&mut self, logits_1v: &Tensor) -> i64 {
        let position = self.first + self.ids.len();
        let Proposed { ids, shares } = self.drafter.chosen(logits_1v, self.sampler, position);
        self.ids.extend(&ids);
        self.shares.extend(shares);
        ids[0]
    }
}

impl PrunedHead {
    fn new(target: &Target, vocabulary: &DraftVocabulary) -> Self {
        let ids_v = Tensor::from_slice(vocabulary.selected()).to_device(target.device());
        let lm_head_hv = no_grad(|| target.lm_head_columns(&ids_v));
        let few = target.pruned_rows(&lm_head_hv, vocabulary.selected());
        Self { ids_v, lm_head_hv, few }
    }

    /// Expands distributions over the pruned vocabulary to the target's, zero elsewhere.
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

fn check_fit(target: &Target, loaded: &LoadedDraft) -> Result<(), Error> {
    let config = loaded.draft.config();
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
            loaded.vocabulary.as_ref().map_or(rows, |vocabulary| vocabulary.target_size() as i64),
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
