//! One sample of every source before a run begins, with what a check of the source needs beside it.
//!
//! A stream brings the layers that the draft takes. A probe brings the last layer too, where the source
//! has it, and the log-probabilities that the source itself reports, where it reports any: what can be
//! computed of the last states must agree with them. It asks once for each server, or reads one file.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::endpoint::{Endpoint, Kind};
use crate::error::Error;
use crate::fetch::{Attempts, Fetcher, Next, Request, blocking};
use crate::offline::{OfflineFiles, Stored};
use crate::own::Call;
use crate::record::HiddenStates;
use crate::retry::Failure;
use crate::stream::{StreamConfig, unless_set};
use crate::tensor_file::Wanted;
use crate::{own, vllm};

/// A log-probability that a source reports.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbability {
    /// The token's position, from 1: it follows the tokens before it. One more than the last position
    /// of the prompt is the place after it.
    pub position: usize,
    /// The token.
    pub token: i64,
    /// Nats.
    pub value: f32,
    /// The token as the source's tokenizer has it, where it says so.
    pub text: Option<String>,
}

/// What a source gives of one sample.
#[derive(Debug, Clone)]
pub struct Probe {
    /// A URL without its password, or a file.
    pub origin: String,
    /// The tokens.
    pub input_ids: Vec<i64>,
    /// The layers that were asked for, by the ids that they are taken for, and the last layer where the
    /// source has it.
    pub states: HiddenStates,
    /// Whether the source says which layers its states are of; else they are taken in ascending order.
    pub says_layers: bool,
    /// Those of tokens of the sample and of the place after it; empty where the source reports none.
    pub log_probabilities: Vec<LogProbability>,
    /// Requests that it took; 0 for a file.
    pub requests: u32,
}

/// Probes every source of a stream of `config`: the stored states of the first of `candidates` that is
/// stored, else every server with the first candidate. Empty where none of them is stored and no server
/// may be asked.
///
/// # Errors
/// As [`crate::Stream::start`], and what a server or a file has of the sample is unusable.
pub fn probe(config: StreamConfig, candidates: &[Request]) -> Result<Vec<Probe>, Error> {
    let fetcher = Fetcher::new(config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Error::Runtime)?;
    let stop: Arc<AtomicBool> = Arc::clone(&fetcher.config.stop);
    let probed = runtime.block_on(unless_set(&[&*stop], fetcher.probe(candidates)));
    // What still runs is a read of a file.
    runtime.shutdown_timeout(Duration::from_millis(200));
    probed.unwrap_or(Err(Error::Interrupted))
}

impl Fetcher {
    async fn probe(&self, candidates: &[Request]) -> Result<Vec<Probe>, Error> {
        self.preflight().await?;
        if let Some(probe) = self.stored_probe(candidates).await? {
            return Ok(vec![probe]);
        }
        let mut probes = Vec::new();
        let Some(request) = candidates.first() else { return Ok(probes) };
        for endpoint in self.endpoints() {
            // Who was not there at the start is checked by its name and its replies, when it comes.
            if endpoint.is_asked().await {
                probes.push(self.probe_server(endpoint, request).await?);
            }
        }
        Ok(probes)
    }

    /// The layers of the stream, and the last one.
    fn with_last(&self) -> Vec<u32> {
        let config = &self.config;
        let last = config.num_hidden_layers.filter(|last| !config.layer_ids.contains(last));
        config.layer_ids.iter().copied().chain(last).collect()
    }

    async fn stored_probe(&self, candidates: &[Request]) -> Result<Option<Probe>, Error> {
        let Some(files) = self.files().cloned() else { return Ok(None) };
        let hidden_size = self.config.hidden_size;
        let layers = [self.with_last(), self.config.layer_ids.clone()];
        let candidates = candidates.to_vec();
        blocking(move || {
            for request in &candidates {
                let read = |layer_ids: &[u32]| {
                    let tokens = request.input_ids.len();
                    files.read(request, Wanted { layer_ids, hidden_size, tokens })
                };
                let found = match read(&layers[0]) {
                    Err(Error::Shape { .. }) => read(&layers[1]),
                    found => found,
                };
                // What is unusable or of other tokens is left to the stream, which counts it.
                if let Ok(Stored::Found(states)) = found {
                    return Ok(Some(stored(&files, request, states)?));
                }
            }
            Ok(None)
        })
        .await
    }

    async fn probe_server(&self, endpoint: &Endpoint, request: &Request) -> Result<Probe, Error> {
        let mut attempts = Attempts::from(Instant::now());
        loop {
            attempts.count();
            let failure = match self.probe_once(endpoint, request).await {
                Ok(probe) => return Ok(probe),
                Err(failure) => failure,
            };
            match self.judge(failure, endpoint, &mut attempts, request.sample)? {
                Next::LeaveOut(reason) => return Err(reason),
                Next::AskAgain(pause) | Next::AskTheSame(pause) => sleep(pause).await,
            }
        }
    }

    async fn probe_once(&self, endpoint: &Endpoint, request: &Request) -> Result<Probe, Failure> {
        let after = self.config.retry.request_timeout.min(self.config.retry.deadline);
        let with_last = StreamConfig { layer_ids: self.with_last(), ..self.config.clone() };
        let exchange = async {
            let kind = endpoint.probe(self.client(), &self.config).await?;
            let call = |config| Call { client: self.client(), endpoint, config, request };
            match &*kind {
                Kind::Own { model, metadata } => {
                    let states = own::fetch(&call(&with_last), model, metadata).await?;
                    Ok(self.probed(endpoint, request, (states, true), (Vec::new(), 1)))
                }
                Kind::Vllm { model, max_model_len } => {
                    let call = call(&self.config);
                    let (states, reported, requests) =
                        vllm::probe(&call, model, *max_model_len).await?;
                    Ok(self.probed(endpoint, request, (states, false), (reported, requests)))
                }
            }
        };
        timeout(after, exchange).await.unwrap_or_else(|_| {
            Err(Failure::Transient(Error::Timeout { url: endpoint.url(""), after }))
        })
    }

    fn probed(
        &self,
        endpoint: &Endpoint,
        request: &Request,
        (states, says_layers): (HiddenStates, bool),
        (log_probabilities, requests): (Vec<LogProbability>, u32),
    ) -> Probe {
        let (origin, input_ids) = (endpoint.url(""), request.input_ids.clone());
        Probe { origin, input_ids, states, says_layers, log_probabilities, requests }
    }
}

fn stored(files: &OfflineFiles, request: &Request, states: HiddenStates) -> Result<Probe, Error> {
    Ok(Probe {
        origin: files.path(request.sample).display().to_string(),
        input_ids: request.input_ids.clone(),
        states,
        says_layers: files.says_layers(request.sample)?,
        log_probabilities: Vec::new(),
        requests: 0,
    })
}
