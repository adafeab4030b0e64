//! The target on a CPU for a few rows: the packed layers and lm_head of [`dflash_torch_sys::decode`].
//!
//! Made when the first cache is, so that a target that only answers for packed documents (training,
//! the hidden-state server) holds its weights once. Decoding holds them twice: as libtorch multiplies
//! them, for prompts, and packed, in bfloat16 where that says the same.

use dflash_torch_sys::decode::{
    self, Cache, Head, MAX_PACKED_ELEMENTS, MAX_ROWS, Shape, Stack, storage,
};
use tch::{Kind, Tensor};

use super::{CachedOutput, KvCache, LmHead, Target};
use crate::ops::RotaryTables;

/// What a target keeps for few rows.
#[derive(Debug)]
pub(super) struct FewRows {
    pub(super) stack: Stack,
    head: Head,
    /// Weight of the final norm `[H]`, float32.
    norm_h: Tensor,
}

impl Target {
    /// The packed weights, where this target's few rows go through them.
    pub(super) fn few_rows(&self) -> Option<&FewRows> {
        self.few_rows.get_or_init(|| self.pack()).as_ref()
    }

    fn pack(&self) -> Option<FewRows> {
        let head_io = match &self.lm_head {
            LmHead::Own(linear) => linear.weight_io(),
            LmHead::Tied { .. } => self.embedding_vh.tr(),
        };
        let layers: Vec<_> = self.layers.iter().map(|layer| layer.weights()).collect();
        let matrices: Vec<&Tensor> = layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down])
            .map(|projection| projection.weight_io)
            .chain([&head_io])
            .collect();
        let elements: i64 = matrices.iter().map(|matrix| matrix.numel() as i64).sum();
        if !decode::takes(self.kernels, &self.embedding_vh) || elements > MAX_PACKED_ELEMENTS {
            return None;
        }
        let kind = storage(matrices.iter().copied());
        let c = &self.config;
        let shape = Shape {
            hidden: c.hidden_size,
            inner: c.intermediate_size,
            query_heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            eps: c.rms_norm_eps,
            causal: true,
        };
        let stack = Stack::new(shape, &layers, kind);
        let norm_h = self.norm_h.to_kind(Kind::Float);
        Some(FewRows { stack, head: Head::new(&head_io, kind), norm_h })
    }

    /// [`Target::forward_cached`] for up to [`MAX_ROWS`] tokens.
    pub(super) fn forward_few(
        &self,
        few: &FewRows,
        ids_t: &Tensor,
        (cache, held): (&KvCache, &Cache),
        captures: &[u32],
    ) -> CachedOutput {
        let rows = ids_t.size()[0];
        let mut x_th = self.embed(ids_t).to_kind(Kind::Float);
        let states = Tensor::empty(
            [captures.len() as i64, rows, self.hidden_size()],
            (Kind::Float, self.device()),
        );
        // An id that is asked for again takes the state of its first place.
        let first = |id: u32| captures.iter().position(|&capture| capture == id);
        let state = |id: u32| first(id).map(|place| states.get(place as i64));
        if let Some(embedded) = state(0) {
            embedded.shallow_clone().copy_(&x_th);
        }
        let outputs: Vec<Option<Tensor>> = (1..=self.num_layers() as u32).map(state).collect();
        let RotaryTables { cos_td, sin_td } = cache.rope(rows);
        few.stack.forward(
            &mut x_th,
            (held, cache.len() as i64),
            (&cos_td, &sin_td),
            &outputs,
            None,
        );
        let states = states.to_kind(self.dtype());
        let place = |&id: &u32| first(id).expect("it is in the list") as i64;
        CachedOutput {
            captures: captures.iter().map(|id| states.get(place(id))).collect(),
            hidden_td: x_th.to_kind(self.dtype()),
        }
    }

    /// The packed weights, if `x_th` is few rows and the target has such.
    fn few_for(&self, x_th: &Tensor) -> Option<&FewRows> {
        if (1..=MAX_ROWS).contains(&x_th.size()[0]) { self.few_rows() } else { None }
    }

    /// Logits [T, V] of `x_th` [T, H] through the packed lm_head, behind the final norm if wanted.
    pub(super) fn few_logits(&self, x_th: &Tensor, is_normed: bool) -> Option<Tensor> {
        let few = self.few_for(x_th)?;
        let logits = few.head.logits(&float_rows(x_th), self.final_norm(few, is_normed));
        Some(logits.to_kind(self.dtype()))
    }

    /// As [`Self::few_logits`], the largest logit's token for each row `[T]`.
    pub(super) fn few_most_likely(&self, x_th: &Tensor, is_normed: bool) -> Option<Tensor> {
        let few = self.few_for(x_th)?;
        Some(few.head.most_likely(&float_rows(x_th), self.final_norm(few, is_normed)))
    }

    fn final_norm<'a>(&self, few: &'a FewRows, is_normed: bool) -> Option<(&'a Tensor, f64)> {
        (!is_normed).then_some((&few.norm_h, self.config.rms_norm_eps))
    }
}

fn float_rows(x_th: &Tensor) -> Tensor {
    x_th.to_kind(Kind::Float).contiguous()
}
