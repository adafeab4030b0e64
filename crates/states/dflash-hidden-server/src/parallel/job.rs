//! The message to all ranks before a pass: tokens, where documents begin, auxiliary layers.

use dflash_dist::{Communicator, Error};
use dflash_target::PackedPrompts;
use tch::{Device, Kind, Tensor};

use super::link::Outbox;

/// One pass.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Job {
    pub(crate) prompts: PackedPrompts,
    pub(crate) layer_ids: Vec<u32>,
}

impl Job {
    /// Layers that must run.
    pub(crate) fn until(&self) -> usize {
        self.layer_ids.iter().copied().max().unwrap_or(0) as usize
    }

    fn to_numbers(&self) -> Vec<i64> {
        let PackedPrompts { input_ids, document_starts } = &self.prompts;
        let ids = self.layer_ids.iter().map(|&id| i64::from(id));
        let lengths = [document_starts.len() as i64, self.layer_ids.len() as i64];
        lengths
            .into_iter()
            .chain(document_starts.iter().copied())
            .chain(ids)
            .chain(input_ids.iter().copied())
            .collect()
    }

    fn from_numbers(numbers: &[i64]) -> Self {
        let (lengths, rest) = numbers.split_at(2);
        let (starts, rest) = rest.split_at(lengths[0] as usize);
        let (ids, tokens) = rest.split_at(lengths[1] as usize);
        let prompts =
            PackedPrompts { document_starts: starts.to_vec(), input_ids: tokens.to_vec() };
        Self { prompts, layer_ids: ids.iter().map(|&id| id as u32).collect() }
    }
}

/// Broadcasts the next job, or that there is none. Returns at once.
pub(crate) fn tell(
    control: &dyn Communicator,
    job: Option<&Job>,
    outbox: &mut Outbox,
) -> Result<(), Error> {
    let numbers = job.map(Job::to_numbers).unwrap_or_default();
    let mut sent = vec![Tensor::from_slice(&[numbers.len() as i64])];
    sent.extend(job.map(|_| Tensor::from_slice(&numbers)));
    outbox.send(control, sent)
}

/// Waits for the next job; `None` at the end.
pub(crate) fn hear(control: &dyn Communicator) -> Result<Option<Job>, Error> {
    let mut length = Tensor::zeros([1], (Kind::Int64, Device::Cpu));
    control.broadcast(&mut length, 0)?;
    let length = length.int64_value(&[0]);
    if length == 0 {
        return Ok(None);
    }
    let mut numbers = Tensor::zeros([length], (Kind::Int64, Device::Cpu));
    control.broadcast(&mut numbers, 0)?;
    let numbers = Vec::<i64>::try_from(&numbers).expect("a vector of i64");
    Ok(Some(Job::from_numbers(&numbers)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_comes_as_it_was_sent() {
        for layer_ids in [vec![], vec![0], vec![3, 9]] {
            let prompts = PackedPrompts::new([[1i64, 2].as_slice(), &[7]].into_iter());
            let job = Job { prompts, layer_ids };
            assert_eq!(Job::from_numbers(&job.to_numbers()), job);
        }
    }
}
