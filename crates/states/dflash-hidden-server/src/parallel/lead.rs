//! Rank 0: turns prompts into jobs, and the states of all stages into one answer.
//!
//! A batch is split into several jobs, so that while one is on a stage the next is on the stage
//! before. The caller waits for answers separately: until then it may begin the next batch.

use std::path::Path;

use dflash_dist::Pending;
use dflash_target::parallel::{Grid, States, TargetPart};
use dflash_target::{PackedPrompts, PrefillOptions, TargetConfig};
use dflash_tensor::{DeviceKind, device_name, kind_name};
use tch::{Device, Kind, Tensor};

use super::Peers;
use super::job::{self, Job};
use super::link::{Link, Outbox};
use super::stage::{AuxStates, Stage, ids_of};
use crate::Error;

/// Jobs of a batch per stage: with more, jobs would be too small for efficient computation.
const JOBS_PER_STAGE: usize = 2;

/// Minimum number of tokens of a job on a GPU; on a CPU it is that of a batch (see `prefill`).
const LEAST_ON_GPU: usize = 512;

/// Jobs that other ranks may not have received yet.
const UNHEARD: usize = 16;

/// The rank that takes prompts.
#[derive(Debug)]
pub(crate) struct Lead {
    stage: Stage,
    told: Outbox,
}

/// A batch whose states are being computed.
pub(crate) struct InFlight {
    layer_ids: Vec<u32>,
    jobs: Vec<JobUnderWay>,
    device: Device,
}

struct JobUnderWay {
    /// Number of tokens of the batch.
    tokens: i64,
    own: AuxStates,
    coming: Vec<Coming>,
}

/// The answer of a stage.
struct Coming {
    /// Whether it had memory, 1 or 0.
    found: (Tensor, Box<dyn Pending>),
    states: Vec<(u32, Tensor, Box<dyn Pending>)>,
}

impl Lead {
    /// Loads rank 0's part and runs one pass through all ranks.
    ///
    /// # Errors
    /// As [`Stage::load`]; a rank that has gone.
    pub(crate) fn load(
        dir: &Path,
        options: &PrefillOptions<'_>,
        peers: Peers,
    ) -> Result<Self, Error> {
        let stage = Stage::load(dir, options, peers)?;
        let mut lead = Self { stage, told: Outbox::new(UNHEARD) };
        let last = lead.config().num_hidden_layers as u32;
        let prompts = PackedPrompts::new([[0i64].as_slice()].into_iter());
        lead.begin(&prompts, &[last])?.wait()?;
        Ok(lead)
    }

    /// The target's configuration.
    pub(crate) fn config(&self) -> &TargetConfig {
        self.stage.part.config()
    }

    /// The device it runs on.
    pub(crate) fn device(&self) -> Device {
        self.stage.part.place().device
    }

    /// Where and in what type the ranks run, for people.
    pub(crate) fn place(&self) -> String {
        let Grid { pipeline, tensor } = self.stage.grid;
        let device = match self.device() {
            Device::Cpu => "the CPU".to_owned(),
            other => format!("GPUs from {} on", device_name(other)),
        };
        let kind = kind_name(self.stage.part.place().kind);
        let products =
            if self.stage.part.multiplies_in_bf16() { " with bfloat16 products" } else { "" };
        let layers: Vec<String> =
            self.stage.part.stages().iter().map(|s| s.len().to_string()).collect();
        let ranks = self.stage.grid.ranks();
        let by_layers = match pipeline {
            1 => String::new(),
            stages => format!(", {stages} stages of {} layers", layers.join(" and ")),
        };
        let by_heads = match tensor {
            1 => String::new(),
            parts => format!(", heads in {parts} parts"),
        };
        format!("{device} in {kind}{products}, {ranks} ranks{by_layers}{by_heads}")
    }

    /// Starts computing the states of all tokens of `prompts`, as
    /// [`dflash_target::Prefill::states`] does.
    ///
    /// # Errors
    /// A rank that has gone.
    ///
    /// # Panics
    /// If an id is beyond the layers; if memory runs out before any rank has received the job.
    pub(crate) fn begin(
        &mut self,
        prompts: &PackedPrompts,
        layer_ids: &[u32],
    ) -> Result<InFlight, Error> {
        let stage = &self.stage;
        let device = stage.part.place().device;
        let least = if device == Device::Cpu { TargetPart::least_tokens() } else { LEAST_ON_GPU };
        let most_jobs = match stage.grid.pipeline {
            1 => 1,
            stages => JOBS_PER_STAGE * stages,
        };
        let begin = |own: PackedPrompts| {
            let tokens = own.input_ids.len() as i64;
            let prompts = self.stage.part.filled_up(&own);
            self.begin_job(&Job { prompts, layer_ids: layer_ids.to_vec() }, tokens)
        };
        let jobs =
            cut(prompts, least, most_jobs).into_iter().map(begin).collect::<Result<_, Error>>()?;
        Ok(InFlight { layer_ids: layer_ids.to_vec(), jobs, device })
    }

    fn begin_job(&mut self, job: &Job, tokens: i64) -> Result<JobUnderWay, Error> {
        let DeviceKind { device, kind } = self.stage.part.place();
        let shape = [job.prompts.input_ids.len() as i64, self.stage.part.config().hidden_size];
        let further = self.stage.part.stages()[1..].iter().zip(&self.stage.answers);
        let asked = further.filter(|(layers, _)| job.until() > layers.start);
        // All memory first: once the others have received a job, it must be completed.
        let room: Vec<(&Link, Tensor, States)> = asked
            .map(|(layers, link)| {
                let state = |id| (id, Tensor::empty(shape, (kind, link.arrives_at(device))));
                let states = ids_of(layers, &job.layer_ids).into_iter().map(state).collect();
                (link, Tensor::zeros([1], (Kind::Int64, Device::Cpu)), states)
            })
            .collect();
        job::tell(&*self.stage.control, Some(job), &mut self.told)?;
        let mut coming = Vec::new();
        for (link, found, states) in room {
            let pending = link.start_known(&found)?;
            let start = |(id, state_th): (u32, Tensor)| {
                let pending = link.start_known(&state_th)?;
                Ok((id, state_th, pending))
            };
            let states = states.into_iter().map(start).collect::<Result<_, Error>>()?;
            coming.push(Coming { found: (found, pending), states });
        }
        let own = self.stage.run(job)?;
        Ok(JobUnderWay { tokens, own, coming })
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // Ranks that have gone need no message.
        let told = job::tell(&*self.stage.control, None, &mut self.told);
        let _ = told.and_then(|()| self.told.settle());
    }
}

impl InFlight {
    /// Waits for the states, [T, H] for each of the layer ids in order.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; a rank that has gone.
    pub(crate) fn wait(self) -> Result<Vec<Tensor>, Error> {
        let Self { layer_ids, jobs, device } = self;
        let mut parts: Vec<Vec<Tensor>> = layer_ids.iter().map(|_| Vec::new()).collect();
        let mut short = None;
        for (number, job) in jobs.into_iter().enumerate() {
            let tokens = job.tokens;
            match job.wait(device)? {
                Err(stage) => short = short.or(Some((number, stage))),
                Ok(states) => {
                    for (id, parts) in layer_ids.iter().zip(&mut parts) {
                        let state = states.iter().find(|(found, _)| found == id);
                        let (_, state_th) = state.expect("every id is of one stage");
                        parts.push(state_th.narrow(0, 0, tokens));
                    }
                }
            }
        }
        if let Some((_, stage)) = short {
            let reason = format!("a rank of stage {stage} has none; its log names it");
            return Err(Error::NoMemory { reason });
        }
        let joined = |parts: Vec<Tensor>| match <[Tensor; 1]>::try_from(parts) {
            Ok([part]) => part,
            Err(parts) => Tensor::cat(&parts, 0),
        };
        Ok(parts.into_iter().map(joined).collect())
    }
}

impl JobUnderWay {
    /// The states of all stages by id, or the first stage that ran out of memory.
    fn wait(self, device: Device) -> Result<Result<States, usize>, Error> {
        let mut short = self.own.is_none().then_some(0);
        let mut states = self.own.unwrap_or_default();
        for (number, stage) in self.coming.into_iter().enumerate() {
            let (found, pending) = stage.found;
            pending.wait()?;
            for (id, state_th, pending) in stage.states {
                pending.wait()?;
                states.push((id, state_th.to_device(device)));
            }
            if found.int64_value(&[0]) == 0 {
                short = short.or(Some(number + 1));
            }
        }
        Ok(short.map_or(Ok(states), Err))
    }
}

/// Splits `prompts` into at most `most_jobs` jobs, each except the last with at least `least`
/// tokens.
fn cut(prompts: &PackedPrompts, least: usize, most_jobs: usize) -> Vec<PackedPrompts> {
    let PackedPrompts { input_ids, document_starts } = prompts;
    let each = input_ids.len().div_ceil(most_jobs).max(least);
    let documents =
        document_starts.windows(2).map(|ends| &input_ids[ends[0] as usize..ends[1] as usize]);
    let (mut jobs, mut open, mut tokens) = (Vec::new(), Vec::new(), 0);
    for document in documents {
        open.push(document);
        tokens += document.len();
        if tokens >= each {
            jobs.push(PackedPrompts::new(open.drain(..)));
            tokens = 0;
        }
    }
    if !open.is_empty() {
        jobs.push(PackedPrompts::new(open.into_iter()));
    }
    jobs
}

impl std::fmt::Debug for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlight").field("layer_ids", &self.layer_ids).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_cut_between_prompts_into_jobs_of_some_size() {
        let check = |lengths: &[usize], (least, most): (usize, usize), expected: &[&[i64]]| {
            let prompts: Vec<Vec<i64>> = lengths.iter().map(|&n| vec![n as i64; n]).collect();
            let packed = PackedPrompts::new(prompts.iter().map(Vec::as_slice));
            let jobs = cut(&packed, least, most);
            let starts: Vec<&[i64]> = jobs.iter().map(|job| &*job.document_starts).collect();
            assert_eq!(starts, expected, "{lengths:?}");
            let ids: Vec<i64> = jobs.iter().flat_map(|job| job.input_ids.clone()).collect();
            assert_eq!(ids, packed.input_ids);
        };
        check(&[4, 4, 4, 4], (1, 4), &[&[0, 4], &[0, 4], &[0, 4], &[0, 4]]);
        check(&[4, 4, 4, 4], (6, 4), &[&[0, 4, 8], &[0, 4, 8]]);
        check(&[4, 4, 4, 4], (1, 1), &[&[0, 4, 8, 12, 16]]);
        check(&[1, 1, 9, 2], (2, 4), &[&[0, 1, 2, 11], &[0, 2]]);
    }
}
