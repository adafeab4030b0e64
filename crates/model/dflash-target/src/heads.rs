//! Heads of a fused projection on a GPU: optional norms, rotation and writing to the cache in one
//! launch, where libtorch needs a dozen.

use dflash_kernels::gpu::{self, HeadTurn, KeyRoom};
use dflash_kernels::kernels::Kernels;
use tch::Tensor;

use super::blocks::attention::Heads;
use super::layer::{Attend, Projected};
use super::rotary::HeadTables;

/// The fused queries, keys and values of a call's tokens, and their processing.
#[derive(Clone, Copy)]
pub(crate) struct FusedHeads<'a> {
    /// [T, (N + 2 M) * D].
    pub(crate) qkv_to: &'a Tensor,
    pub(crate) heads: Heads,
    /// Weights `[D]` of the query and key head norms, applied before the rotation.
    pub(crate) norms: Option<(&'a Tensor, &'a Tensor)>,
    pub(crate) eps: f64,
    pub(crate) tables: &'a HeadTables,
    pub(crate) kernels: Kernels,
}

impl FusedHeads<'_> {
    /// Processes all heads for `layer`; `None` if our GPU kernels do not support them.
    pub(crate) fn project(self, layer: usize, attend: &dyn Attend) -> Option<Projected> {
        let Self { qkv_to, heads: Heads { query, key, dim }, norms, eps, tables, kernels } = self;
        let runner = kernels.gpu(qkv_to)?;
        let half = tables.of_whole_heads(dim)?;
        let is_alike = |weight: &Tensor| weight.kind() == qkv_to.kind() && !weight.requires_grad();
        if norms.is_some_and(|(query, key)| !is_alike(query) || !is_alike(key)) {
            return None;
        }
        let norms = norms.map(|(query, key)| (Some(query), key));
        let turn = HeadTurn { norms, eps, cosine: &half.cos_td, sine: &half.sin_td };
        let tokens = qkv_to.size()[0];
        let room = attend.room(layer, qkv_to);
        let are_kept = room.is_some();
        let (k_tmd, v_tme) = room.unwrap_or_else(|| {
            let values = qkv_to.narrow(1, (query + key) * dim, key * dim);
            let keys = Tensor::empty([tokens, key, dim], (qkv_to.kind(), qkv_to.device()));
            (keys, values.view([-1, key, dim]))
        });
        let room = KeyRoom { key: &k_tmd, value: are_kept.then_some(&v_tme) };
        let q_tnd = gpu::heads_to(runner, qkv_to, &turn, room).expect("a layer has queries");
        Some(Projected { q_tnd, k_tmd, v_tme, kernels, are_kept })
    }
}
