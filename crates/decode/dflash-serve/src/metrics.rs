//! Metrics since the start, with vLLM's names where it has one, so that its dashboards work.

use std::time::Duration;

use dflash_decode::Block;
use prometheus::{
    Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
};

/// vLLM's buckets, in seconds.
const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const LATENCY: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const PER_TOKEN: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];

/// The page's content type.
pub(crate) const TEXT_FORMAT: &str = prometheus::TEXT_FORMAT;

/// All counters of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    resting: Gauge,
    cache_bytes: Gauge,
    kept_bytes: Gauge,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    cut: IntCounter,
    refused: IntCounterVec,
    ended: IntCounterVec,
    first_token: Histogram,
    latency: Histogram,
    queue_time: Histogram,
    inference_time: Histogram,
    per_token: Histogram,
    drafting: Option<Drafting>,
}

/// Metrics of a server with a draft.
#[derive(Debug)]
struct Drafting {
    drafts: IntCounter,
    draft_tokens: IntCounter,
    accepted: IntCounter,
    /// By position, starting at 0.
    accepted_at: Vec<IntCounter>,
}

/// Makes the metrics of one registry.
struct Maker<'a> {
    registry: &'a Registry,
    model: &'a str,
}

impl Maker<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model_name", self.model).const_label("engine", "0")
    }

    fn register<M: prometheus::core::Collector + Clone + 'static>(
        &self,
        metric: prometheus::Result<M>,
    ) -> M {
        let metric = metric.expect("names and labels are valid");
        self.registry.register(Box::new(metric.clone())).expect("each name is registered once");
        metric
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::with_opts(self.opts(name, help)))
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> IntCounterVec {
        self.register(IntCounterVec::new(self.opts(name, help), &[label]))
    }

    fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::with_opts(self.opts(name, help)))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        self.register(Histogram::with_opts(opts))
    }
}

impl Metrics {
    /// For `model`, whose blocks have `proposals` proposals; 0 without a draft.
    pub(crate) fn new(model: &str, proposals: usize) -> Self {
        let registry = Registry::new();
        let make = Maker { registry: &registry, model };
        let ended = make.counters(
            "vllm:request_success_total",
            "Number of finished requests by finish reason.",
            "finished_reason",
        );
        for reason in ["stop", "length", "abort", "error"] {
            ended.with_label_values(&[reason]);
        }
        Self {
            running: make.gauge("vllm:num_requests_running", "Sequences being decoded."),
            waiting: make.gauge("vllm:num_requests_waiting", "Sequences waiting for a place."),
            resting: make.gauge(
                "dflash:num_sequences_resting",
                "Preempted sequences, which continue later.",
            ),
            cache_bytes: make
                .gauge("dflash:kv_cache_bytes", "Keys and values of sequences, bytes."),
            kept_bytes: make.gauge(
                "dflash:prefix_cache_bytes",
                "Keys and values of finished sequences in the prefix cache, bytes.",
            ),
            prompt_tokens: make.counter("vllm:prompt_tokens_total", "Tokens of prompts."),
            generation_tokens: make.counter("vllm:generation_tokens_total", "Tokens generated."),
            prefix_queries: make.counter(
                "vllm:prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache.",
            ),
            prefix_hits: make.counter(
                "vllm:prefix_cache_hits_total",
                "Prompt tokens copied from the prefix cache.",
            ),
            cut: make.counter(
                "dflash:connections_cut_total",
                "Connections closed because the client was too slow.",
            ),
            refused: make.counters(
                "dflash:requests_refused_total",
                "Refused requests, by status.",
                "status",
            ),
            ended,
            first_token: make.histogram(
                "vllm:time_to_first_token_seconds",
                "From a request to its first token, seconds.",
                &FIRST_TOKEN,
            ),
            latency: make.histogram(
                "vllm:e2e_request_latency_seconds",
                "From a request to its last token, seconds.",
                &LATENCY,
            ),
            queue_time: make.histogram(
                "vllm:request_queue_time_seconds",
                "Time a request waits for a place in the engine, seconds.",
                &LATENCY,
            ),
            inference_time: make.histogram(
                "vllm:request_inference_time_seconds",
                "From its place in the engine to its last token, seconds.",
                &LATENCY,
            ),
            per_token: make.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Time of each token after the first, seconds.",
                &PER_TOKEN,
            ),
            drafting: (proposals > 0).then(|| Drafting::new(&make, proposals)),
            registry,
        }
    }

    /// The page, including counts kept elsewhere.
    pub(crate) fn page(&self, waiting: usize, cut: u64) -> String {
        self.waiting.set(waiting as f64);
        self.cut.inc_by(cut.saturating_sub(self.cut.get()));
        TextEncoder::new().encode_to_string(&self.registry.gather()).expect("numbers are text")
    }

    pub(crate) fn caches(&self, running: usize, live: usize, kept: usize) {
        self.running.set(running as f64);
        self.cache_bytes.set(live as f64);
        self.kept_bytes.set(kept as f64);
    }

    pub(crate) fn resting(&self, sequences: usize) {
        self.resting.set(sequences as f64);
    }

    pub(crate) fn queued(&self, time: Duration) {
        self.queue_time.observe(time.as_secs_f64());
    }

    pub(crate) fn first_token(&self, time: Duration) {
        self.first_token.observe(time.as_secs_f64());
    }

    pub(crate) fn prompt(&self, tokens: usize, cached: usize) {
        self.prompt_tokens.inc_by(tokens as u64);
        self.prefix_queries.inc_by(tokens as u64);
        self.prefix_hits.inc_by(cached as u64);
    }

    pub(crate) fn generated(&self, tokens: usize) {
        self.generation_tokens.inc_by(tokens as u64);
    }

    pub(crate) fn refused(&self, status: u16) {
        self.refused.with_label_values(&[&status.to_string()]).inc();
    }

    /// A sequence has ended: `all` is the time since its request, `within` the time in the engine,
    /// `decoding` the time of its `tokens` after the first.
    pub(crate) fn ended(
        &self,
        reason: &str,
        all: Duration,
        within: Duration,
        decoding: Option<Duration>,
        tokens: usize,
    ) {
        self.ended.with_label_values(&[reason]).inc();
        if ["abort", "error"].contains(&reason) {
            return;
        }
        self.latency.observe(all.as_secs_f64());
        self.inference_time.observe(within.as_secs_f64());
        if let Some(decoding) = decoding.filter(|_| tokens > 1) {
            self.per_token.observe(decoding.as_secs_f64() / (tokens - 1) as f64);
        }
    }

    pub(crate) fn block(&self, block: &Block) {
        let Some(drafting) = &self.drafting else { return };
        drafting.drafts.inc();
        drafting.draft_tokens.inc_by(block.proposed.len() as u64);
        drafting.accepted.inc_by(block.accepted as u64);
        drafting.accepted_at.iter().take(block.accepted).for_each(IntCounter::inc);
    }
}

impl Drafting {
    fn new(make: &Maker<'_>, proposals: usize) -> Self {
        let by_position = make.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted tokens per draft position.",
            "position",
        );
        let at = |position: usize| by_position.with_label_values(&[&position.to_string()]);
        Self {
            drafts: make
                .counter("vllm:spec_decode_num_drafts_total", "Number of spec decoding drafts."),
            draft_tokens: make
                .counter("vllm:spec_decode_num_draft_tokens_total", "Number of draft tokens."),
            accepted: make.counter(
                "vllm:spec_decode_num_accepted_tokens_total",
                "Number of accepted tokens.",
            ),
            accepted_at: (0..proposals).map(at).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_vllms_names() {
        let metrics = Metrics::new("m", 3);
        metrics.block(&Block { proposed: vec![1, 2, 3], accepted: 2 });
        metrics.block(&Block { proposed: vec![1, 2, 3], accepted: 0 });
        metrics.ended("stop", Duration::from_secs(1), Duration::ZERO, None, 1);
        let page = metrics.page(4, 1);
        for line in [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            r#"vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 2"#,
            r#"vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 6"#,
            r#"vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 2"#,
            r#"vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 1"#,
            r#"vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 0"#,
            r#"vllm:num_requests_waiting{engine="0",model_name="m"} 4"#,
            r#"vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1"#,
            "# TYPE vllm:time_to_first_token_seconds histogram",
            r#"dflash:connections_cut_total{engine="0",model_name="m"} 1"#,
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in {page}");
        }
        assert!(!Metrics::new("m", 0).page(0, 0).contains("spec_decode"));
    }
}
