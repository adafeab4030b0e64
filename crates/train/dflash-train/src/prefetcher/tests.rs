//! Tests the thread and its buffers with rows and copies whose pace is controlled.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use dflash_hidden_states::Dtype;
use dflash_tensor::is_oom;
use dflash_test_support::eventually;
use dflash_torch_sys::staging::{Copying, upload_to};
use tch::{Device, Kind};

use super::*;
use crate::assembly::tests::{assembler, loaded};

/// Long enough to see that nothing else happens.
const WHILE: Duration = Duration::from_millis(100);

/// Overlapping copies, like a GPU's: each starts after a delay and fills other memory.
#[derive(Clone, Default)]
pub(crate) struct SlowCopies {
    pub(crate) delay: Duration,
    pub(crate) buffers: Arc<AtomicUsize>,
    pub(crate) shipped: Arc<AtomicUsize>,
    pub(crate) arrived: Arc<AtomicUsize>,
    /// Number of the buffer (from 1) from which allocation fails.
    pub(crate) refuses_from: Option<usize>,
}

/// Whether a copy has finished.
#[derive(Clone, Default)]
struct Done(Arc<(Mutex<bool>, Condvar)>);

impl Copying for Done {
    fn precede(&self, _: &Tensor) -> Result<(), dflash_torch_sys::Error> {
        self.wait()
    }

    fn wait(&self) -> Result<(), dflash_torch_sys::Error> {
        let (done, changed) = &*self.0;
        drop(changed.wait_while(done.lock().unwrap(), |done| !*done).unwrap());
        Ok(())
    }
}

impl Upload for SlowCopies {
    fn buffer(&self, bytes: usize) -> Result<HostBuffer, dflash_torch_sys::Error> {
        let number = self.buffers.fetch_add(1, Ordering::SeqCst) + 1;
        if self.refuses_from.is_some_and(|from| number >= from) {
            return HostBuffer::new(1 << 60);
        }
        HostBuffer::new(bytes)
    }

    fn ship(
        &self,
        buffer: HostBuffer,
        bytes: usize,
    ) -> Result<StagedCopy, dflash_torch_sys::Error> {
        self.shipped.fetch_add(1, Ordering::SeqCst);
        let copied = Tensor::zeros([bytes as i64], (Kind::Uint8, Device::Cpu));
        let (host, mut device) = (buffer.tensor(bytes), copied.shallow_clone());
        let (done, delay, arrived) = (Done::default(), self.delay, self.arrived.clone());
        let tell = done.clone();
        thread::spawn(move || {
            thread::sleep(delay);
            device.copy_(&host);
            drop((host, device));
            arrived.fetch_add(1, Ordering::SeqCst);
            *tell.0.0.lock().unwrap() = true;
            tell.0.1.notify_all();
        });
        Ok(StagedCopy::new(buffer, copied, Some(Box::new(done))))
    }
}

/// What a source does when a row is requested.
#[derive(Clone, Copy)]
enum Act {
    Row,
    /// A row without a supervised slot.
    Empty,
    Fail,
    Panic(&'static str),
    /// Blocks until closed.
    Hang,
}

struct Script {
    acts: VecDeque<Act>,
    asked: Arc<AtomicUsize>,
    closer: Arc<AtomicBool>,
}

impl RowStream for Script {
    fn next(&mut self) -> Result<Option<LoadedRow>, Error> {
        let Some(act) = self.acts.pop_front() else { return Ok(None) };
        let number = self.asked.fetch_add(1, Ordering::SeqCst);
        let mut row = loaded(number, [Dtype::F32; 3]);
        match act {
            Act::Row => {}
            Act::Empty => row.row.loss_mask.fill(false),
            Act::Fail => return Err(Error::NothingToTrain { path: format!("{number}").into() }),
            Act::Panic(text) => panic!("{text} (part of a test)"),
            Act::Hang => {
                eventually("the source is closed", || self.closer.load(Ordering::SeqCst));
                return Err(dflash_hidden_states::Error::Interrupted.into());
            }
        }
        Ok(Some(row))
    }

    fn counters(&self) -> Counters {
        Counters { bytes: self.asked.load(Ordering::SeqCst) as u64, ..Counters::default() }
    }

    fn closer(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.closer)
    }
}

/// Starts a prefetcher; also returns the number of requests to its source.
fn start(acts: &[Act], upload: Box<dyn Upload>) -> (Prefetcher, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let (acts, closer) = (acts.iter().copied().collect(), Arc::default());
    let rows = Box::new(Script { acts, asked: Arc::clone(&asked), closer });
    (Prefetcher::start(rows, assembler(Some(Dtype::F32), Some(4)), upload).unwrap(), asked)
}

fn plain() -> Box<dyn Upload> {
    upload_to(Device::Cpu).unwrap()
}

fn taken(prefetcher: &mut Prefetcher) -> TrainedRow {
    prefetcher.next().unwrap().unwrap().trained.unwrap()
}

/// A row's tensors as the computation sees them, without padding.
fn seen(row: &TrainedRow) -> Vec<Tensor> {
    let RowTensors::Written { layout, lease } = &row.tensors else { panic!("{row:?}") };
    let bytes_t = lease.tensor().unwrap();
    let parts = [&layout.features, &layout.slot_ids, layout.last.as_ref().unwrap()];
    parts.map(|part| part.of(&bytes_t).copy()).into()
}

/// What they must be.
fn expected(number: usize) -> Vec<Tensor> {
    let (assembler, loaded) =
        (assembler(Some(Dtype::F32), Some(4)), loaded(number, [Dtype::F32; 3]));
    let (blocks, layout) = assembler.plan(&loaded).unwrap();
    let mut bytes = vec![0; layout.bytes()];
    assembler.write(&loaded, &blocks, &layout, &mut bytes);
    let bytes_t = Tensor::from_slice(&bytes);
    let parts = [&layout.features, &layout.slot_ids, layout.last.as_ref().unwrap()];
    parts.map(|part| part.of(&bytes_t).copy()).into()
}

fn stays(count: &AtomicUsize, value: usize) {
    eventually("it gets so far", || count.load(Ordering::SeqCst) == value);
    thread::sleep(WHILE);
    assert_eq!(count.load(Ordering::SeqCst), value);
}

#[test]
fn rows_are_the_same_through_three_buffers_however_slow_copies_are() {
    for delay in [0, 3] {
        let slow = SlowCopies { delay: Duration::from_millis(delay), ..SlowCopies::default() };
        let uploads: [Box<dyn Upload>; 2] = [Box::new(slow.clone()), plain()];
        for upload in uploads {
            let (mut prefetcher, _) = start(&[Act::Row; 20], upload);
            for number in 0..20 {
                let row = taken(&mut prefetcher);
                assert_eq!(seen(&row), expected(number), "row {number}");
            }
            assert!(prefetcher.next().unwrap().is_none());
        }
        assert_eq!(slow.shipped.load(Ordering::SeqCst), 20);
        let buffers = slow.buffers.load(Ordering::SeqCst);
        // Rows draw different anchors, so a buffer may have to grow once more.
        assert!((BUFFERS..=3 * BUFFERS).contains(&buffers), "{buffers} buffers were made");
    }
}

#[test]
fn the_next_row_is_brought_while_one_is_computed_on_and_no_more_than_that() {
    let slow = SlowCopies { delay: Duration::from_millis(5), ..SlowCopies::default() };
    let (mut prefetcher, asked) = start(&[Act::Row; 8], Box::new(slow.clone()));
    // Before the first row is requested, it is being copied and the second is written.
    stays(&slow.shipped, 1);
    stays(&asked, 2);
    let mut row = taken(&mut prefetcher);
    for number in 0..5 {
        // While `row` is held, the next one is copied and the one after it written.
        stays(&slow.arrived, number + 2);
        stays(&asked, number + 3);
        assert_eq!(seen(&row), expected(number));
        drop(row);
        row = taken(&mut prefetcher);
    }
}

#[test]
fn a_buffer_is_not_written_while_its_row_is_held() {
    let (mut prefetcher, asked) = start(&[Act::Row; 8], plain());
    let held: Vec<TrainedRow> = (0..BUFFERS).map(|_| taken(&mut prefetcher)).collect();
    stays(&asked, BUFFERS);
    for (number, row) in held.iter().enumerate() {
        assert_eq!(seen(row), expected(number));
    }
    let [first, second, third] = held.try_into().ok().unwrap();
    drop(second);
    stays(&asked, BUFFERS + 1);
    assert_eq!((seen(&first), seen(&third)), (expected(0), expected(2)));
    // Dropping does not wait for the thread, which waits for a buffer.
    drop(prefetcher);
}

#[test]
fn a_row_without_anything_to_learn_comes_in_its_place() {
    let (mut prefetcher, _) = start(&[Act::Row, Act::Empty, Act::Empty, Act::Row], plain());
    for (number, trained) in [true, false, false, true].into_iter().enumerate() {
        let row = prefetcher.next().unwrap().unwrap();
        assert_eq!((row.tokens, row.samples, row.skipped), (24, 3, 0));
        assert_eq!(row.trained.is_some(), trained);
        if let Some(trained) = row.trained {
            assert_eq!(seen(&trained), expected(number));
        }
    }
    assert!(prefetcher.next().unwrap().is_none());
}

#[test]
fn what_the_source_meets_comes_out_in_its_place_with_what_it_had_counted() {
    let (mut prefetcher, asked) = start(&[Act::Row, Act::Row, Act::Fail, Act::Row], plain());
    assert_eq!(prefetcher.counters().bytes, 0);
    for number in 1..=2 {
        drop(taken(&mut prefetcher));
        assert_eq!(prefetcher.counters().bytes, number);
    }
    assert!(matches!(prefetcher.next(), Err(Error::NothingToTrain { path }) if path == *"2"));
    assert_eq!(prefetcher.counters().bytes, 3);
    for _ in 0..2 {
        assert!(prefetcher.next().unwrap().is_none());
    }
    assert_eq!(asked.load(Ordering::SeqCst), 3, "it goes on after the error");
}

#[test]
fn a_panic_in_the_thread_is_an_error_of_its_row() {
    let acts = |text| [Act::Row, Act::Panic(text)];
    let (mut prefetcher, _) = start(&acts("an index is out of bounds"), plain());
    drop(taken(&mut prefetcher));
    let error = prefetcher.next().unwrap_err().to_string();
    assert!(error.contains("a bug in dflash: an index is out of bounds"), "{error}");
    assert!(prefetcher.next().unwrap().is_none());
    // The allocator's message becomes an error that the step handles.
    let (mut prefetcher, _) = start(&acts("DefaultCPUAllocator: can't allocate memory"), plain());
    drop(taken(&mut prefetcher));
    let error = prefetcher.next().unwrap_err();
    assert!(matches!(&error, Error::Torch(inner) if is_oom(&inner.to_string())), "{error}");
}

#[test]
fn dropping_it_ends_a_thread_that_waits_for_a_row() {
    let (mut prefetcher, asked) = start(&[Act::Row, Act::Hang], plain());
    let held = taken(&mut prefetcher);
    eventually("the source hangs", || asked.load(Ordering::SeqCst) == 2);
    let begun = Instant::now();
    drop(prefetcher);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(seen(&held), expected(0), "a row outlives the thread");
}
