//! A server's counters of speculative decoding, from its Prometheus page.

use crate::Verification;

/// Counter names of one kind of server.
struct Names {
    drafts: &'static str,
    accepted: Accepted,
    /// Finished requests, if it counts them.
    requests: Option<&'static str>,
}

/// How accepted proposals are counted.
enum Accepted {
    /// In a counter of their own, and possibly one by position.
    Counter(&'static str, Option<&'static str>),
    /// Indirectly: they are the tokens minus one per step and the first of each request. Tokens of a
    /// last block that the limit cuts off are missing.
    Rest { tokens: &'static str, requests: &'static str },
}

/// vLLM (and our own server), llama.cpp with `--metrics`, SGLang with `--enable-metrics`.
const KINDS: [Names; 3] = [
    Names {
        drafts: "vllm:spec_decode_num_drafts_total",
        accepted: Accepted::Counter(
            "vllm:spec_decode_num_accepted_tokens_total",
            Some("vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        ),
        requests: Some("vllm:request_success_total"),
    },
    Names {
        drafts: "llamacpp:spec_decode_num_drafts_total",
        accepted: Accepted::Counter("llamacpp:spec_decode_num_accepted_tokens_total", None),
        requests: None,
    },
    Names {
        drafts: "sglang:spec_verify_calls_total",
        accepted: Accepted::Rest {
            tokens: "sglang:generation_tokens_total",
            requests: "sglang:num_requests_total",
        },
        requests: Some("sglang:num_requests_total"),
    },
];

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Counters {
    steps: f64,
    accepted: f64,
    by_slot: Vec<f64>,
    /// Requests finished; `None` where not counted.
    pub(crate) requests: Option<f64>,
}

impl Counters {
    /// Parses a page; `None` if it does not count speculative decoding.
    pub(crate) fn read(page: &str) -> Option<Self> {
        let samples: Vec<Sample<'_>> = page.lines().filter_map(Sample::parse).collect();
        let sum = |name: &str| {
            let mut values = samples.iter().filter(|one| one.name == name).map(|one| one.value);
            let first = values.next()?;
            Some(first + values.sum::<f64>())
        };
        let names = KINDS.iter().find(|names| sum(names.drafts).is_some())?;
        let steps = sum(names.drafts)?;
        let (accepted, by_slot) = match names.accepted {
            Accepted::Counter(accepted, by_slot) => {
                (sum(accepted)?, by_slot.map_or_else(Vec::new, |name| slots(&samples, name)))
            }
            Accepted::Rest { tokens, requests } => {
                let known = |name| sum(name).unwrap_or_default();
                (known(tokens) - known(requests) - steps, Vec::new())
            }
        };
        let requests = names.requests.and_then(sum);
        Some(Self { steps, accepted, by_slot, requests })
    }

    /// The difference since `before`; `None` if the counters were reset in between, as after a
    /// restart of the server.
    pub(crate) fn since(&self, before: &Self) -> Option<Verification> {
        let fell =
            |now: Option<f64>, before: Option<f64>| now.unwrap_or(0.0) < before.unwrap_or(0.0);
        if self.steps < before.steps || fell(self.requests, before.requests) {
            return None;
        }
        let count = |now: f64, before: f64| (now - before).max(0.0).round() as u64;
        let old = before.by_slot.iter().copied().chain(std::iter::repeat(0.0));
        Some(Verification {
            steps: count(self.steps, before.steps),
            accepted: count(self.accepted, before.accepted),
            accepted_by_slot: self.by_slot.iter().zip(old).map(|(&a, b)| count(a, b)).collect(),
        })
    }
}

/// The sums by the label `position`, from 0.
fn slots(samples: &[Sample<'_>], name: &str) -> Vec<f64> {
    let mut slots = Vec::new();
    for sample in samples.iter().filter(|sample| sample.name == name) {
        let Some(position) = sample.label("position").and_then(|text| text.parse().ok()) else {
            continue;
        };
        if slots.len() <= position {
            slots.resize(position + 1, 0.0);
        }
        slots[position] += sample.value;
    }
    slots
}

/// A line `name{label="value",...} 1.0`.
struct Sample<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

impl<'a> Sample<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let line = line.trim();
        if line.starts_with('#') {
            return None;
        }
        let (name, labels, rest) = match line.split_once('{') {
            // A label's value may contain a brace, a number cannot.
            Some((name, rest)) => {
                let (labels, value) = rest.rsplit_once('}')?;
                (name, labels, value)
            }
            None => {
                let (name, value) = line.split_once(' ')?;
                (name, "", value)
            }
        };
        // A time stamp may follow.
        let value = rest.split_whitespace().next()?.parse().ok()?;
        Some(Self { name, labels, value })
    }

    fn label(&self, name: &str) -> Option<&'a str> {
        let start = format!("{name}=\"");
        let at = self.labels.find(&start)? + start.len();
        self.labels[at..].split('"').next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As vLLM 0.32 prints it.
    const VLLM: &str = r#"# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.77e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0
"#;

    #[test]
    fn a_page_of_vllm_tells_every_position() {
        let counters = Counters::read(VLLM).unwrap();
        assert_eq!(counters.requests, Some(3.0));
        let counted = counters.since(&Counters::default()).unwrap();
        assert_eq!((counted.steps, counted.accepted), (10, 12));
        assert_eq!(counted.accepted_by_slot, [7, 4, 1]);
        assert_eq!(counted.acceptance_length(), Some(2.2));
        let two = VLLM.to_owned() + &VLLM.replace("engine=\"0\"", "engine=\"1\"");
        let both = Counters::read(&two).unwrap();
        assert_eq!(both.since(&counters), Some(counted));
        // The server was restarted in between.
        assert_eq!(counters.since(&both), None);
    }

    #[test]
    fn llama_cpp_and_sglang_tell_sums() {
        let llama = "llamacpp:spec_decode_num_draft_tokens_total 30\n\
                     llamacpp:spec_decode_num_accepted_tokens_total 12\n\
                     llamacpp:spec_decode_num_drafts_total 10\n";
        let counted = Counters::read(llama).unwrap().since(&Counters::default()).unwrap();
        assert_eq!((counted.steps, counted.accepted), (10, 12));
        assert!(counted.accepted_by_slot.is_empty());
        // 25 tokens of 3 requests: 3 from prompts, 10 from the steps, 12 accepted.
        let sglang = "sglang:generation_tokens_total{model_name=\"m\"} 25.0\n\
                      sglang:num_requests_total{model_name=\"m\"} 3.0\n\
                      sglang:spec_verify_calls_total{model_name=\"m\"} 10.0\n\
                      sglang:spec_accept_length{tp_rank=\"0\"} 2.5\n";
        let counted = Counters::read(sglang).unwrap().since(&Counters::default()).unwrap();
        assert_eq!((counted.steps, counted.accepted), (10, 12));
    }

    #[test]
    fn a_page_without_speculation_has_no_counters() {
        assert_eq!(Counters::read("vllm:request_success_total{a=\"b\"} 2.0\n"), None);
        assert_eq!(Counters::read("<html>not found</html>"), None);
        assert_eq!(Counters::read(""), None);
        let sample = Sample::parse("a{x=\"}{\",y=\"2\"} 4.5 1700000000").unwrap();
        assert_eq!((sample.name, sample.value, sample.label("y")), ("a", 4.5, Some("2")));
    }
}
