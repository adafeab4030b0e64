//! Starts a server with its models, and sends requests.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dflash_decode::{DraftSource, Models, ModelsConfig};
use dflash_serve::{Error, Loader, Ready, serve};
use dflash_settings::{Device, Dtype, ServeSettings, Speculate};
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};

use crate::models::save_models;

pub(crate) fn settings() -> ServeSettings {
    ServeSettings {
        target: "target".into(),
        draft: Some("draft".into()),
        speculate: Speculate::Tokens(1024),
        served_model_name: Some("tiny".into()),
        host: "127.0.0.1".into(),
        port: 0,
        port_file: None,
        api_key: None,
        allowed_origins: vec![],
        device: Device::Cpu,
        dtype: Dtype::Float32,
        processor: dflash_settings::ProcessorSettings::default(),
        max_model_len: None,
        max_num_seqs: 4,
        max_prefill_tokens: 64,
        prefix_cache_mib: 16,
        chat_template_kwargs: None,
        allow_other_target: false,
        max_queue: 64,
        max_wait: 30.0,
        client_timeout: 30.0,
        drain_timeout: 20.0,
        max_body_mib: 1,
        threads: None,
    }
}

/// A running server; stopped when dropped.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), Error>>>,
    client: reqwest::Client,
    _dir: tempfile::TempDir,
}

impl Running {
    pub(crate) fn start(settings: ServeSettings) -> Self {
        Self::start_with(settings, |_| {})
    }

    /// The same after `change` in the target's directory.
    pub(crate) fn start_with(settings: ServeSettings, change: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        save_models(dir.path());
        change(&dir.path().join("target"));
        let config = ModelsConfig {
            target_dir: dir.path().join("target"),
            target_name: "target".into(),
            draft: settings.draft.as_ref().map_or(DraftSource::None, |name| DraftSource::Trained {
                name: name.clone(),
                dir: dir.path().join("draft"),
            }),
            allow_other_target: true,
            device: settings.device,
            dtype: settings.dtype,
            threads: None,
            template_variables: settings.chat_template_kwargs.clone(),
        };
        let load: Loader = Box::new(move || {
            let root = config.target_dir.clone();
            Ok((Models::load(config)?, root))
        });
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let flag = Arc::clone(&stop);
        let run = move || {
            serve(&settings, load, &flag, |ready: &Ready| sender.send(ready.address).unwrap())
        };
        let thread = Some(thread::spawn(run));
        let address = receiver.recv_timeout(Duration::from_secs(120)).expect("it becomes ready");
        // One client per server, so that no connection outlives it.
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
        Self { address, stop, thread, client, _dir: dir }
    }

    /// Stops the server; returns its result and the time that took.
    pub(crate) fn end(mut self) -> (Result<(), Error>, Duration) {
        let began = Instant::now();
        self.stop.store(true, Ordering::SeqCst);
        let outcome = self.thread.take().unwrap().join().unwrap();
        (outcome, began.elapsed())
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(self.url(path))
    }

    pub(crate) fn request(&self, method: reqwest::Method, path: &str) -> RequestBuilder {
        self.client.request(method, self.url(path))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        let request = self.client.post(self.url(path)).header("content-type", "application/json");
        request.body(body.to_string())
    }

    /// A chat completion of a user's `text`, with additional fields.
    pub(crate) async fn chat(&self, text: &str, more: Value) -> Value {
        ok(self.post("/v1/chat/completions", &chat_body(text, more)).send().await.unwrap()).await
    }

    pub(crate) async fn complete(&self, prompt: Value, more: Value) -> Value {
        let mut more = seeded(more);
        more["prompt"] = prompt;
        ok(self.post("/v1/completions", &more).send().await.unwrap()).await
    }

    /// The events of a streamed reply, without `[DONE]`.
    pub(crate) async fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let response = self.post(path, &body).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let text = String::from_utf8(response.bytes().await.unwrap().to_vec()).unwrap();
        let mut events: Vec<&str> = text
            .split_terminator("\n\n")
            .map(|line| line.strip_prefix("data: ").unwrap())
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{text}");
        events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// The value of a metric, summed over its labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").send().await.unwrap().bytes().await.unwrap();
        let page = String::from_utf8(page.to_vec()).unwrap();
        let line = page.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name} is not in {page}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until a metric satisfies `is_wanted`.
    pub(crate) async fn until(&self, name: &str, is_wanted: impl Fn(f64) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let found = self.metric(name).await;
            if is_wanted(found) {
                return;
            }
            assert!(Instant::now() < deadline, "{name} is {found}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub(crate) fn chat_body(text: &str, more: Value) -> Value {
    let mut more = seeded(more);
    more["messages"] = json!([{"role": "user", "content": text}]);
    more
}

/// Adds a seed unless the test sets one: otherwise an answer may end at once by chance.
fn seeded(mut more: Value) -> Value {
    if more.get("seed").is_none() {
        more["seed"] = 1.into();
    }
    more
}

pub(crate) async fn ok(response: Response) -> Value {
    let status = response.status();
    let body = response.bytes().await.unwrap();
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
    serde_json::from_slice(&body).unwrap()
}

/// Status, and the `error` object of the body.
pub(crate) async fn refusal(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    (status, body["error"].clone())
}
