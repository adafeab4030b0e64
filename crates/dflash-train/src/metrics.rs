//! What a run shows of itself: a progress bar, JSON lines and TensorBoard events.

use std::time::{Duration, Instant};

use dflash_model::objective::{Statistics, StatisticsReport};
use dflash_run::{Events, MetricLine, RunDir, StreamCounters, TeacherForced, ValidationLine};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tch::Device;

use crate::trainer::{Effect, StepResult, StepSums};
use crate::{Error, machine};

/// How often a log gets a line of progress where there is no terminal for a bar.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Adds up steps and writes lines; on ranks other than 0 it only adds up.
pub(crate) struct Meter {
    interval: Option<Statistics>,
    epsilon: f64,
    steps: u64,
    tokens: f64,
    flops: f64,
    wait: Duration,
    /// Of the last step, for what the streams have counted.
    sums: StepSums,
    machine: Machine,
    since: Instant,
    outputs: Option<Outputs>,
}

/// What the figures are measured on.
struct Machine {
    device: Device,
    /// Of all ranks together, TFLOP/s.
    peak_tflops: Option<f64>,
}

struct Outputs {
    run: RunDir,
    events: Events,
    bar: ProgressBar,
    /// When a log last got a line; `None` where a bar shows the progress, or nothing should.
    logged: Option<Instant>,
}

/// Where a run stands, as a line reports it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    pub(crate) step: u64,
    pub(crate) total: u64,
    pub(crate) epoch: f64,
    pub(crate) lr: f64,
    pub(crate) skipped_samples: u64,
    pub(crate) bad_steps: u64,
    pub(crate) ema_decay: Option<f64>,
}

impl Meter {
    /// A meter that writes nothing.
    pub(crate) fn silent(epsilon: f64) -> Self {
        let since = Instant::now();
        let (interval, outputs, wait) = (None, None, Duration::ZERO);
        let machine = Machine { device: Device::Cpu, peak_tflops: None };
        let (sums, tokens, flops) = (StepSums::default(), 0.0, 0.0);
        Self { interval, epsilon, steps: 0, tokens, flops, wait, sums, machine, since, outputs }
    }

    /// Says what the run computes on, and the peak of all its devices if that is known.
    pub(crate) fn measure(&mut self, device: Device, peak_tflops: Option<f64>) {
        self.machine = Machine { device, peak_tflops };
    }

    /// A meter that writes into `run`, where lines after `step` are dropped.
    pub(crate) fn open(
        run: RunDir,
        (step, total): (u64, u64),
        progress: bool,
        epsilon: f64,
    ) -> Result<Self, Error> {
        run.keep_until::<MetricLine>(step)?;
        let events = Events::create(&run)?;
        let target =
            if progress { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total), target).with_position(step);
        bar.set_style(bar_style());
        let logged = (progress && bar.is_hidden()).then(Instant::now);
        let mut meter = Self::silent(epsilon);
        meter.outputs = Some(Outputs { run, events, bar, logged });
        Ok(meter)
    }

    /// Adds a finished step and how long its rows were waited for. A step that moved nothing counts
    /// as a step, but has no share in figures of what was learned.
    pub(crate) fn add(&mut self, result: StepResult, wait: Duration) {
        self.steps += 1;
        self.sums = result.sums;
        self.wait += wait;
        let moved = result.effect == Effect::Moved;
        if moved {
            self.tokens += result.sums.tokens;
            self.flops += result.sums.flops;
        }
        let own = if moved { result.statistics } else { result.statistics.cleared() };
        match &mut self.interval {
            Some(sum) => sum.add(&own),
            None => self.interval = Some(own),
        }
        if let Some(outputs) = &self.outputs {
            outputs.bar.inc(1);
        }
    }

    /// Closes the interval and writes its line.
    pub(crate) fn log(&mut self, progress: Progress, gradient_norm: f64) -> Result<(), Error> {
        let Some(statistics) = self.interval.take() else { return Ok(()) };
        let seconds = self.since.elapsed().as_secs_f64().max(1e-9);
        if let Some(outputs) = &mut self.outputs {
            let report = statistics.report(self.epsilon);
            let pace = seconds / self.steps.max(1) as f64;
            let (wait, tflops) = (self.wait.as_secs_f64(), self.flops / seconds / 1e12);
            let line = MetricLine {
                step: progress.step,
                epoch: Some(progress.epoch),
                lr: Some(progress.lr),
                gradient_norm: Some(gradient_norm),
                slots_per_s: Some(report.supervised as f64 / seconds),
                tokens_per_s: Some(self.tokens / seconds),
                tflops: Some(tflops),
                mfu: self.machine.peak_tflops.map(|peak| tflops / peak),
                data_wait_s: Some(wait),
                data_wait_share: Some(wait / seconds),
                interval_s: Some(seconds),
                eta_s: Some(pace * (progress.total - progress.step.min(progress.total)) as f64),
                peak_memory_mib: machine::peak_memory_mib(self.machine.device),
                skipped_samples: progress.skipped_samples,
                bad_steps: progress.bad_steps,
                ema_decay: progress.ema_decay,
                stream: Some(stream(&self.sums)),
                figures: figures(report),
            };
            outputs.write(&line)?;
        }
        (self.steps, self.tokens, self.flops) = (0, 0.0, 0.0);
        self.wait = Duration::ZERO;
        self.since = Instant::now();
        Ok(())
    }

    /// Leaves what took `time` out of the interval's speed: a save, a validation.
    pub(crate) fn exclude(&mut self, time: Duration) {
        self.since += time;
    }

    /// Shows a validation.
    pub(crate) fn validated(&mut self, line: &ValidationLine) -> Result<(), Error> {
        self.say(&summary(line));
        self.outputs.as_mut().map_or(Ok(()), |outputs| Ok(outputs.events.add(line)?))
    }

    /// Says something above the progress bar.
    pub(crate) fn say(&self, message: &str) {
        if let Some(outputs) = &self.outputs {
            if outputs.bar.is_hidden() {
                eprintln!("{message}");
            } else {
                outputs.bar.println(message);
            }
        }
    }

    /// Leaves the bar as it is.
    pub(crate) fn close(&mut self) {
        if let Some(outputs) = &mut self.outputs {
            outputs.bar.abandon();
        }
    }
}

impl Outputs {
    fn write(&mut self, line: &MetricLine) -> Result<(), Error> {
        self.run.append(line)?;
        self.events.add(line)?;
        let message = message(line);
        if self.logged.is_some_and(|logged| logged.elapsed() >= LOG_INTERVAL) {
            self.logged = Some(Instant::now());
            let (total, left) = (self.bar.length().unwrap_or(line.step), shown(line.eta_s));
            eprintln!("step {}/{total}  {message}  {left:.0} s left", line.step);
        }
        self.bar.set_message(message);
        Ok(())
    }
}

/// What the progress says of a line.
fn message(line: &MetricLine) -> String {
    let mfu = line.mfu.map_or_else(String::new, |share| format!(" ({:.0}%)", 100.0 * share));
    let memory = line.peak_memory_mib.map_or_else(String::new, |mib| format!("  {mib:.0} MiB"));
    format!(
        "loss {:.4}  expected acceptance length {:.2}  {:.0} slots/s  {:.0} tokens/s  {} TFLOP/s{mfu}  waiting {:.0}%{memory}",
        shown(line.figures.loss),
        shown(line.figures.expected_acceptance_length),
        shown(line.slots_per_s),
        shown(line.tokens_per_s),
        three_digits(shown(line.tflops)),
        100.0 * shown(line.data_wait_share),
    )
}

/// What a reader of the log wants to know of a validation.
fn summary(line: &ValidationLine) -> String {
    let mut text = format!("step {}: validation", line.step);
    if let Some(rows) = &line.rows {
        text += &format!(
            " loss {:.4}, accuracy {:.1}%, expected acceptance length {:.2} on {} blocks",
            shown(rows.figures.loss),
            100.0 * shown(rows.figures.accuracy),
            shown(rows.figures.expected_acceptance_length),
            rows.blocks
        );
    }
    if let Some(prompts) = &line.prompts {
        text += if line.rows.is_some() { ";" } else { "" };
        text += &format!(
            " acceptance length {:.3} per step, {:.3} per response on {} responses",
            prompts.figures.acceptance_length,
            prompts.figures.acceptance_length_per_response,
            prompts.responses
        );
    }
    text + &format!(" ({:.0} s)", shown(line.seconds))
}

/// A figure for people, who see what is not known as NaN.
fn shown(figure: Option<f64>) -> f64 {
    figure.unwrap_or(f64::NAN)
}

/// The figures of a line; of nothing they are null there.
pub(crate) fn figures(report: StatisticsReport) -> TeacherForced {
    TeacherForced {
        loss: Some(report.loss),
        accuracy: Some(report.accuracy),
        accuracy_by_slot: report.accuracy_by_slot,
        expected_acceptance_length: Some(report.expected_acceptance_length),
    }
}

/// What the streams of all ranks have counted, as a line has it.
fn stream(sums: &StepSums) -> StreamCounters {
    StreamCounters {
        requests: sums.requests as u64,
        retries: sums.retries as u64,
        busy: sums.busy as u64,
        generated: sums.generated as u64,
        stored: sums.stored as u64,
        stale: sums.stale as u64,
        missing: sums.missing as u64,
        rejected: sums.rejected as u64,
        invalid: sums.invalid as u64,
        cached: sums.cached as u64,
        bytes: sums.bytes as u64,
    }
}

/// A number with three significant digits: CPUs make fractions of a TFLOP/s, GPUs hundreds.
fn three_digits(value: f64) -> String {
    let digits = if value > 0.0 { (2.0 - value.log10().floor()).clamp(0.0, 6.0) } else { 0.0 };
    format!("{value:.*}", digits as usize)
}

fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("{bar:24} {pos}/{len} steps  {msg}  {elapsed} elapsed, {eta} left")
        .expect("the template is well formed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_keep_three_digits() {
        let texts = [0.0, 0.01234, 0.5, 12.34, 412.3].map(three_digits);
        assert_eq!(texts, ["0", "0.0123", "0.500", "12.3", "412"]);
    }
}
