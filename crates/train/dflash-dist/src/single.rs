//! The group of one process, in which every collective completes immediately.

use tch::{Device, Tensor};

use crate::{Communicator, Error, Pending};

/// World size 1.
#[derive(Debug, Clone, Copy, Default)]
pub struct Single;

impl Communicator for Single {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn takes(&self, _: Device) -> bool {
        true
    }

    fn start_all_reduce_sum(&self, _: &Tensor) -> Result<Box<dyn Pending>, Error> {
        Ok(Box::new(Done))
    }

    fn start_broadcast(&self, _: &Tensor, _: usize) -> Result<Box<dyn Pending>, Error> {
        Ok(Box::new(Done))
    }

    fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Result<(), Error> {
        tch::no_grad(|| output.view(-1).copy_(&input.reshape(-1)));
        Ok(())
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        Ok(vec![bytes.to_vec()])
    }

    fn barrier(&self) -> Result<(), Error> {
        Ok(())
    }

    fn announce_work(&self) {}

    fn announce_permanent_failure(&self) {}
}

struct Done;

impl Pending for Done {
    fn wait(self: Box<Self>) -> Result<(), Error> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_keeps_and_gathers_what_it_has() {
        let mut tensor = Tensor::from_slice(&[1i64, 2, 3, 4]).view([2, 2]);
        Single.all_reduce_sum(&mut tensor).unwrap();
        Single.broadcast(&mut tensor, 0).unwrap();
        Single.start_all_reduce_sum(&tensor).unwrap().wait().unwrap();
        let mut output = Tensor::zeros([4], (tch::Kind::Int64, tch::Device::Cpu));
        Single.all_gather(&mut output, &tensor).unwrap();
        assert_eq!(Vec::<i64>::try_from(&output).unwrap(), [1, 2, 3, 4]);
        assert_eq!(Single.all_gather_bytes(b"state").unwrap(), [b"state".to_vec()]);
        assert_eq!((Single.rank(), Single.world_size()), (0, 1));
    }
}
