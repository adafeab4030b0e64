//! What a run shows of itself: a progress bar, JSON lines and TensorBoard events.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use dflash_model::objective::{Statistics, StatisticsReport};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tch::Device;
use tensorboard_rs::summary_writer::SummaryWriter;

use crate::trainer::{Effect, StepResult};
use crate::validation::ValidationLine;
use crate::{Error, machine};

/// File of the JSON lines in the save path.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// How often a log gets a line of progress where there is no terminal for a bar.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// One line of metrics: sums and ratios over the steps since the last.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MetricLine {
    /// Optimizer steps taken.
    pub(crate) step: u64,
    /// Epochs done, with the share of the current one.
    pub(crate) epoch: f64,
    /// Weighted loss over its denominator, all ranks and micro-batches, nats.
    pub(crate) loss: f64,
    /// Share of supervised slots whose argmax is the label.
    pub(crate) accuracy: f64,
    /// The same for each slot of a block; the anchor's slot has none.
    pub(crate) slot_accuracy: Vec<Option<f64>>,
    /// Mean over blocks of 1 + the run of right slots from the first on, tokens.
    pub(crate) expected_accepted: f64,
    /// Learning rate of the last step.
    pub(crate) lr: f64,
    /// Gradient norm of the last step, before clipping.
    pub(crate) gradient_norm: f64,
    /// Supervised slots per second, all ranks.
    pub(crate) slots_per_s: f64,
    /// Tokens of packed rows per second, all ranks.
    pub(crate) tokens_per_s: f64,
    /// Arithmetic that the rows needed over the seconds, all ranks, TFLOP/s.
    pub(crate) tflops: f64,
    /// The same as a share of the devices' peak, where that is known.
    pub(crate) mfu: Option<f64>,
    /// Seconds since the last line that rank 0 waited for hidden states.
    pub(crate) data_wait_s: f64,
    /// The same as a share of the seconds.
    pub(crate) data_wait_share: f64,
    /// Seconds since the last line.
    pub(crate) interval_s: f64,
    /// Seconds to the end at the pace since the last line.
    pub(crate) eta_s: f64,
    /// Most memory that rank 0 has held, MiB: resident on a CPU, tensors' on a GPU.
    pub(crate) peak_memory_mib: Option<f64>,
    /// Samples left out so far.
    pub(crate) skipped_samples: u64,
    /// Steps so far whose gradient was not finite.
    pub(crate) bad_steps: u64,
    /// Share that the averaged weights keep at a step. The figures are those of the trained weights,
    /// but the checkpoints serve the averaged ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ema_decay: Option<f64>,
}

/// Adds up steps and writes lines; on ranks other than 0 it only adds up.
pub(crate) struct Meter {
    interval: Option<Statistics>,
    epsilon: f64,
    steps: u64,
    tokens: f64,
    flops: f64,
    wait: Duration,
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
    lines: File,
    events: SummaryWriter,
    bar: ProgressBar,
    path: std::path::PathBuf,
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
    pub(crate) skipped: u64,
    pub(crate) bad_steps: u64,
    pub(crate) ema_decay: Option<f64>,
}

impl Meter {
    /// A meter that writes nothing.
    pub(crate) fn silent(epsilon: f64) -> Self {
        let since = Instant::now();
        let (interval, outputs, wait) = (None, None, Duration::ZERO);
        let machine = Machine { device: Device::Cpu, peak_tflops: None };
        Self { interval, epsilon, steps: 0, tokens: 0.0, flops: 0.0, wait, machine, since, outputs }
    }

    /// Says what the run computes on, and the peak of all its devices if that is known.
    pub(crate) fn measure(&mut self, device: Device, peak_tflops: Option<f64>) {
        self.machine = Machine { device, peak_tflops };
    }

    /// A meter that writes into `save_path`, where lines after `step` are dropped.
    pub(crate) fn open(
        save_path: &Path,
        (step, total): (u64, u64),
        progress: bool,
        epsilon: f64,
    ) -> Result<Self, Error> {
        let path = save_path.join(METRICS);
        keep_lines_until(&path, step)?;
        let lines = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(dflash_files::Error::io("open", &path))?;
        let events_dir = save_path.join("tensorboard");
        std::fs::create_dir_all(&events_dir)
            .map_err(|source| Error::Events { path: events_dir.clone(), source })?;
        let events = SummaryWriter::new(&events_dir);
        let target =
            if progress { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total), target).with_position(step);
        bar.set_style(bar_style());
        let logged = (progress && bar.is_hidden()).then(Instant::now);
        let mut meter = Self::silent(epsilon);
        meter.outputs = Some(Outputs { lines, events, bar, path, logged });
        Ok(meter)
    }

    /// Adds a finished step and how long its rows were waited for. A step that moved nothing counts
    /// as a step, but has no share in figures of what was learned.
    pub(crate) fn add(&mut self, result: StepResult, wait: Duration) {
        self.steps += 1;
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
                epoch: progress.epoch,
                lr: progress.lr,
                gradient_norm,
                slots_per_s: report.supervised as f64 / seconds,
                tokens_per_s: self.tokens / seconds,
                tflops,
                mfu: self.machine.peak_tflops.map(|peak| tflops / peak),
                data_wait_s: wait,
                data_wait_share: wait / seconds,
                interval_s: seconds,
                eta_s: pace * (progress.total - progress.step.min(progress.total)) as f64,
                peak_memory_mib: machine::peak_memory_mib(self.machine.device),
                skipped_samples: progress.skipped,
                bad_steps: progress.bad_steps,
                ema_decay: progress.ema_decay,
                ..MetricLine::of(report)
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
    pub(crate) fn validated(&mut self, line: &ValidationLine) {
        self.say(&line.summary());
        if let Some(outputs) = &mut self.outputs {
            for (tag, value) in line.scalars() {
                outputs.events.add_scalar(&tag, value as f32, line.step as usize);
            }
            outputs.events.flush();
        }
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

    /// Leaves the bar as it is and flushes the events.
    pub(crate) fn close(&mut self) {
        if let Some(outputs) = &mut self.outputs {
            outputs.events.flush();
            outputs.bar.abandon();
        }
    }
}

impl MetricLine {
    fn of(report: StatisticsReport) -> Self {
        Self {
            step: 0,
            epoch: 0.0,
            loss: report.loss,
            accuracy: report.accuracy,
            slot_accuracy: report.slot_accuracy,
            expected_accepted: report.expected_accepted,
            lr: 0.0,
            gradient_norm: 0.0,
            slots_per_s: 0.0,
            tokens_per_s: 0.0,
            tflops: 0.0,
            mfu: None,
            data_wait_s: 0.0,
            data_wait_share: 0.0,
            interval_s: 0.0,
            eta_s: 0.0,
            peak_memory_mib: None,
            skipped_samples: 0,
            bad_steps: 0,
            ema_decay: None,
        }
    }

    fn scalars(&self) -> Vec<(String, f64)> {
        let known = [
            ("train/loss", self.loss),
            ("train/accuracy", self.accuracy),
            ("train/expected_accepted", self.expected_accepted),
            ("train/lr", self.lr),
            ("train/gradient_norm", self.gradient_norm),
            ("speed/slots_per_s", self.slots_per_s),
            ("speed/tokens_per_s", self.tokens_per_s),
            ("speed/tflops", self.tflops),
            ("speed/data_wait_share", self.data_wait_share),
            ("speed/eta_s", self.eta_s),
            ("train/epoch", self.epoch),
        ];
        let mfu = self.mfu.map(|share| ("speed/mfu", share));
        let memory = self.peak_memory_mib.map(|mib| ("memory/peak_mib", mib));
        let all = known.into_iter().chain(mfu).chain(memory);
        let all =
            all.filter(|(_, value)| value.is_finite()).map(|(tag, value)| (tag.into(), value));
        all.chain(by_slot("train/slot_accuracy", &self.slot_accuracy)).collect()
    }
}

impl Outputs {
    fn write(&mut self, line: &MetricLine) -> Result<(), Error> {
        let mut text = serde_json::to_string(line).expect("a metric line prints");
        text.push('\n');
        self.lines
            .write_all(text.as_bytes())
            .map_err(dflash_files::Error::io("write", &self.path))?;
        for (tag, value) in line.scalars() {
            self.events.add_scalar(&tag, value as f32, line.step as usize);
        }
        self.events.flush();
        let mfu = line.mfu.map_or_else(String::new, |share| format!(" ({:.0}%)", 100.0 * share));
        let memory = line.peak_memory_mib.map_or_else(String::new, |mib| format!("  {mib:.0} MiB"));
        let message = format!(
            "loss {:.4}  accepted {:.2}  {:.0} slots/s  {:.0} tokens/s  {} TFLOP/s{mfu}  waiting {:.0}%{memory}",
            line.loss,
            line.expected_accepted,
            line.slots_per_s,
            line.tokens_per_s,
            three_digits(line.tflops),
            100.0 * line.data_wait_share,
        );
        if self.logged.is_some_and(|logged| logged.elapsed() >= LOG_INTERVAL) {
            self.logged = Some(Instant::now());
            let total = self.bar.length().unwrap_or(line.step);
            eprintln!("step {}/{total}  {message}  {:.0} s left", line.step, line.eta_s);
        }
        self.bar.set_message(message);
        Ok(())
    }
}

/// A scalar for each slot that has a figure, numbered from the anchor's, 0.
pub(crate) fn by_slot(tag: &str, figures: &[Option<f64>]) -> impl Iterator<Item = (String, f64)> {
    let of =
        move |(slot, figure): (usize, &Option<f64>)| Some((format!("{tag}/{slot:02}"), (*figure)?));
    figures.iter().enumerate().filter_map(of)
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

/// Drops lines of steps after `step`, which a resumed run will write again.
pub(crate) fn keep_lines_until(path: &Path, step: u64) -> Result<(), Error> {
    let Ok(file) = File::open(path) else { return Ok(()) };
    let mut kept = Vec::new();
    for line in BufReader::new(file).split(b'\n') {
        let line = line.map_err(dflash_files::Error::io("read", path))?;
        if step_of(&line).is_some_and(|stored| stored <= step) {
            kept.extend_from_slice(&line);
            kept.push(b'\n');
        }
    }
    Ok(dflash_files::write_bytes(path, &kept)?)
}

/// The step of a line; `None` for what is no line of ours, such as one that a full disk cut off.
pub(crate) fn step_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<serde_json::Value>(line).ok()?["step"].as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_keep_three_digits() {
        let texts = [0.0, 0.01234, 0.5, 12.34, 412.3].map(three_digits);
        assert_eq!(texts, ["0", "0.0123", "0.500", "12.3", "412"]);
    }

    #[test]
    fn a_resumed_run_writes_no_step_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let broken = b"{\"step\":10}\n\xff\xfe\n{\"step\":20}\n{\"step\":30}\n{\"st\xc3";
        std::fs::write(&path, broken).unwrap();
        keep_lines_until(&path, 20).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":10}\n{\"step\":20}\n");
    }
}
