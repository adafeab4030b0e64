//! Initial timing of passes, for the first choices of the number of proposals.

use std::time::{Duration, Instant};

use dflash_tensor::catch_oom;
use tch::no_grad;

use super::sequence::Sequence;
use super::{Engine, Plan, Request, SequenceId};
use crate::Error;
use crate::limits::Limits;
use crate::sampling::Sampling;

/// Timed passes per size at the start; later ones have more weight.
const TIMED_PASSES: usize = 4;
/// Time limit for measuring further sizes.
const LONGEST_TIMING: Duration = Duration::from_millis(300);

impl Engine<'_> {
    /// Times passes of several sizes: a minimum set, and more as long as time allows.
    pub(super) fn time_passes(&mut self) -> Result<(), Error> {
        let most = self.lengths.most();
        let sizes = [0, most, most / 2, most / 4, 1];
        let tokens = TIMED_PASSES * sizes.iter().map(|size| size + 1).sum::<usize>();
        let limits = Limits { max_new_tokens: tokens + 1, stop_ids: Vec::new() };
        let request = Request::new(&[0], &limits, Sampling::GREEDY, 0);
        let began = Instant::now();
        let (cache, context) = self.new_caches(&request);
        let id = SequenceId::numbered(self.next_id);
        self.next_id += 1;
        self.sequences.push(Sequence::new(id, request, self.target, cache, context));
        self.step()?;
        let timed = catch_oom(|| {
            no_grad(|| {
                for (number, size) in sizes.into_iter().enumerate() {
                    for _ in 0..TIMED_PASSES {
                        let is_enough = number > 1 && began.elapsed() > LONGEST_TIMING;
                        let Some(&bonus) = self.sequences[0].tokens().last().filter(|_| !is_enough)
                        else {
                            return;
                        };
                        let (mut ids, mut drafted) = (vec![bonus], size);
                        if self.proposer.drafter().is_none() {
                            ids.resize(1 + size, 0);
                            drafted = 0;
                        }
                        self.run(vec![Plan { at: 0, ids, drafted, shares: None }], Vec::new());
                    }
                }
            })
        });
        let sequences = self.len();
        self.sequences.clear();
        self.lengths.started();
        timed.map_err(|reason| Error::OutOfMemory { sequences, reason })
    }
}
