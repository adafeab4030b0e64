//! What ranks exchange about a step or a validation: a vote on how it went, and counts to sum. Both
//! travel in one collective.
//!
//! The votes are: continue, save, stop after this step, void because stopped, void because failed.
//! The strongest vote decides for all ranks. A rank that cannot get its rows therefore still takes
//! part in the step, all ranks save, and only then does it fail. The others wait for it in a
//! barrier, so that the launcher sees the cause before its consequences.

use dflash_dist::Communicator;
use tch::{Device, Tensor};

use crate::Error;

/// A rank's vote. The strongest one decides for all; later variants are stronger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Vote {
    /// The step counts, and the run continues.
    #[default]
    Continue,
    /// The rank was asked to save: the step counts, all ranks save, and the run continues.
    Save,
    /// The rank was told to stop: the step counts, then the run ends.
    Stop,
    /// The rank was told to stop before it had its rows: the step is void, and the run ends.
    Abandon,
    /// The rank cannot get its rows: the step is void, and the run fails.
    Fail,
}

/// The votes that are transmitted; a rank that casts none of them votes [`Vote::Continue`].
const COUNTED: [Vote; 4] = [Vote::Save, Vote::Stop, Vote::Abandon, Vote::Fail];

/// Why a run ends before its schedule.
#[derive(Debug)]
pub(crate) enum Halt {
    /// A rank was told to stop.
    Stopped,
    /// The ranks agree that one of them failed: this one, with its error, or another.
    Failed(Option<Error>),
    /// Only this rank knows; the others will notice that it is gone.
    Broken(Error),
}

impl<E: Into<Error>> From<E> for Halt {
    fn from(error: E) -> Self {
        Self::Broken(error.into())
    }
}

impl Vote {
    /// The vote of a rank that met `error` while getting its rows or prompts.
    pub(crate) fn of(error: &Error) -> Self {
        if error.is_interruption() { Self::Abandon } else { Self::Fail }
    }

    pub(crate) fn is_void(self) -> bool {
        self >= Self::Abandon
    }

    /// What the ranks' common vote means for a rank with the error `own`.
    pub(crate) fn settle(self, own: Option<Error>) -> Result<(), Halt> {
        match self {
            Self::Continue | Self::Save | Self::Stop => Ok(()),
            Self::Abandon => Err(Halt::Stopped),
            Self::Fail => Err(Halt::Failed(own.filter(|error| Self::of(error) == Self::Fail))),
        }
    }
}

/// Sums `numbers` and a float64 `vector` over all ranks; returns their common vote. The vector
/// comes back on the host, so that reading it waits for no device.
pub(crate) fn add_up(
    communicator: &dyn Communicator,
    vote: Vote,
    numbers: &mut [&mut f64],
    vector: Option<&mut Tensor>,
) -> Result<Vote, Error> {
    let mut own: Vec<f64> = numbers.iter().map(|number| **number).collect();
    own.extend(COUNTED.map(|counted| f64::from(u8::from(vote == counted))));
    let mut joined = Tensor::from_slice(&own);
    if let Some(vector) = &vector {
        joined = Tensor::cat(&[vector.to_device(Device::Cpu), joined], 0);
    }
    communicator.all_reduce_sum(&mut joined)?;
    let length = joined.size()[0] - own.len() as i64;
    if let Some(vector) = vector {
        *vector = joined.narrow(0, 0, length);
    }
    let all =
        Vec::<f64>::try_from(joined.narrow(0, length, own.len() as i64)).expect("a float64 vector");
    let (summed, votes) = all.split_at(numbers.len());
    numbers.iter_mut().zip(summed).for_each(|(number, sum)| **number = *sum);
    let cast = COUNTED.iter().zip(votes).filter(|(_, count)| **count > 0.0);
    Ok(cast.map(|(vote, _)| *vote).max().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use dflash_dist::Single;
    use tch::Kind;

    use super::*;
    use crate::fake::Beside;

    #[test]
    fn numbers_and_vector_are_summed_each_in_its_place() {
        let (mut first, mut second) = (3.0, 0.5);
        let mut vector = Tensor::ones([4], (Kind::Double, Device::Cpu));
        let three = Beside { alike: 2, ..Beside::default() };
        let numbers = &mut [&mut first, &mut second];
        let vote = add_up(&three, Vote::Continue, numbers, Some(&mut vector)).unwrap();
        assert_eq!((vote, first, second), (Vote::Continue, 9.0, 1.5));
        assert_eq!(Vec::<f64>::try_from(vector).unwrap(), [3.0; 4]);
    }

    #[test]
    fn every_vote_reaches_all_and_the_strongest_decides() {
        for vote in [Vote::Continue, Vote::Save, Vote::Stop, Vote::Abandon, Vote::Fail] {
            let common = add_up(&Single, vote, &mut [&mut 0.0, &mut 0.0], None).unwrap();
            assert_eq!(common, vote);
            assert_eq!(common.is_void(), common.settle(None).is_err());
        }
        assert!(Vote::Fail > Vote::Abandon && Vote::Abandon > Vote::Stop);
        assert!(Vote::Stop > Vote::Save && Vote::Save > Vote::Continue);
    }

    #[test]
    fn a_rank_that_was_interrupted_has_no_fault_of_its_own() {
        let interrupted = || Error::from(dflash_hidden_states::Error::Interrupted);
        assert_eq!(Vote::of(&interrupted()), Vote::Abandon);
        assert!(matches!(Vote::Fail.settle(Some(interrupted())), Err(Halt::Failed(None))));
        let fault = || Error::from(dflash_settings::Invalid::new("lr", 0, "more"));
        assert_eq!(Vote::of(&fault()), Vote::Fail);
        assert!(matches!(Vote::Fail.settle(Some(fault())), Err(Halt::Failed(Some(_)))));
    }
}
