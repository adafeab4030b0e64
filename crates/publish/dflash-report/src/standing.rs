//! How a run stands: the one sentence of its page, and what needs attention.

use dflash_run::{Evaluation, Line, Lines, MetricLine, RunDir, ValidationLine};

use crate::run::Run;
use crate::text::{counted, duration, percent};

/// A share of the time spent waiting for hidden states that is worth a word.
const LONG_WAIT: f64 = 0.2;
/// Least time without a line after which a run is called silent, seconds.
const SILENCE: f64 = 120.0;
/// The same in intervals between its lines.
const SILENT_INTERVALS: f64 = 5.0;

/// What a run is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nobody has written here.
    Absent,
    /// It has begun; its first line is to come.
    Starting,
    Running,
    /// Its process is alive, but no line came for long.
    Silent,
    Finished,
    /// Its process is gone before the last step.
    Stopped,
}

/// Something that a reader should know, and how bad it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Remark {
    pub(crate) is_fault: bool,
    pub(crate) text: String,
}

/// An acceptance length, and how it is known.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Acceptance {
    pub(crate) tokens: f64,
    pub(crate) step: u64,
    /// How it was found.
    pub(crate) source: String,
}

/// A run at a time.
#[derive(Debug)]
pub(crate) struct Standing {
    pub(crate) phase: Phase,
    pub(crate) acceptance: Option<Acceptance>,
    pub(crate) evaluation: Option<Evaluation>,
    pub(crate) remarks: Vec<Remark>,
}

impl Phase {
    fn of(run: &Run, now: f64) -> Self {
        let Some(last) = run.metrics.last() else {
            return match (run.is_alive, run.provenance.is_some()) {
                (Some(true), _) => Self::Starting,
                (Some(false), true) => Self::Stopped,
                (None, true) => Self::Starting,
                (_, false) => Self::Absent,
            };
        };
        let is_at_end = match last.total_steps {
            Some(total) => last.step >= total,
            None => last.eta_s == Some(0.0),
        };
        let patience = (SILENT_INTERVALS * last.interval_s.unwrap_or(0.0)).max(SILENCE);
        let is_silent = last.time.is_some_and(|time| now - time > patience);
        match run.is_alive {
            _ if is_at_end => Self::Finished,
            Some(true) if is_silent => Self::Silent,
            Some(true) => Self::Running,
            // Where locks do not tell, a fresh line does.
            None if !is_silent && last.time.is_some() => Self::Running,
            _ => Self::Stopped,
        }
    }

    /// The word on the page, and its class in the style.
    pub(crate) fn badge(self) -> (&'static str, &'static str) {
        match self {
            Self::Absent => ("waiting", ""),
            Self::Starting => ("starting", "live"),
            Self::Running => ("running", "live"),
            Self::Silent => ("silent", "warn"),
            Self::Finished => ("finished", "good"),
            Self::Stopped => ("stopped", "warn"),
        }
    }
}

impl Standing {
    /// `now`: seconds since 1970.
    pub(crate) fn of(run: &Run, now: f64) -> Self {
        Self {
            phase: Phase::of(run, now),
            acceptance: Acceptance::of(run),
            evaluation: evaluation(run),
            remarks: remarks(run, now),
        }
    }

    /// Whether something is wrong.
    pub(crate) fn has_faults(&self) -> bool {
        self.remarks.iter().any(|remark| remark.is_fault)
    }

    /// What the run is worth and whether all is well.
    pub(crate) fn sentence(&self, run: &Run) -> String {
        let Some(last) = run.metrics.last() else { return self.before_the_first_line(run) };
        let step = match run.total_steps() {
            Some(total) => format!("step {} of {total}", last.step),
            None => format!("step {}", last.step),
        };
        let time = run.seconds().map(duration);
        let begin = match self.phase {
            Phase::Finished => match time {
                Some(time) => {
                    format!("Finished {} in {time}", counted(last.step, "step", "steps"))
                }
                None => format!("Finished at {step}"),
            },
            Phase::Stopped => match time {
                Some(time) => format!("Stopped at {step} after {time}"),
                None => format!("Stopped at {step}"),
            },
            Phase::Silent => format!("No news since {step}"),
            _ => match last.eta_s.filter(|left| left.is_finite()) {
                Some(left) => format!("Running: {step}, {} left", duration(left)),
                None => format!("Running: {step}"),
            },
        };
        format!("{begin}{}{}; {}.", self.worth(run), self.speed(), self.health())
    }

    fn before_the_first_line(&self, run: &Run) -> String {
        match self.phase {
            Phase::Absent => format!("No run has written to {} yet.", run.dir.display()),
            Phase::Stopped => "Stopped before its first line of metrics.".to_owned(),
            _ => "Started; the first line of metrics follows the first step.".to_owned(),
        }
    }

    fn worth(&self, run: &Run) -> String {
        let Some(acceptance) = &self.acceptance else { return String::new() };
        let most = run.block_size().map(|most| format!(" of at most {most}"));
        format!(
            ": acceptance length {:.2}{} tokens, {}",
            acceptance.tokens,
            most.unwrap_or_default(),
            acceptance.source
        )
    }

    fn speed(&self) -> String {
        let Some(evaluation) = &self.evaluation else { return String::new() };
        format!(
            "; {} as fast as plain decoding on {}",
            speed_up(evaluation),
            evaluation.prompts.file_name().unwrap_or_default().to_string_lossy()
        )
    }

    fn health(&self) -> String {
        let faults = self.remarks.iter().filter(|remark| remark.is_fault).count() as u64;
        let others = self.remarks.len() as u64 - faults;
        match (faults, others) {
            (0, 0) => "all is well".to_owned(),
            (0, others) => counted(others, "remark", "remarks"),
            (faults, _) => counted(faults, "fault", "faults"),
        }
    }
}

/// A speed-up with its standard error, if that is known.
pub(crate) fn speed_up(evaluation: &Evaluation) -> String {
    let rates = &evaluation.tokens_per_second;
    match rates.speed_up_error {
        Some(error) => format!("{:.2} \u{b1} {error:.2} times", rates.speed_up),
        None => format!("{:.2} times", rates.speed_up),
    }
}

impl Acceptance {
    /// The best that was measured, else what validation or training expects.
    fn of(run: &Run) -> Option<Self> {
        let best = run.best.map(|best| best.step);
        let lines = &run.validation.by_step;
        let judged = best.and_then(|step| lines.get(&step)).or_else(|| run.validation.last());
        Self::measured(judged).or_else(|| Self::held_out(judged)).or_else(|| {
            let line = run.metrics.last()?;
            let tokens = line.figures.expected_acceptance_length.filter(|it| it.is_finite())?;
            Some(Self { tokens, step: line.step, source: "expected on training rows".to_owned() })
        })
    }

    fn measured(line: Option<&ValidationLine>) -> Option<Self> {
        let (line, prompts) = (line?, line?.prompts.as_ref()?);
        let prompts_count = counted(prompts.responses, "prompt", "prompts");
        Some(Self {
            tokens: prompts.figures.acceptance_length,
            step: line.step,
            source: format!("measured on {prompts_count} at step {}", line.step),
        })
    }

    fn held_out(line: Option<&ValidationLine>) -> Option<Self> {
        let (line, rows) = (line?, line?.rows.as_ref()?);
        Some(Self {
            tokens: rows.figures.expected_acceptance_length.filter(|it| it.is_finite())?,
            step: line.step,
            source: format!("expected on held-out rows at step {}", line.step),
        })
    }
}

/// The first evaluation of the best checkpoint, or else of the newest that has one.
fn evaluation(run: &Run) -> Option<Evaluation> {
    let best = run.best.map(|best| best.step);
    let of_best = run.saved.iter().find(|saved| Some(saved.checkpoint.step) == best);
    let newest = run.saved.iter().rev();
    of_best.into_iter().chain(newest).find_map(|saved| saved.evaluations.first().cloned())
}

fn remarks(run: &Run, now: f64) -> Vec<Remark> {
    let fault = |text: String| Remark { is_fault: true, text };
    let remark = |text: String| Remark { is_fault: false, text };
    let mut all = Vec::new();
    let diverged = run.saved.iter().filter(|saved| saved.is_diverged).map(|it| it.checkpoint.step);
    if let Some(step) = diverged.max() {
        all.push(fault(format!(
            "The run diverged: the checkpoint of step {step} is not one to use. Resume from an \
             earlier one with a lower --lr."
        )));
    }
    let last = run.metrics.last();
    if let Some(line) = last.filter(|line| line.bad_steps > 0) {
        let steps = counted(line.bad_steps, "step", "steps");
        all.push(fault(format!("{steps} had a gradient that is not finite and moved nothing.")));
    }
    all.extend(last.and_then(stream_faults).map(fault));
    all.extend(
        lines_faults(&run.metrics).into_iter().chain(lines_faults(&run.validation)).map(fault),
    );
    let has_begun = run.metrics.present;
    if run.provenance.is_none() && has_begun {
        all.push(fault(format!("{} is missing or broken.", RunDir::PROVENANCE)));
    }
    if let Phase::Silent = Phase::of(run, now)
        && let Some(time) = last.and_then(|line| line.time)
    {
        let since = duration(now - time);
        all.push(fault(format!("The process is alive, but wrote no line for {since}.")));
    }
    if let Some(line) = last.filter(|line| line.skipped_samples > 0) {
        let samples = counted(line.skipped_samples, "sample was", "samples were");
        let all_samples = line.samples + line.skipped_samples;
        let share = percent(line.skipped_samples as f64 / all_samples.max(1) as f64);
        all.push(remark(format!("{samples} left out, {share} of those that were reached.")));
    }
    all.extend(recent_wait(&run.metrics).filter(|share| *share >= LONG_WAIT).map(|share| {
        remark(format!(
            "The trainer waits for hidden states {} of the time: more of them would make it faster.",
            percent(share)
        ))
    }));
    all
}

/// Requests for hidden states that were lost for good.
fn stream_faults(line: &MetricLine) -> Option<String> {
    let stream = line.stream?;
    let lost = [
        (stream.missing, "missing"),
        (stream.rejected, "rejected by the server"),
        (stream.invalid, "with invalid hidden states"),
    ];
    let lost: Vec<String> = lost
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    (!lost.is_empty()).then(|| format!("Samples without hidden states: {}.", lost.join(", ")))
}

fn lines_faults<T: Line>(lines: &Lines<T>) -> Option<String> {
    let broken = lines.broken as u64;
    let counted = counted(broken, "broken line was", "broken lines were");
    (broken > 0).then(|| format!("{}: {counted} left out.", T::FILE))
}

/// The share of the time spent waiting over the last tenth of the run.
fn recent_wait(metrics: &Lines<MetricLine>) -> Option<f64> {
    let count = metrics.by_step.len().div_ceil(10);
    let lines = || metrics.by_step.values().rev().take(count);
    let seconds: f64 = lines().filter_map(|line| line.interval_s).sum();
    let waited: f64 = lines().filter_map(|line| line.data_wait_s).sum();
    (seconds > 0.0).then(|| waited / seconds)
}
