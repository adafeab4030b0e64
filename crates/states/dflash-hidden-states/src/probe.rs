//! Probes every source with one sample before a run begins.
//!
//! A stream delivers the layers that the draft uses. A probe also delivers the last layer, if the
//! source has it, and the log-probabilities that the source reports, if any: log-probabilities
//! computed from the last states must agree with them. It sends one request per server, or reads
//! one file.

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
    /// The token's position, from 1: it follows the tokens before it. The position after the prompt
    /// is one more than its length.
    pub position: usize,
    /// The token.
    pub token: i64,
    /// Nats.
    pub value: f32,
    /// The token as the source's tokenizer spells it, if it says so.
    pub text: Option<String>,
}

/// A source's data for one sample.
#[derive(Debug, Clone)]
pub struct Probe {
    /// A URL without its password, or a file.
    pub origin: String,
    /// The tokens.
    pub input_ids: Vec<i64>,
    /// The requested layers, under the ids that they are assumed to have, and the last layer if the
    /// source has it.
    pub states: HiddenStates,
    /// Whether the source says which layers its states are of; otherwise ascending order is
    /// assumed.
    pub says_layers: bool,
    /// Those of the sample's tokens and of the position after it; empty if the source reports none.
    pub log_probabilities: Vec<LogProbability>,
    /// Number of requests; 0 for a file.
    pub requests: u32,
}

/// Probes every source of a stream of `config`: the stored states of the first of `candidates` that
/// is stored, or every server with the first candidate. Empty if none of them is stored and no
/// server may be used.
///
/// # Errors
/// As [`crate::Stream::start`]; unusable data from a server or a file.
pub fn probe(config: StreamConfig, candidates: &[Request]) -> Result<Vec<Probe>, Error> {
    let fetcher = Fetcher::new(config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Error::Runtime)?;
    let stop: Arc<AtomicBool> = Arc::clone(&fetcher.config.stop);
    let probed = runtime.block_on(unless_set(&[&*stop], fetcher.probe(candidates)));
    // The only task that may still run is a file read.
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
            // A server that was absent at the start is checked by its name and its replies when it
            // appears.
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
                // Unusable files and files with other tokens are left to the stream, which counts
                // them.
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
                    Ok(self.probed(endpoint, request, states, true, Vec::new(), 1))
                }
                Kind::Vllm { model, max_model_len } => {
                    let call = call(&self.config);
                    let (states, reported, requests) =
                        vllm::probe(&call, model, *max_model_len).await?;
                    Ok(self.probed(endpoint, request, states, false, reported, requests))
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
        states: HiddenStates,
        says_layers: bool,
        log_probabilities: Vec<LogProbability>,
        requests: u32,
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
