//! Assignment of layers and shards to ranks. Ranks count through a stage's parts first, then
//! through the stages.

use std::ops::Range;

use dflash_tensor::{Error, Result};

use super::super::TargetConfig;
use super::Shard;

/// A size that tensor parallelism divides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Divisible {
    /// Its config.json key, or a description.
    pub(crate) key: &'static str,
    pub(crate) size: i64,
    /// Whether a multiple of `size` ranks also works, with several ranks sharing a unit.
    pub(crate) is_repeated: bool,
}

impl Divisible {
    /// A size that must be a multiple of the ranks.
    pub(crate) fn new(key: &'static str, size: i64) -> Self {
        Self { key, size, is_repeated: false }
    }

    /// Whether `ranks` ranks can divide it.
    fn fits(self, ranks: usize) -> bool {
        let ranks = ranks as i64;
        self.size % ranks == 0 || self.is_repeated && ranks % self.size == 0
    }

    /// How the rank count fails to fit, for messages.
    fn relation(self) -> &'static str {
        if self.is_repeated { "neither divides nor is a multiple of" } else { "does not divide" }
    }
}

/// Number of pipeline stages and tensor-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Pipeline stages of consecutive layers.
    pub pipeline: usize,
    /// Ranks that share the heads and the inner width of every layer.
    pub tensor: usize,
}

impl Grid {
    /// Total number of ranks.
    pub fn ranks(self) -> usize {
        self.pipeline * self.tensor
    }

    /// The stage of `rank`.
    pub fn stage(self, rank: usize) -> usize {
        rank / self.tensor
    }

    /// The tensor-parallel index of `rank` within its stage.
    pub fn part(self, rank: usize) -> usize {
        rank % self.tensor
    }

    /// The rank with tensor-parallel index `part` in `stage`.
    pub fn rank(self, stage: usize, part: usize) -> usize {
        stage * self.tensor + part
    }

    /// The layers of each stage, counted from 0, chosen to minimise the largest stage.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn stages(self, config: &TargetConfig) -> Result<Vec<Range<usize>>> {
        let costs: Vec<u64> = self.costs(config)?.into_iter().map(|cost| cost as u64).collect();
        Ok(spread(&costs, self.pipeline))
    }

    /// Elements that a process of each stage stores. Matrices are sharded; with more ranks than key
    /// heads each has one, and routers and latent projections are replicated. The first stage also
    /// has the embedding and the per-layer inputs, not sharded.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn elements(self, config: &TargetConfig) -> Result<Vec<f64>> {
        let costs = self.costs(config)?;
        let stages = self.stages(config)?;
        Ok(stages.into_iter().map(|stage| costs[stage].iter().sum()).collect())
    }

    /// Elements per layer that a process of its stage stores.
    fn costs(self, config: &TargetConfig) -> Result<Vec<f64>> {
        self.check(config)?;
        let architecture = config.family.architecture();
        let shard = Shard::new(0, self.tensor, None);
        let embedding = (config.vocab_size * config.hidden_size) as f64;
        let outer = embedding + architecture.prepared_elements(config);
        let of_layer = |layer: usize| {
            let own = architecture.stored_elements(config, layer, &shard);
            if layer == 0 { own + outer } else { own }
        };
        Ok((0..config.num_hidden_layers).map(of_layer).collect())
    }

    /// Checks that a target can be divided this way.
    ///
    /// # Errors
    /// More stages than layers; heads, widths or expert counts that `tensor` ranks cannot divide.
    /// Each error names the possible values.
    pub fn check(self, config: &TargetConfig) -> Result<()> {
        let layers = config.num_hidden_layers;
        if self.pipeline > layers {
            return Err(Error::MoreStagesThanLayers { stages: self.pipeline, layers });
        }
        if self.tensor == 1 {
            return Ok(());
        }
        let ranks = self.tensor;
        let architecture = config.architecture.clone();
        let sizes = config.family.architecture().parallel_sizes();
        let Some(misfit) = sizes.iter().find(|size| !size.fits(ranks)) else { return Ok(()) };
        let (Divisible { key, size, .. }, relation) = (*misfit, misfit.relation());
        let possible = possible(&sizes);
        Err(Error::Indivisible { architecture, relation, key, size, ranks, possible })
    }
}

/// The rank counts that can divide all of `sizes`, for messages.
fn possible(sizes: &[Divisible]) -> String {
    let once = sizes.iter().filter(|size| !size.is_repeated);
    let most = once.map(|size| size.size).min().unwrap_or(1) as usize;
    let fits = |ranks: &usize| sizes.iter().all(|size| size.fits(*ranks));
    let possible: Vec<String> = (1..=most).filter(fits).map(|ranks| ranks.to_string()).collect();
    possible.join(", ")
}

/// Splits items into consecutive nonempty stages so that the largest cost of a stage is minimal.
fn spread(costs: &[u64], stages: usize) -> Vec<Range<usize>> {
    assert!((1..=costs.len()).contains(&stages), "{stages} stages of {} layers", costs.len());
    let sum = |range: Range<usize>| costs[range].iter().sum::<u64>();
    // best[s][n]: the largest cost with s + 1 stages of the first n items, and the start of the
    // last one.
    let mut best: Vec<Vec<(u64, usize)>> =
        vec![(0..=costs.len()).map(|end| (sum(0..end), 0)).collect()];
    for stage in 1..stages {
        let before = &best[stage - 1];
        let of = |end: usize| {
            let last = |start: usize| (before[start].0.max(sum(start..end)), start);
            (stage..end).map(last).min().unwrap_or((u64::MAX, 0))
        };
        let row = (0..=costs.len()).map(of).collect();
        best.push(row);
    }
    let mut ranges = Vec::new();
    let mut end = costs.len();
    for row in best.iter().rev() {
        let start = row[end].1;
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_spread_so_that_the_costliest_stage_costs_least() {
        let check = |costs: &[u64], stages: usize, expected: &[Range<usize>]| {
            assert_eq!(spread(costs, stages), expected, "{costs:?}");
        };
        check(&[1, 1, 1, 1], 2, &[0..2, 2..4]);
        check(&[5, 1, 1, 1, 1, 1], 2, &[0..1, 1..6]);
        check(&[1, 1, 1], 3, &[0..1, 1..2, 2..3]);
        check(&[3, 1, 1, 3], 1, std::slice::from_ref(&(0..4)));
        check(&[0, 0, 0], 3, &[0..1, 1..2, 2..3]);
        let found = spread(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 3);
        let costs = found.iter().map(|range| range.clone().map(|n| n as u64 + 1).sum::<u64>());
        assert_eq!(costs.max(), Some(17));
    }

    #[test]
    fn a_process_holds_its_part() {
        let config = TargetConfig::qwen3(64, 4, 100);
        let of = |pipeline, tensor| Grid { pipeline, tensor }.elements(&config).unwrap();
        let (layer, embedding) = (3.0 * 64.0 * 64.0 + 3.0 * 64.0 * 192.0, 6400.0);
        assert_eq!(of(1, 1), [4.0 * layer + embedding]);
        assert_eq!(of(2, 1), [2.0 * layer + embedding, 2.0 * layer]);
        assert_eq!(of(4, 2), [layer / 2.0 + embedding, layer / 2.0, layer / 2.0, layer / 2.0]);
        // A quarter of everything but keys and values: each rank has one of two heads of size 16.
        let quarter = (layer - 4.0 * 64.0 * 16.0) / 4.0 + 2.0 * 64.0 * 16.0;
        assert_eq!(of(1, 4), [4.0 * quarter + embedding]);
    }

    #[test]
    fn what_cannot_be_divided_is_refused_with_what_can() {
        let config = TargetConfig::qwen3(64, 4, 100);
        let check = |pipeline, tensor, expected: &str| {
            let found = Grid { pipeline, tensor }.check(&config).err();
            let found = found.map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(found, expected);
        };
        check(4, 2, "");
        check(5, 1, "--pipeline is 5, but the target has 4 layers, and every stage needs one");
        // Two key heads for four ranks, each of which has one.
        check(1, 4, "");
        let heads = "--tensor-parallel-size is 8, which does not divide num_attention_heads, 4, of \
                     this Qwen3ForCausalLM; possible: 1, 2, 4. --pipeline splits by layers";
        check(1, 8, heads);
        let config = config.clone().with_dense(|dense| {
            (dense.num_attention_heads, dense.num_key_value_heads) = (24, 6);
        });
        let error = Grid { pipeline: 1, tensor: 4 }.check(&config).unwrap_err().to_string();
        let keys = "--tensor-parallel-size is 4, which neither divides nor is a multiple of \
                    num_key_value_heads, 6, of this Qwen3ForCausalLM; possible: 1, 2, 3, 6, 12, 24.";
        assert!(error.starts_with(keys), "{error}");
    }
}
