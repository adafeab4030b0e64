//! Counters of the server: a few numbers in `/health`, all of them in `/metrics`.

use std::fmt::Write;
use std::time::Duration;

use dflash_http::Count;

/// Counters since the start.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// Prompts run.
    pub(crate) prompts: Count,
    /// Their tokens.
    pub(crate) tokens: Count,
    /// Forward passes.
    pub(crate) batches: Count,
    /// Nanoseconds spent in them.
    pub(crate) busy_nanos: Count,
    /// Bytes of rows sent.
    pub(crate) bytes: Count,
    /// Requests refused as malformed.
    pub(crate) invalid: Count,
    /// Requests refused because the queue was full.
    pub(crate) put_off: Count,
    /// Requests whose client left before they were run.
    pub(crate) cancelled: Count,
    /// Prompts that the model failed on.
    pub(crate) failed: Count,
    /// Batches that did not fit into memory.
    pub(crate) out_of_memory: Count,
}

impl Metrics {
    /// Prometheus' text format.
    pub(crate) fn prometheus(
        &self,
        in_use: usize,
        waiting: usize,
        cut: u64,
        uptime: Duration,
    ) -> String {
        let seconds = self.busy_nanos.get() as f64 / 1e9;
        let mut out = String::new();
        let mut line = |name: &str, kind: &str, help: &str, value: f64| {
            let name = format!("dflash_hidden_server_{name}");
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        };
        let count = |count: &Count| count.get() as f64;
        line("prompts_total", "counter", "Prompts run.", count(&self.prompts));
        line("tokens_total", "counter", "Tokens run.", count(&self.tokens));
        line("batches_total", "counter", "Forward passes.", count(&self.batches));
        line("busy_seconds_total", "counter", "Time in forward passes.", seconds);
        line("bytes_total", "counter", "Bytes of rows sent.", count(&self.bytes));
        line("invalid_total", "counter", "Malformed requests.", count(&self.invalid));
        line(
            "put_off_total",
            "counter",
            "Requests refused because the queue was full.",
            count(&self.put_off),
        );
        line(
            "cancelled_total",
            "counter",
            "Requests abandoned by their client.",
            count(&self.cancelled),
        );
        line("failed_total", "counter", "Prompts that the model failed on.", count(&self.failed));
        line("out_of_memory_total", "counter", "Batches split.", count(&self.out_of_memory));
        line("cut_total", "counter", "Connections cut.", cut as f64);
        line("in_use", "gauge", "Requests being served.", in_use as f64);
        line("waiting", "gauge", "Requests not yet started.", waiting as f64);
        line("uptime_seconds", "gauge", "Time since the start.", uptime.as_secs_f64());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_prometheus() {
        let metrics = Metrics::default();
        metrics.tokens.add(216);
        let text = metrics.prometheus(3, 2, 0, Duration::ZERO);
        assert!(text.contains("\ndflash_hidden_server_tokens_total 216\n"), "{text}");
        assert!(text.contains("# TYPE dflash_hidden_server_waiting gauge\n"), "{text}");
        assert!(text.lines().all(|line| line.starts_with('#') || line.split(' ').count() == 2));
    }
}
