//! Gloo collectives on tensors; each returns a work handle to wait for.

use std::net::IpAddr;
use std::ptr::NonNull;
use std::time::Duration;

use tch::Tensor;

use crate::ffi::{self, Failure, RawGroup, RawTensor, RawWork, Text};
use crate::{Error, Store};

/// Where a process listens for its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bind {
    /// A network interface by name, such as `eth0`.
    Interface(String),
    /// An address of this machine.
    Address(IpAddr),
}

/// One process's membership in a group.
#[derive(Debug, Clone)]
pub struct GlooConfig {
    /// This process's rank, 0-based.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Where this process listens; the peers must be able to reach it.
    pub bind: Bind,
    /// Timeout of connecting and of each collective.
    pub timeout: Duration,
}

/// How all-reduce combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their maximum.
    Max,
}

/// A gloo process group for contiguous CPU tensors.
///
/// All processes must start the same collectives in the same order. Dropping the group waits for
/// running work, after a failure possibly until the timeout; use [`ProcessGroup::abandon`] then.
#[derive(Debug)]
pub struct ProcessGroup {
    raw: NonNull<RawGroup>,
}

// SAFETY: the C++ object is not tied to a thread. It is not Sync, because the order in which
// collectives start matters.
unsafe impl Send for ProcessGroup {}

impl ProcessGroup {
    /// Connects to all peers, which must call this with the same store and prefix.
    ///
    /// # Errors
    /// [`Error::Torch`] if a peer is not reached in time or the interface is unknown.
    pub fn gloo(store: &Store, config: &GlooConfig) -> Result<Self, Error> {
        let (bind, is_interface) = match &config.bind {
            Bind::Interface(name) => (name.clone(), true),
            Bind::Address(address) => (address.to_string(), false),
        };
        let (rank, size) = (to_i32(config.rank), to_i32(config.size));
        let (text, limit) = (Text::new(&bind), ffi::milliseconds(config.timeout));
        let mut raw = std::ptr::null_mut();
        // SAFETY: live store; `bind` outlives the call; the out pointer is a local.
        ffi::checked("connect to the peers", unsafe {
            let store = store.pointer();
            ffi::dflash_group_gloo(store, rank, size, text, is_interface, limit, &mut raw)
        })?;
        Ok(Self { raw: NonNull::new(raw).expect("the shim succeeds with an object") })
    }

    /// Reduces `tensor` over all ranks, in place on every rank. Types: f32, f64, bf16, f16, i64.
    ///
    /// # Errors
    /// [`Error::Torch`], as for all collectives, if types or sizes differ or a peer is gone.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work, Error> {
        let maximum = op == ReduceOp::Max;
        // SAFETY (here and below): live group and tensors; the work holds references to the
        // tensors, so they may be dropped while it runs.
        start("all-reduce", |work| unsafe {
            ffi::dflash_group_all_reduce(self.pointer(), raw(tensor), maximum, work)
        })
    }

    /// Overwrites `tensor` on all ranks with that of `root`.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work, Error> {
        start("broadcast", |work| unsafe {
            ffi::dflash_group_broadcast(self.pointer(), raw(tensor), to_i32(root), work)
        })
    }

    /// Concatenates the `input`s of all ranks in `output`, which has `size` times as many elements.
    pub fn all_gather(&self, output: &Tensor, input: &Tensor) -> Result<Work, Error> {
        start("all-gather", |work| unsafe {
            ffi::dflash_group_all_gather(self.pointer(), raw(output), raw(input), work)
        })
    }

    /// Sums the `input`s over all ranks and writes this rank's part, the rank-th of `size` equal
    /// parts, to `output`.
    pub fn reduce_scatter(&self, output: &Tensor, input: &Tensor) -> Result<Work, Error> {
        start("reduce-scatter", |work| unsafe {
            ffi::dflash_group_reduce_scatter(self.pointer(), raw(output), raw(input), work)
        })
    }

    /// Completes when all ranks have started it.
    pub fn barrier(&self) -> Result<Work, Error> {
        start("barrier", |work| unsafe { ffi::dflash_group_barrier(self.pointer(), work) })
    }

    /// Leaves the group without waiting for running work. Its threads end with the process.
    pub fn abandon(self) {
        std::mem::forget(self);
    }

    fn pointer(&self) -> *const RawGroup {
        self.raw.as_ptr()
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { ffi::dflash_group_free(self.raw.as_ptr()) }
    }
}

/// A started collective. Its tensors must not be accessed before [`Work::wait`] has succeeded.
#[derive(Debug)]
pub struct Work {
    raw: NonNull<RawWork>,
    operation: &'static str,
}

// SAFETY: c10d's work guards its state with a mutex and has an atomic reference count.
unsafe impl Send for Work {}

impl Work {
    /// Waits until the collective completes, at most `timeout`.
    ///
    /// # Errors
    /// [`Error::StillRunning`] after the timeout; the work continues and may be waited for again.
    /// [`Error::Torch`] if it failed, for instance because a peer died.
    pub fn wait(&self, timeout: Duration) -> Result<(), Error> {
        let (limit, mut pending) = (ffi::milliseconds(timeout), false);
        // SAFETY: live work; the out pointer is a local.
        let failure = unsafe { ffi::dflash_work_wait(self.raw.as_ptr(), limit, &mut pending) };
        ffi::checked(self.operation, failure)?;
        if pending {
            return Err(Error::StillRunning { operation: self.operation, after: timeout });
        }
        Ok(())
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: owned, freed once; a running collective holds its own reference.
        unsafe { ffi::dflash_work_free(self.raw.as_ptr()) }
    }
}

fn start(
    operation: &'static str,
    call: impl FnOnce(*mut *mut RawWork) -> Failure,
) -> Result<Work, Error> {
    let mut raw = std::ptr::null_mut();
    ffi::checked(operation, call(&mut raw))?;
    let raw = NonNull::new(raw).expect("the shim succeeds with an object");
    Ok(Work { raw, operation })
}

/// tch's handle points to an `at::Tensor`, as the shim expects.
fn raw(tensor: &Tensor) -> *mut RawTensor {
    tensor.as_ptr().cast_mut().cast()
}

fn to_i32(number: usize) -> i32 {
    i32::try_from(number).expect("ranks fit in 31 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn config(rank: usize, size: usize) -> GlooConfig {
        let bind = Bind::Address(IpAddr::from([127, 0, 0, 1]));
        GlooConfig { rank, size, bind, timeout: LIMIT }
    }

    /// Two ranks on two threads of this process. Each needs a connection, since waits block it.
    fn pair() -> [ProcessGroup; 2] {
        let server = Store::serve(([127, 0, 0, 1], 0), LIMIT).unwrap();
        let client = Store::connect("127.0.0.1", server.port(), LIMIT).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| ProcessGroup::gloo(&client, &config(1, 2)).unwrap());
            [ProcessGroup::gloo(&server, &config(0, 2)).unwrap(), second.join().unwrap()]
        })
    }

    #[test]
    fn all_reduce_sums_in_place() {
        let [first, second] = pair();
        let tensors = [Tensor::from_slice(&[1f32, 2.0]), Tensor::from_slice(&[10f32, 20.0])];
        let works = [
            first.all_reduce(&tensors[0], ReduceOp::Sum).unwrap(),
            second.all_reduce(&tensors[1], ReduceOp::Sum).unwrap(),
        ];
        for (work, tensor) in works.iter().zip(&tensors) {
            work.wait(LIMIT).unwrap();
            assert_eq!(Vec::<f32>::try_from(tensor).unwrap(), [11.0, 22.0]);
        }
    }

    #[test]
    fn a_lone_work_is_still_running_and_ends_when_the_peer_joins() {
        let [first, second] = pair();
        let work = first.barrier().unwrap();
        let error = work.wait(Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, Error::StillRunning { operation: "barrier", .. }), "{error}");
        second.barrier().unwrap().wait(LIMIT).unwrap();
        work.wait(LIMIT).unwrap();
    }

    #[test]
    fn sizes_that_do_not_fit_are_an_error_not_an_abort() {
        let store = Store::serve(([127, 0, 0, 1], 0), LIMIT).unwrap();
        let group = ProcessGroup::gloo(&store, &config(0, 1)).unwrap();
        let (small, large) = (Tensor::from_slice(&[1f32]), Tensor::from_slice(&[1f32, 2.0]));
        let outcome = group.all_gather(&small, &large).and_then(|work| work.wait(LIMIT));
        assert!(matches!(outcome, Err(Error::Torch { operation: "all-gather", .. })));
    }

    #[test]
    fn an_unknown_interface_is_an_error() {
        let store = Store::serve(([127, 0, 0, 1], 0), LIMIT).unwrap();
        let bind = Bind::Interface("no-such-interface".to_owned());
        let config = GlooConfig { bind, ..config(0, 1) };
        let error = ProcessGroup::gloo(&store, &config).unwrap_err().to_string();
        assert!(error.contains("connect to the peers"), "{error}");
    }
}
