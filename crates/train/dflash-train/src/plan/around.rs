//! What a run takes in addition to its trainers: GPUs for the target, the transfer of hidden
//! states, and the all-reduce of gradients.

use serde::Serialize;

use crate::gpus::{Family, Gpu};

/// Copy rate of one assembly thread, bytes/s: pieces of 8 KiB (a token's state in one layer), from
/// a body in memory to a row's buffer; 6.5 GB/s on one core of a Xeon (LOG.md).
const ASSEMBLY: f64 = 6.5e9;
/// PCIe 4.0 x16 in one direction, bytes/s: 31.5 GB/s less packet overhead.
const PCIE: f64 = 25e9;
/// A machine's 400 Gbit/s network link in one direction, bytes/s.
const NETWORK: f64 = 50e9;

impl Family {
    /// NVLink in one direction, bytes/s (NVIDIA's data sheets).
    fn nvlink(self) -> f64 {
        match self {
            Self::Ampere => 300e9,
            // consumer and workstation models have no NVLink
            Self::Ada => PCIE,
            Self::Hopper => 450e9,
            Self::Blackwell => 900e9,
        }
    }
}

/// GPUs of the trainers' model that run the target.
#[derive(Clone, Debug, Serialize)]
pub struct Servers {
    /// The target's arithmetic per row, up to the highest auxiliary layer, TFLOP.
    pub row_tflop: f64,
    /// Seconds per row on one GPU, at the optimistic and the sustained efficiency.
    pub row_seconds: [f64; 2],
    /// GPUs per trainer, likewise.
    pub per_trainer: [f64; 2],
    /// GPUs for all trainers, rounded up.
    pub gpus: [usize; 2],
}

impl Servers {
    /// For `ranks` trainers that take `step_seconds` per row.
    pub(super) fn new(
        row_tflop: f64,
        row_seconds: [f64; 2],
        step_seconds: [f64; 2],
        ranks: usize,
    ) -> Self {
        let per_trainer = [0, 1].map(|at| row_seconds[at] / step_seconds[at]);
        let gpus = per_trainer.map(|each| (each * ranks as f64).ceil() as usize);
        Self { row_tflop, row_seconds, per_trainer, gpus }
    }
}

/// Load of a rank's stream of hidden states on the machine and its network.
#[derive(Clone, Debug, Serialize)]
pub struct Stream {
    /// Bytes per second received by a rank.
    pub bytes_per_second: f64,
    /// Share of the copy rate of the rank's one assembly thread.
    pub assembly_share: f64,
    /// Gbit/s of network traffic if the servers are on other machines.
    pub gbit_per_second: f64,
}

impl Stream {
    pub(super) fn new(bytes_per_second: f64) -> Self {
        Self {
            bytes_per_second,
            assembly_share: bytes_per_second / ASSEMBLY,
            gbit_per_second: bytes_per_second * 8.0 / 1e9,
        }
    }
}

/// The all-reduce of a step's gradients.
#[derive(Clone, Debug, Serialize)]
pub struct AllReduce {
    /// Bytes that a rank sends, and receives, in a float32 ring all-reduce.
    pub bytes: f64,
    /// Milliseconds over NVLink, if the GPUs have it.
    pub nvlink_ms: f64,
    /// Milliseconds over PCIe 4.0 x16.
    pub pcie_ms: f64,
    /// Milliseconds between machines at 400 Gbit/s each; `None` on one machine.
    pub network_ms: Option<f64>,
}

impl AllReduce {
    /// For `parameters` float32 gradients; `None` with a single rank.
    pub(super) fn new(parameters: i64, ranks: usize, machines: usize, gpu: &Gpu) -> Option<Self> {
        // A ring passes all but one part around twice: to sum them, and to distribute the sums.
        let in_ring = |members: usize| 2.0 * (members as f64 - 1.0) / members as f64;
        let gradients = parameters as f64 * 4.0;
        let bytes = gradients * in_ring(ranks);
        (ranks > 1).then(|| Self {
            bytes,
            nvlink_ms: bytes / gpu.family.nvlink() * 1e3,
            pcie_ms: bytes / PCIE * 1e3,
            network_ms: (machines > 1).then(|| gradients * in_ring(machines) / NETWORK * 1e3),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_by_hand() {
        let gpu = Gpu::named("h100").unwrap();
        assert!(AllReduce::new(1_000_000_000, 1, 1, &gpu).is_none());
        let one = AllReduce::new(1_000_000_000, 4, 1, &gpu).unwrap();
        // 4 GB, of which three quarters go around twice.
        assert_eq!((one.bytes, one.network_ms), (6e9, None));
        assert!((one.nvlink_ms - 6.0 / 450.0 * 1e3).abs() < 1e-9);
        assert_eq!(one.pcie_ms, 240.0);
        let two = AllReduce::new(1_000_000_000, 16, 2, &gpu).unwrap();
        // With two machines, each sends half twice.
        assert_eq!(two.network_ms, Some(80.0));
    }

    #[test]
    fn servers_keep_pace_with_their_trainers() {
        let servers = Servers::new(126.0, [0.2, 0.25], [0.16, 0.2], 3);
        assert_eq!(servers.per_trainer, [1.25, 1.25]);
        assert_eq!(servers.gpus, [4, 4]);
    }
}
