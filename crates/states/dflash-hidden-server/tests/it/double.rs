//! A test double of the model, with known rows and waits on demand, and a server.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dflash_hidden_server::{
    Error, Features, Featurizer, Loader, ModelFacts, PackedPrompts, Ready, serve,
};
use dflash_hidden_states::{Dtype, HiddenStates, Metadata};
use dflash_settings::{Device, Dtype as ComputeDtype, HiddenServerSettings};
use dflash_test_support::eventually;
use reqwest::Response;
use serde_json::{Value, json};

pub(crate) const HIDDEN: usize = 4;
pub(crate) const LAYERS: [u32; 3] = [0, 2, 5];

pub(crate) fn facts() -> ModelFacts {
    ModelFacts {
        name: "double".into(),
        root: "/models/double".into(),
        max_model_len: 64,
        device: "paper".into(),
        metadata: Metadata {
            hidden_size: HIDDEN,
            num_hidden_layers: 8,
            vocab_size: 100,
            layer_ids: LAYERS.to_vec(),
            dtype: Dtype::Bf16,
            target: None,
        },
    }
}

/// libtorch's out-of-memory messages.
const CPU_SAYS: &str = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't \
                        allocate memory: you tried to allocate 9 bytes. Error code 12";
const CUDA_SAYS: &str = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total \
                         capacity of 79.18 GiB of which 9.19 MiB is free.";

/// Observes and controls the model's work.
#[derive(Default)]
pub(crate) struct Desk {
    door: Door,
    /// Whether rows arrive after the batch, as from a GPU, and where they wait.
    pub(crate) rows_come_later: AtomicBool,
    pub(crate) rows_door: Door,
    /// Batches whose rows are pending.
    pub(crate) under_way: AtomicUsize,
    /// Such batches with more tokens run out of memory next to another; 0 for no limit.
    pub(crate) fits_beside: AtomicUsize,
    /// Batches with more tokens panic like libtorch out of memory; 0 for no limit.
    pub(crate) fits: AtomicUsize,
    /// Whether the message is that of libtorch's GPU allocator.
    pub(crate) on_gpu: AtomicBool,
    /// Prompt lengths of every batch begun.
    pub(crate) batches: Mutex<Vec<Vec<i64>>>,
    /// Layers requested with every batch.
    pub(crate) layers: Mutex<Vec<Vec<u32>>>,
}

/// A door to wait at.
#[derive(Default)]
pub(crate) struct Door {
    closed: Mutex<bool>,
    opened: Condvar,
}

impl Door {
    pub(crate) fn close(&self) {
        *self.closed.lock().unwrap() = true;
    }

    pub(crate) fn open(&self) {
        *self.closed.lock().unwrap() = false;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let closed = self.closed.lock().unwrap();
        drop(self.opened.wait_while(closed, |closed| *closed).unwrap());
    }
}

impl Desk {
    /// Makes batches wait from now on.
    pub(crate) fn close(&self) {
        self.door.close();
    }

    pub(crate) fn open(&self) {
        self.door.open();
    }

    fn pass(&self) {
        self.door.pass();
    }

    pub(crate) fn batches(&self) -> Vec<Vec<i64>> {
        self.batches.lock().unwrap().clone()
    }

    /// Waits until a batch has begun.
    pub(crate) fn await_batch(&self) {
        eventually("a batch has begun", || !self.batches.lock().unwrap().is_empty());
    }
}

/// The model.
pub(crate) struct Double {
    pub(crate) facts: ModelFacts,
    pub(crate) desk: Arc<Desk>,
}

/// The value at one position: identifies layer, token, position and column, and is exact in bf16.
fn value(layer: u32, token: i64, position: usize, column: usize) -> f32 {
    1.0 + layer as f32 * 16.0 + (token as usize * 3 + position * 5 + column) as f32 % 16.0
}

/// The upper half of a float32 is its bf16, exact for small integers.
fn bf16_bytes(value: f32) -> [u8; 2] {
    let [_, _, low, high] = value.to_le_bytes();
    [low, high]
}

/// The expected answer for a prompt.
pub(crate) fn expected(input_ids: &[i64], layer_ids: &[u32]) -> HiddenStates {
    let layer = |&layer: &u32| -> Bytes {
        let row = |(position, &token): (usize, &i64)| {
            (0..HIDDEN).flat_map(move |column| bf16_bytes(value(layer, token, position, column)))
        };
        input_ids.iter().enumerate().flat_map(row).collect::<Vec<u8>>().into()
    };
    let layers = layer_ids.iter().map(layer).collect();
    HiddenStates::new(layer_ids.to_vec(), input_ids.len(), HIDDEN, Dtype::Bf16, layers).unwrap()
}

impl Featurizer for Double {
    fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    /// Fails on batches of several prompts with token 99, and on single prompts with token 98.
    fn features(&mut self, prompts: &PackedPrompts, ids: &[u32]) -> Result<Features, Error> {
        let PackedPrompts { input_ids, document_starts } = prompts;
        let lengths = document_starts.windows(2).map(|ends| ends[1] - ends[0]).collect();
        self.desk.batches.lock().unwrap().push(lengths);
        self.desk.layers.lock().unwrap().push(ids.to_vec());
        self.desk.pass();
        let tokens = input_ids.len();
        let fits = self.desk.fits.load(Ordering::SeqCst);
        let beside = self.desk.fits_beside.load(Ordering::SeqCst);
        let shares = self.desk.under_way.load(Ordering::SeqCst) > 0;
        if (fits > 0 && tokens > fits) || (shares && beside > 0 && tokens > beside) {
            let said = if self.desk.on_gpu.load(Ordering::SeqCst) { CUDA_SAYS } else { CPU_SAYS };
            panic!(
                "called `Result::unwrap()` on an `Err` value: Torch(\"{said}\\nframe #0\") (part of a \
                 test)"
            );
        }
        let several = document_starts.len() > 2;
        if input_ids.contains(&98) || several && input_ids.contains(&99) {
            return Err(Error::Batch { tokens, reason: "a made-up fault".into() });
        }
        let documents =
            || document_starts.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
        let rows = |range: std::ops::Range<usize>| {
            let rows = expected(&input_ids[range], ids);
            ids.iter().map(|&id| rows.layer(id).unwrap().to_vec().into()).collect()
        };
        let rows = documents().map(rows).collect();
        if !self.desk.rows_come_later.load(Ordering::SeqCst) {
            return Ok(Features::Here(rows));
        }
        let desk = Arc::clone(&self.desk);
        desk.under_way.fetch_add(1, Ordering::SeqCst);
        Ok(Features::Coming(Box::new(move || {
            desk.rows_door.pass();
            desk.under_way.fetch_sub(1, Ordering::SeqCst);
            Ok(rows)
        })))
    }
}

/// A running server; stopped when dropped.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) desk: Arc<Desk>,
    pub(crate) stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), Error>>>,
    client: reqwest::Client,
}

pub(crate) fn config() -> HiddenServerSettings {
    HiddenServerSettings {
        target: "double".into(),
        target_layer_ids: None,
        host: "127.0.0.1".into(),
        port: 0,
        port_file: None,
        device: Device::Cpu,
        dtype: ComputeDtype::Auto,
        processor: dflash_settings::ProcessorSettings::default(),
        wire_dtype: Dtype::Bf16,
        max_queue: 16,
        // Requests beyond the queue are refused at once, except in tests about waiting.
        max_wait: 0.0,
        client_timeout: 30.0,
        max_batch_tokens: 100,
        max_model_len: None,
        threads: Some(1),
        parallel: dflash_settings::ParallelSettings::default(),
    }
}

impl Running {
    pub(crate) fn start(config: HiddenServerSettings) -> Self {
        let desk = Arc::new(Desk::default());
        let double = Double { facts: facts(), desk: Arc::clone(&desk) };
        let mut running = Self::load(config, Box::new(move || Ok(Box::new(double))));
        running.desk = desk;
        running
    }

    pub(crate) fn load(config: HiddenServerSettings, load: Loader) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let flag = Arc::clone(&stop);
        let run = move || {
            serve(&config, load, &flag, |ready: &Ready| sender.send(ready.address).unwrap())
        };
        let thread = Some(thread::spawn(run));
        let address = receiver.recv_timeout(Duration::from_secs(60)).expect("it becomes ready");
        // One client per server, so that no connection outlives it.
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
        Self { address, desk: Arc::default(), stop, thread, client }
    }

    /// Stops the server; returns its result and the time that took.
    pub(crate) fn end(mut self) -> (Result<(), Error>, Duration) {
        let began = Instant::now();
        self.stop.store(true, Ordering::SeqCst);
        let outcome = self.thread.take().unwrap().join().unwrap();
        (outcome, began.elapsed())
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.client.get(self.url(path)).send().await.unwrap()
    }

    pub(crate) async fn post(&self, body: impl Into<reqwest::Body>) -> Response {
        self.client.post(self.url("/v1/hidden_states")).body(body).send().await.unwrap()
    }

    pub(crate) async fn prompt(&self, input_ids: &[i64]) -> Response {
        self.post(json!({ "input_ids": input_ids }).to_string()).await
    }

    pub(crate) async fn health(&self) -> Value {
        serde_json::from_slice(&self.get("/health").await.bytes().await.unwrap()).unwrap()
    }

    /// Waits until a counter of `/health` has a value.
    pub(crate) async fn until(&self, key: &str, value: u64) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.health().await[key] != value {
            assert!(Instant::now() < deadline, "{key} is not {value}: {}", self.health().await);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.desk.open();
        self.desk.rows_door.open();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub(crate) async fn states(response: Response) -> HiddenStates {
    assert_eq!(response.status(), 200);
    let length = response.content_length();
    let body = response.bytes().await.unwrap();
    assert_eq!(length, Some(body.len() as u64), "the length is announced");
    dflash_hidden_states::decode_stream(body, "the server").unwrap()
}

/// Status, and the `error` object of the body.
pub(crate) async fn refusal(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let body = response.bytes().await.unwrap();
    let body: Value = serde_json::from_slice(&body)
        .unwrap_or_else(|_| panic!("{status}: {}", String::from_utf8_lossy(&body)));
    (status, body["error"].clone())
}
