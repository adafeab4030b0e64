//! One process's part of a parallel target: some of its layers, or a shard of them.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use dflash_tensor::weights::EMBEDDING;
use dflash_tensor::{DeviceKind, Error, Result, Weights};
use dflash_torch_sys::with_products;
use tch::{Device, Tensor, no_grad};

use super::Grid;
use super::shard::{Shard, Sum};
use crate::embedding::Embedding;
use crate::layer::Pass;
use crate::packed::PackedAttention;
use crate::parameters::Init;
use crate::prefill::{PrefillOptions, fill_up, least, multiplies_in_bf16};
use crate::target::{Body, Stack, document_positions, is_of_part, of_documents};
use crate::{PackedPrompts, TargetConfig};

/// Consecutive layers of a target, or a shard of them.
#[derive(Debug)]
pub struct TargetPart {
    config: TargetConfig,
    place: DeviceKind,
    in_bf16: bool,
    /// The layers of each stage, counted from 0, and the index of this stage.
    stages: Vec<Range<usize>>,
    stage: usize,
    /// Only in the first stage.
    embedding: Option<Embedding>,
    body: Body,
    sums: Option<Arc<dyn Sum>>,
}

/// What a stage sends to the next.
#[derive(Debug)]
pub struct Passing {
    /// The residual stream [T, H].
    pub x_th: Tensor,
    /// Per-token inputs that the family computed for all layers.
    pub prepared: Option<Tensor>,
    /// Keys and values that later layers reuse, by their layer.
    pub shared: HashMap<usize, (Tensor, Tensor)>,
}

/// Auxiliary hidden states [T, H] of a stage's own layers, with their ids.
pub type States = Vec<(u32, Tensor)>;

impl TargetPart {
    /// Loads the part of the target in `dir` that belongs to `rank` of `grid`; ignores
    /// `options.highest`. Partial products are summed through `sums`.
    ///
    /// # Errors
    /// As [`super::super::Target::load`]; [`Grid::check`].
    pub fn load(
        dir: &Path,
        options: &PrefillOptions<'_>,
        grid: Grid,
        rank: usize,
        sums: Option<Arc<dyn Sum>>,
    ) -> Result<Self> {
        let config = TargetConfig::load(dir)?;
        let weights = Weights::open(dir)?;
        let (stages, stage) = (grid.stages(&config)?, grid.stage(rank));
        let layers = stages[stage].clone();
        let prefix = weights.prefix();
        let first = stage == 0;
        weights.begin_load(|name| is_of_part(name, prefix, &config, &layers, first))?;
        let shard = Shard::new(grid.part(rank), grid.tensor, sums.clone());
        let device = options.place.device;
        let (weights, place) = (Some(&weights), options.place);
        let init = Init { weights, place, prefix, shard, packing: None };
        let (embedding, body) = no_grad(|| -> Result<_> {
            let shape = [config.vocab_size, config.hidden_size];
            let embedding = || init.matrix(&init.path(EMBEDDING), &shape);
            let embedding = first.then(embedding).transpose()?.map(Embedding::table);
            Ok((embedding, Body::build(&config, layers, &init)?))
        })?;
        let in_bf16 = multiplies_in_bf16(device, options.asked, dir);

        Ok(Self { config, place, in_bf16, stages, stage, embedding, body, sums })
    }

    /// The whole target's configuration.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Device, and type of weights and activations.
    pub fn place(&self) -> DeviceKind {
        self.place
    }

    /// Whether float32 matrix products use bf16.
    pub fn multiplies_in_bf16(&self) -> bool {
        self.in_bf16
    }

    /// The layers of each stage, counted from 0.
    pub fn stages(&self) -> &[Range<usize>] {
        &self.stages
    }

    /// This stage's layers.
    pub fn layers(&self) -> Range<usize> {
        self.stages[self.stage].clone()
    }

    /// `prompts` as processed here, possibly padded with a filler prompt.
    pub fn filled_up(&self, prompts: &PackedPrompts) -> PackedPrompts {
        fill_up(prompts, self.place.device, self.in_bf16)
    }

    /// Minimum tokens per batch on a CPU.
    pub fn least_tokens() -> usize {
        least()
    }

    /// Runs its layers up to layer id `until` over `prompts`, with the input that has `arrived`
    /// from the previous stage. Returns the output for the next stage and the states of its own
    /// layers in `layer_ids`.
    ///
    /// # Errors
    /// libtorch does not support the required product precision.
    ///
    /// # Panics
    /// If out of memory, or if a later stage has no input.
    pub fn run(
        &self,
        prompts: &PackedPrompts,
        layer_ids: &[u32],
        until: usize,
        arrived: Option<Passing>,
    ) -> Result<(Passing, States)> {
        let run = || no_grad(|| self.pass(prompts, layer_ids, until, arrived));
        match self.place.device {
            Device::Cpu => with_products(self.in_bf16, run).map_err(Error::Products),
            _ => Ok(run()),
        }
    }

    fn pass(
        &self,
        prompts: &PackedPrompts,
        layer_ids: &[u32],
        until: usize,
        arrived: Option<Passing>,
    ) -> (Passing, States) {
        let DeviceKind { device, kind } = self.place;
        let starts = &prompts.document_starts;
        let positions = document_positions(starts, device);
        let tables = of_documents(self.body.tables(&positions, kind), starts);
        let mut attention = PackedAttention::new(starts);
        let mut pass = Pass::new(&tables, &positions, &mut attention);
        let mut aux_states = Vec::new();
        let mut x_th = match (arrived, &self.embedding) {
            (Some(Passing { x_th, prepared, shared }), _) => {
                (pass.prepared, pass.shared) = (prepared, shared);
                x_th
            }
            (None, None) => panic!("stages without the embedding have one before them"),
            (None, Some(embedding)) => {
                let ids_t = Tensor::from_slice(&prompts.input_ids).to_device(device);
                let x_th = Stack { embedding, body: &self.body, stop: None }.embed(&ids_t);
                let prepare = self.body.prepare.as_ref();
                pass.prepared = prepare.map(|prepare| prepare.of(&ids_t, &x_th));
                aux_states.extend(layer_ids.contains(&0).then(|| (0, x_th.shallow_clone())));
                x_th
            }
        };
        for (layer, number) in self.body.layers.iter().zip(self.layers()) {
            if number >= until {
                break;
            }
            if let Some(sums) = &self.sums {
                sums.at(number);
            }
            x_th = layer.forward(&x_th, &mut pass);
            let id = number as u32 + 1;
            aux_states.extend(layer_ids.contains(&id).then(|| (id, x_th.shallow_clone())));
        }
        (Passing { x_th, prepared: pass.prepared, shared: pass.shared }, aux_states)
    }
}
