//! One worker's life, from a prepared run to its last checkpoint.

mod notes;
mod summary;
#[cfg(test)]
mod tests;
mod worker;

use std::path::PathBuf;
use std::time::Duration;

use dflash_dist::{Communicator, ConnectOptions, WorkerEnv, connect};
use dflash_model::place;
use dflash_run::{Position, Provenance, RunDir, SavePath, ServedWeights};
use dflash_settings::MatmulPrecision;
use tch::{Device, Kind};

use crate::optimizer::OptimizerConfig;
use crate::order::{Length, RowOrder, Stride};
use crate::prepared::Prepared;
use crate::rows::RowSource;
use crate::validation::{AcceptanceProbe, Validation};
use crate::{Error, checkpoint, setup};
use worker::Worker;

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// Its optimizer steps.
    pub step: u64,
    /// Whether the schedule was completed; false when the run was told to stop.
    pub completed: bool,
}

impl Prepared<'_> {
    /// Trains as the rank that `env` describes; `probe` measures acceptance where the settings'
    /// validation asks for it.
    ///
    /// # Errors
    /// A server or a rank that is gone, a full disk, data that cannot be trained on.
    pub fn run(
        &self,
        env: &WorkerEnv,
        probe: Option<AcceptanceProbe<'_>>,
    ) -> Result<Outcome, Error> {
        let config = &self.config.settings;
        let device = place(config.compute.device, config.compute.compute_dtype, env.local_rank)?;
        let options = ConnectOptions {
            join_timeout: Duration::from_secs(config.launch.join_timeout),
            collective_timeout: Duration::from_secs(config.launch.collective_timeout),
            device: device.0,
            backend: config.launch.backend,
        };
        let communicator = connect(env, &options)?;
        if config.compute.matmul_precision == MatmulPrecision::Bfloat16 {
            dflash_torch_sys::multiply_in_bf16()?;
        }
        self.train((&*communicator, device), &self.streamed_rows(), probe)
    }

    /// Trains on the rows of `source` as a rank that has joined the others.
    pub(crate) fn train(
        &self,
        (communicator, device): (&dyn Communicator, (Device, Kind)),
        source: &dyn RowSource,
        probe: Option<AcceptanceProbe<'_>>,
    ) -> Result<Outcome, Error> {
        let config = &self.config.settings;
        self.check_agreement(communicator)?;
        tch::no_grad(|| {
            let (rank, ranks) = (communicator.rank() as u64, communicator.world_size() as u64);
            let place = (communicator.rank(), communicator.world_size());
            let mut trainer = setup::trainer(self, device, place)?;
            let mut position = self.start();
            if let Some(checkpoint) = &self.resume {
                position = checkpoint::resume(&mut trainer, checkpoint, &position)?;
            }
            let share = Stride { first: position.rows + rank, stride: ranks };
            let length = self.length(&position, ranks);
            let (order, mut planned) = RowOrder::plan(self.packing(), length, share)?;
            let total = self.total_steps(&order, &position, ranks);
            let own = (total - position.step) as usize * config.rows.gradient_accumulation_steps;
            planned.truncate(own);
            let mut rows = source.start(planned)?;
            let mut save_path = None;
            if rank == 0 {
                save_path = Some(SavePath::claim(&config.save_path)?);
                let provenance = self.provenance(&position, communicator.world_size());
                RunDir::at(&config.save_path).record(provenance)?;
            }
            let at = (communicator, position.step);
            let validation = Validation::new(self, source, probe, at)?;
            let worker = Worker {
                prepared: self,
                begun_at: position.step,
                had_slots: false,
                order,
                communicator,
                trainer,
                position,
                total,
                save_path,
                saved: None,
                validation,
            };
            worker.train(&mut *rows)
        })
    }

    /// Refuses ranks that would resume different checkpoints, as on nodes without a shared file system:
    /// they would train different drafts.
    fn check_agreement(&self, communicator: &dyn Communicator) -> Result<(), Error> {
        let step = self.resume.as_ref().map(|checkpoint| format!("step {}", checkpoint.step));
        let own = step.unwrap_or_else(|| "no checkpoint".to_owned());
        let all = communicator.all_gather_bytes(own.as_bytes())?;
        let Some(rank) = all.iter().position(|found| *found != all[0]) else { return Ok(()) };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        let (path, found, expected) = (self.config.settings.save_path.clone(), text(rank), text(0));
        Err(Error::RanksDisagree { rank, path, found, expected })
    }

    fn provenance(&self, position: &Position, world_size: usize) -> Provenance {
        Provenance {
            dflash: Some(env!("CARGO_PKG_VERSION").to_owned()),
            libtorch: dflash_torch_sys::libtorch_version().ok(),
            world_size: Some(world_size),
            resumed_at_step: position.step,
            dataset: Some(position.dataset.clone()),
            config: serde_json::to_value(self.config).expect("settings print"),
            ..Provenance::default()
        }
    }

    /// Where a fresh run begins.
    fn start(&self) -> Position {
        let config = &self.config.settings;
        let optimizer = OptimizerConfig::from(&config.optimizer);
        Position {
            dataset: self.dataset.fingerprint(),
            seed: config.rows.seed,
            total_seq_len: config.rows.total_seq_len,
            trained_samples: Some(self.packing().lengths.len()),
            optimizer: optimizer.algorithm.name().to_owned(),
            ema_decay: optimizer.ema_decay,
            served_weights: ServedWeights::of(optimizer.ema_decay),
            ..Position::default()
        }
    }

    /// All epochs; with a bound on steps alone, as many as it needs.
    fn length(&self, position: &Position, ranks: u64) -> Length {
        let rows = &self.config.settings.rows;
        if let Some(epochs) = rows.whole_epochs() {
            return Length::Epochs(epochs);
        }
        let steps = rows.max_steps.unwrap_or(1).saturating_sub(position.step);
        let remaining = steps.saturating_mul(ranks * rows.gradient_accumulation_steps as u64);
        Length::Rows(remaining.saturating_add(position.rows))
    }

    /// Steps of the whole schedule: those done, and what the remaining rows give.
    fn total_steps(&self, order: &RowOrder, position: &Position, ranks: u64) -> u64 {
        let remaining = order.rows().saturating_sub(position.rows);
        let rows = &self.config.settings.rows;
        let all =
            position.step + remaining.div_ceil(ranks * rows.gradient_accumulation_steps as u64);
        rows.max_steps.map_or(all, |bound| bound.min(all)).max(position.step)
    }
}
