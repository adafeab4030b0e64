//! Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one latent per
//! token, plus one rotated key common to all heads. A cache keeps only these two.
//!
//! Few tokens attend in the latent space: the key projection is absorbed into the queries, and the
//! value projection is applied after attention, so cached tokens are not expanded. Prompts expand
//! latents to keys and values, whose heads are narrower. Shapes: `t` new tokens, `s` tokens seen,
//! `n` heads, `l` latent, `r` rotated part, `k` part of a key from the latent, `v` value of a head,
//! `d` = k + r.

use dflash_kernels::kernels::Kernels;
use tch::Tensor;

use crate::layer::Projected;

/// Projections from a latent to each head's keys and values.
#[derive(Debug)]
pub(crate) struct LatentUp {
    key_nkl: Tensor,
    value_nlv: Tensor,
}

/// Arguments of attention over latents.
#[derive(Debug)]
pub(crate) struct Latent<'a> {
    /// Queries [T, N, D], rotated parts last.
    pub(crate) q_tnd: Tensor,
    /// The cached values: latents and rotated keys [T, 1, L+R].
    pub(crate) kept_t1c: Tensor,
    pub(crate) up: &'a LatentUp,
    /// The attention implementation.
    pub(crate) kernels: Kernels,
}

impl LatentUp {
    /// From the projection [L, N * (K+V)] of all heads; each head has `key` outputs followed by its
    /// value's.
    pub(crate) fn new(up_lo: &Tensor, heads: i64, key: i64) -> Self {
        let up_lno = up_lo.unflatten(1, [heads, -1]);
        let value = up_lno.size()[2] - key;
        Self {
            key_nkl: up_lno.narrow(2, 0, key).permute([1, 2, 0]).contiguous(),
            value_nlv: up_lno.narrow(2, key, value).transpose(0, 1).contiguous(),
        }
    }

    /// The latents [T, 1, L] of cached rows [T, 1, L+R].
    pub(crate) fn latents(&self, kept_t1c: &Tensor) -> Tensor {
        kept_t1c.narrow(2, 0, self.key_nkl.size()[2])
    }

    /// Head outputs, concatenated [T, N*V], from weighted latents [T, N*L].
    pub(crate) fn values(&self, weighted: &Tensor) -> Tensor {
        let weighted_ntl = weighted.unflatten(1, [self.value_nlv.size()[0], -1]).transpose(0, 1);
        weighted_ntl.bmm(&self.value_nlv).transpose(0, 1).flatten(1, 2)
    }

    /// Keys [S, N, D] and values [S, N, V] of cached rows [S, 1, L+R].
    pub(crate) fn expand(&self, kept_s1c: &Tensor) -> (Tensor, Tensor) {
        let size = self.key_nkl.size();
        let (heads, latent) = (size[0], size[2]);
        let latent_1sl = self.latents(kept_s1c).transpose(0, 1);
        let rotated = kept_s1c.narrow(2, latent, kept_s1c.size()[2] - latent);
        let k_snk = latent_1sl.matmul(&self.key_nkl.transpose(1, 2)).transpose(0, 1);
        let v_snv = latent_1sl.matmul(&self.value_nlv).transpose(0, 1);
        (Tensor::cat(&[k_snk, rotated.expand([-1, heads, -1], false)], 2), v_snv)
    }

    /// Whether expanding keys and values is cheaper for `tokens` new tokens over a cache: expansion
    /// costs L (K+V) per cached token, attention in the latent space 2 L - K - V more per pair.
    pub(crate) fn expands(&self, tokens: i64) -> bool {
        let (size, value) = (self.key_nkl.size(), self.value_nlv.size()[2]);
        let (key, latent) = (size[1], size[2]);
        tokens * (2 * latent - key - value) > latent * (key + value)
    }
}

impl Latent<'_> {
    /// The tokens `start .. start + length`.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Self {
        let [q_tnd, kept_t1c] = [&self.q_tnd, &self.kept_t1c].map(|x| x.narrow(0, start, length));
        Self { q_tnd, kept_t1c, ..*self }
    }

    /// Queries in the latent space; keys and values as cached, of one head.
    pub(crate) fn absorbed(&self) -> Projected {
        let key = self.up.key_nkl.size()[1];
        let rotated = self.q_tnd.narrow(2, key, self.q_tnd.size()[2] - key);
        let q_ntk = self.q_tnd.narrow(2, 0, key).transpose(0, 1);
        let q_tnl = q_ntk.bmm(&self.up.key_nkl).transpose(0, 1);
        Projected {
            q_tnd: Tensor::cat(&[q_tnl, rotated], 2),
            k_tmd: self.kept_t1c.shallow_clone(),
            v_tme: self.up.latents(&self.kept_t1c),
            kernels: self.kernels,
            are_kept: false,
        }
    }

    /// Expanded keys and values per head.
    pub(crate) fn expanded(&self) -> Projected {
        let (k_tmd, v_tme) = self.up.expand(&self.kept_t1c);
        let (q_tnd, kernels) = (self.q_tnd.shallow_clone(), self.kernels);
        Projected { q_tnd, k_tmd, v_tme, kernels, are_kept: false }
    }
}

#[cfg(test)]
mod tests {
    use dflash_test_support::seeded;
    use tch::{Device, Kind};

    use super::*;
    use crate::packed::causal;
    use dflash_tensor::attention_span::{AttentionPlace, AttentionSpan};
    use dflash_tensor::ops::Scores;

    #[test]
    fn both_forms_are_one_attention() {
        let _draws = seeded(tch::manual_seed);
        let (tokens, heads, latent, rotated, key, value) = (19, 3, 16, 4, 6, 5);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let up = LatentUp::new(&random(&[latent, heads * (key + value)]), heads, key);
        let all = Latent {
            q_tnd: random(&[tokens, heads, key + rotated]),
            kept_t1c: random(&[tokens, 1, latent + rotated]),
            up: &up,
            kernels: Kernels::Portable,
        };
        let scores = Scores { scale: Some(0.3), ..Scores::default() };
        let place = AttentionPlace { layer: 0, attention_span: AttentionSpan::All, scores };
        let expanded = causal(&all.expanded(), place);
        let absorbed = up.values(&causal(&all.absorbed(), place));
        assert_eq!(expanded.size(), [tokens, heads * value]);
        assert!(absorbed.allclose(&expanded, 1e-5, 1e-5, false));
        let first = causal(&all.narrow(0, 7).expanded(), place);
        assert!(first.allclose(&expanded.narrow(0, 0, 7), 1e-5, 1e-5, false));
        // 16 (6 + 5) = 176 per cached token, 32 - 11 = 21 per pair.
        assert_eq!([8, 9].map(|tokens| up.expands(tokens)), [false, true]);
    }
}
