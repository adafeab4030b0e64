//! What one process has of a parallel target: some of its layers, or a part of them.

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

/// Consecutive layers of a target, or a part of them.
#[derive(Debug)]
pub struct TargetPart {
    config: TargetConfig,
    place: DeviceKind,
    in_bf16: bool,
    /// The layers of each stage, counted from 0, and which of them these are.
    stages: Vec<Range<usize>>,
    stage: usize,
    /// On the first stage.
    embedding: Option<Embedding>,
    body: Body,
    sums: Option<Arc<dyn Sum>>,
}

/// What goes from stage to stage.
#[derive(Debug)]
pub struct Passing {
    /// The residual stream [T, H].
    pub x_th: Tensor,
    /// What the family has made of the tokens for all layers.
    pub prepared: Option<Tensor>,
    /// Keys and values that later layers look at too, by their layer.
    pub shared: HashMap<usize, (Tensor, Tensor)>,
}

/// The auxiliary hidden states [T, H] of a stage's own layers, by their ids.
pub type States = Vec<(u32, Tensor)>;

impl TargetPart {
    /// Loads what process number `rank` of `grid` has of the target in `dir`; `options.highest` is not
    /// heeded. Its parallel products go through `sums`.
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

    /// Device and kind of its weights and activations.
    pub fn place(&self) -> DeviceKind {
        self.place
    }

    /// Whether float32 matrices are multiplied in bf16.
    pub fn multiplies_in_bf16(&self) -> bool {
        self.in_bf16
    }

    /// The layers of each stage, counted from 0.
    pub fn stages(&self) -> &[Range<usize>] {
        &self.stages
    }

    /// Its own layers.
    pub fn layers(&self) -> Range<usize> {
        self.stages[self.stage].clone()
    }

    /// `prompts` as they are computed here: a prompt that nobody asked for may come behind them.
    pub fn filled_up(&self, prompts: &PackedPrompts) -> PackedPrompts {
        fill_up(prompts, self.place.device, self.in_bf16)
    }

    /// Tokens that a batch has on a CPU at least.
    pub fn least_tokens() -> usize {
        least()
    }

    /// Runs its layers up to layer id `until` over `prompts`, with what has `arrived` from the stage
    /// before: what goes on, and the states of those of `layer_ids` that its layers end with.
    ///
    /// # Errors
    /// libtorch does not take the target's kind of products.
    ///
    /// # Panics
    /// For lack of memory; when nothing arrives at a later stage.
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
