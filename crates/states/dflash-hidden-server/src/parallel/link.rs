//! Sends tensors from one rank to another, over a group of two in which the first broadcasts.

use std::collections::{HashMap, VecDeque};

use dflash_dist::{Communicator, Error, Pending};
use dflash_target::parallel::Passing;
use tch::{Device, Kind, Tensor};

/// Sends that may be in flight before the next one waits for the oldest.
const UNDER_WAY: usize = 2;

/// Number of integers that describe a bundle.
const HEAD: usize = 1024;

/// Types of tensors, by their number in a head.
const KINDS: [Kind; 4] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double];

/// Tensors that have been sent and must be kept until they have arrived.
pub(crate) struct Outbox {
    sent: VecDeque<Vec<(Tensor, Box<dyn Pending>)>>,
    most: usize,
}

/// A rank's connection to or from another rank.
pub(crate) struct Link {
    group: Box<dyn Communicator>,
    outbox: Outbox,
}

impl Outbox {
    pub(crate) fn new(most: usize) -> Self {
        Self { sent: VecDeque::new(), most }
    }

    /// Starts sending `tensors` to the others of `group`, in which this rank is the first.
    pub(crate) fn send(
        &mut self,
        group: &dyn Communicator,
        tensors: Vec<Tensor>,
    ) -> Result<(), Error> {
        while self.sent.len() >= self.most {
            self.settle_oldest()?;
        }
        let start = |tensor: Tensor| {
            let pending = group.start_broadcast(&tensor, 0)?;
            Ok((tensor, pending))
        };
        self.sent.push_back(tensors.into_iter().map(start).collect::<Result<_, Error>>()?);
        Ok(())
    }

    /// Waits until everything has arrived.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        while !self.sent.is_empty() {
            self.settle_oldest()?;
        }
        Ok(())
    }

    fn settle_oldest(&mut self) -> Result<(), Error> {
        let oldest = self.sent.pop_front().unwrap_or_default();
        oldest.into_iter().try_for_each(|(_, pending)| pending.wait())
    }
}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbox").field("under_way", &self.sent.len()).finish_non_exhaustive()
    }
}

impl Link {
    pub(crate) fn new(group: Box<dyn Communicator>) -> Self {
        Self { group, outbox: Outbox::new(UNDER_WAY) }
    }

    /// Starts sending `bundle`, or the message that there is none.
    pub(crate) fn send(&mut self, bundle: Option<&Passing>) -> Result<(), Error> {
        let tagged = bundle.map(tagged).unwrap_or_default();
        let mut head = vec![tagged.len() as i64];
        for (tag, tensor) in &tagged {
            let kind = KINDS.iter().position(|kind| *kind == tensor.kind());
            let kind = kind.expect("activations are floating point");
            head.extend([*tag, kind as i64, tensor.dim() as i64]);
            head.extend(tensor.size());
        }
        assert!(head.len() <= HEAD, "{} tensors in a bundle", tagged.len());
        head.resize(HEAD, 0);
        let mut tensors = vec![Tensor::from_slice(&head)];
        tensors.extend(tagged.into_iter().map(|(_, tensor)| self.for_group(&tensor)));
        self.outbox.send(&*self.group, tensors)
    }

    /// Waits for a bundle, or the message that there is none, and moves it to `device`.
    pub(crate) fn receive(&self, device: Device) -> Result<Option<Passing>, Error> {
        let mut head = Tensor::zeros([HEAD as i64], (Kind::Int64, Device::Cpu));
        self.group.broadcast(&mut head, 0)?;
        let head = Vec::<i64>::try_from(&head).expect("a vector of i64");
        let (mut at, mut tagged) = (1, Vec::new());
        for _ in 0..head[0] {
            let (tag, kind) = (head[at], KINDS[head[at + 1] as usize]);
            let shape = &head[at + 3..at + 3 + head[at + 2] as usize];
            at += 3 + shape.len();
            let via = if self.group.takes(device) { device } else { Device::Cpu };
            let mut tensor = Tensor::empty(shape, (kind, via));
            self.group.broadcast(&mut tensor, 0)?;
            tagged.push((tag, tensor.to_device(device)));
        }
        Ok((!tagged.is_empty()).then(|| together(tagged)))
    }

    /// Starts sending `tensors` whose shapes and types the receiver knows.
    pub(crate) fn send_known(&mut self, tensors: &[Tensor]) -> Result<(), Error> {
        let tensors = tensors.iter().map(|tensor| self.for_group(&tensor.contiguous())).collect();
        self.outbox.send(&*self.group, tensors)
    }

    /// Starts to receive a tensor into `destination`.
    pub(crate) fn start_known(&self, destination: &Tensor) -> Result<Box<dyn Pending>, Error> {
        self.group.start_broadcast(destination, 0)
    }

    /// Where a tensor for `device` is received.
    pub(crate) fn arrives_at(&self, device: Device) -> Device {
        if self.group.takes(device) { device } else { Device::Cpu }
    }

    fn for_group(&self, tensor: &Tensor) -> Tensor {
        tensor.to_device(self.arrives_at(tensor.device()))
    }
}

/// The tensors of `passing` with their tags: -1 and -2 for the first two, then 2n and 2n + 1 for
/// the keys and values of layer n.
fn tagged(passing: &Passing) -> Vec<(i64, Tensor)> {
    let mut tagged = vec![(-1, passing.x_th.contiguous())];
    tagged.extend(passing.prepared.iter().map(|prepared| (-2, prepared.contiguous())));
    let mut layers: Vec<_> = passing.shared.iter().collect();
    layers.sort_by_key(|(layer, _)| **layer);
    for (&layer, (keys, values)) in layers {
        let tag = 2 * layer as i64;
        tagged.extend([(tag, keys.contiguous()), (tag + 1, values.contiguous())]);
    }
    tagged
}

/// The inverse of [`tagged`].
fn together(tagged: Vec<(i64, Tensor)>) -> Passing {
    let mut all: HashMap<i64, Tensor> = tagged.into_iter().collect();
    let mut take = |tag| all.remove(&tag);
    let (x_th, prepared) = (take(-1).expect("every bundle has a stream"), take(-2));
    let layers: Vec<i64> = all.keys().filter(|tag| *tag % 2 == 0).copied().collect();
    let mut pair = |tag| Some((all.remove(&tag)?, all.remove(&(tag + 1))?));
    let shared = layers.into_iter().filter_map(|tag| Some((tag as usize / 2, pair(tag)?)));
    Passing { x_th, prepared, shared: shared.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_is_put_together_again() {
        let tensor = |value: f64| Tensor::full([2, 3], value, (Kind::Float, Device::Cpu));
        let shared =
            HashMap::from([(0, (tensor(1.0), tensor(2.0))), (7, (tensor(3.0), tensor(4.0)))]);
        let bundle = Passing { x_th: tensor(5.0), prepared: Some(tensor(6.0)), shared };
        let again = together(tagged(&bundle));
        assert_eq!((&again.x_th, &again.prepared), (&bundle.x_th, &bundle.prepared));
        assert_eq!(again.shared, bundle.shared);
        let bare = Passing { prepared: None, shared: HashMap::new(), ..bundle };
        let again = together(tagged(&bare));
        assert!(again.prepared.is_none() && again.shared.is_empty());
    }
}
