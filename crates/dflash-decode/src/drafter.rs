//! What drafting and verifying need of the two models: how a block is made, and how much of it the
//! target keeps.

use dflash_model::draft::Draft;
use dflash_model::objective::DraftVocabulary;
use dflash_model::ops::most_likely;
use dflash_model::target::{KvCache, PrunedRows, Target, check_layer_ids};
use tch::{Kind, Tensor, no_grad};

use crate::Error;
use crate::sampling::Sampler;

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

/// The draft's block: tokens, and the distributions they were drawn from when sampling.
#[derive(Debug)]
pub(crate) struct Proposal {
    /// The proposed tokens `[B-1]`; none where nothing is drafted.
    pub(crate) ids_b: Tensor,
    distributions_bv: Option<Tensor>,
}

/// The outcome of one verification.
#[derive(Debug)]
pub(crate) struct Verified {
    /// Accepted proposals.
    pub(crate) accepted: Vec<i64>,
    /// The target's own token after them.
    pub(crate) bonus: i64,
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

    /// Tokens that can be proposed, where these are not all of the target's.
    pub(crate) fn vocabulary_size(&self) -> Option<usize> {
        self.head.as_ref().map(|head| head.ids_v.size()[0] as usize)
    }

    /// The embeddings [S*B, H] of a block behind each of `bonus_s` `[S]`.
    pub(crate) fn blocks(&self, bonus_s: &Tensor) -> Tensor {
        let bonus_s1h = self.target.rows(bonus_s).unsqueeze(1);
        let masks_sbh = self.masks_bh.unsqueeze(0).expand([bonus_s.size()[0], -1, -1], false);
        Tensor::cat(&[bonus_s1h, masks_sbh], 1).flatten(0, 1)
    }

    /// The draft's logits [S*(B-1), v] of the proposals of blocks whose normed states are [S*B, H].
    pub(crate) fn logits(&self, normed_nh: &Tensor) -> Tensor {
        let normed_nh = self.behind_anchors(normed_nh);
        match &self.head {
            None => self.target.lm_head(&normed_nh),
            Some(head) => normed_nh.mm(&head.lm_head_hv),
        }
    }

    /// The block's most likely tokens by its normed states [B, H].
    pub(crate) fn propose_greedy(&self, normed_bh: &Tensor) -> Proposal {
        let ids_b = match &self.head {
            None => self.target.most_likely_of_normed(&self.behind_anchors(normed_bh)),
            Some(head) => head.ids_v.index_select(0, &most_likely(&self.logits(normed_bh))),
        };
        Proposal { ids_b, distributions_bv: None }
    }

    /// The rows [S*(B-1), H] of blocks' states [S*B, H] that propose.
    fn behind_anchors(&self, states_nh: &Tensor) -> Tensor {
        let slots = self.block_size() as i64;
        let blocks_sbh = states_nh.unflatten(0, [states_nh.size()[0] / slots, slots]);
        blocks_sbh.narrow(1, 1, slots - 1).flatten(0, 1)
    }

    /// Chooses a block's tokens by the draft's logits [B-1, v].
    pub(crate) fn propose(&self, logits_bv: &Tensor, sampler: &mut Sampler) -> Proposal {
        if sampler.is_greedy() {
            let chosen_b = most_likely(logits_bv);
            let ids_b = match &self.head {
                None => chosen_b,
                Some(head) => head.ids_v.index_select(0, &chosen_b),
            };
            return Proposal { ids_b, distributions_bv: None };
        }
        let mut distributions_bv = sampler.distributions(logits_bv);
        if let Some(head) = &self.head {
            distributions_bv = head.widen(&distributions_bv, self.target);
        }
        let ids = sampler.draw(&distributions_bv);
        let ids_b = Tensor::from_slice(&ids).to_device(self.target.device());
        Proposal { ids_b, distributions_bv: Some(distributions_bv) }
    }
}

impl Proposal {
    /// No proposals: the target alone chooses the next token.
    pub(crate) fn none(target: &Target) -> Self {
        let ids_b = Tensor::empty([0], (Kind::Int64, target.device()));
        Self { ids_b, distributions_bv: None }
    }

    /// Number of proposals.
    pub(crate) fn len(&self) -> usize {
        self.ids_b.size()[0] as usize
    }

    /// Verifies the block by the target's logits [B, V].
    pub(crate) fn verify(&self, logits_bv: &Tensor, sampler: &mut Sampler) -> Verified {
        if sampler.is_greedy() {
            return self.verify_greedy(&most_likely(logits_bv));
        }
        self.verify_sampled(&sampler.distributions(logits_bv), sampler)
    }

    /// Verifies the block by the target's most likely tokens `[B]`.
    pub(crate) fn verify_greedy(&self, own_b: &Tensor) -> Verified {
        // One transfer for both: on a GPU every read waits for the whole step.
        let both = to_host(&Tensor::cat(&[&self.ids_b, own_b], 0));
        let (proposed, own) = both.split_at(self.len());
        Verified::greedy(proposed, own)
    }

    /// Exact speculative sampling: accept with min(1, p/q), else draw from the part of p above q.
    fn verify_sampled(&self, target_bv: &Tensor, sampler: &mut Sampler) -> Verified {
        let Some(draft_bv) = &self.distributions_bv else {
            return Verified { accepted: Vec::new(), bonus: sampler.draw(target_bv)[0] };
        };
        let ids = to_host(&self.ids_b);
        let of_proposed = |distributions: &Tensor| -> Vec<f64> {
            let rows = distributions.narrow(0, 0, ids.len() as i64);
            let chosen = rows.gather(1, &self.ids_b.unsqueeze(1), false);
            Vec::try_from(chosen.flatten(0, -1)).expect("probabilities are float64")
        };
        let (p, q) = (of_proposed(target_bv), of_proposed(draft_bv));
        let rejected = (0..ids.len()).find(|&slot| sampler.uniform() * q[slot] >= p[slot]);
        let row = |distributions: &Tensor, slot: usize| distributions.narrow(0, slot as i64, 1);
        let weights_1v = match rejected {
            None => row(target_bv, ids.len()),
            Some(slot) => (row(target_bv, slot) - row(draft_bv, slot)).clamp_min(0.0),
        };
        let bonus = sampler.draw(&weights_1v)[0];
        Verified { accepted: ids[..rejected.unwrap_or(ids.len())].to_vec(), bonus }
    }
}

impl Verified {
    /// Accepts proposals while they are the target's most likely tokens, `own`: one for each of them
    /// and one more.
    pub(crate) fn greedy(proposed: &[i64], own: &[i64]) -> Self {
        let same = proposed.iter().zip(own).take_while(|(proposal, own)| proposal == own);
        let accepted = same.count();
        Self { accepted: proposed[..accepted].to_vec(), bonus: own[accepted] }
    }

    /// The tokens that the step made.
    pub(crate) fn into_tokens(self) -> Vec<i64> {
        let mut tokens = self.accepted;
        tokens.push(self.bonus);
        tokens
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
