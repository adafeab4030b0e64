//! Output of a run: progress bar, JSON lines and trackers' files.

mod pulse;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dflash_draft::objective::{Statistics, StatisticsReport};
use dflash_hidden_states::Counters;
use dflash_io::{Beat, StepBar, say};
use dflash_run::{
    End, Entry, MetricLine, RunAbout, RunDir, StreamCounters, TeacherForced, Trackers,
    ValidationLine,
};
use dflash_torch_sys::Interval;
use pulse::Pulse;
use tch::Device;

use crate::config::TrainConfig;
use crate::readback::StepOutcome;
use crate::rows::TargetTime;
use crate::trainer::{Effect, StepSums};
use crate::{Error, machine};

/// Accumulates steps and writes lines; ranks other than 0 only accumulate.
pub(crate) struct Meter {
    device: Device,
    /// Peak of all ranks together, TFLOP/s.
    peak_tflops: Option<f64>,
    /// Epsilon in the loss's denominator.
    epsilon: f64,
    begun: Instant,
    interval: SinceLast,
    pace: Pace,
    outputs: Option<Outputs>,
}

/// The work left in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) steps: u64,
    pub(crate) validations: u64,
    pub(crate) saves: u64,
}

/// Time spent so far in this process, by kind of work.
#[derive(Debug, Default)]
struct Pace {
    steps: u64,
    validations: Aside,
    saves: Aside,
    left: Left,
}

/// Validations or saves between steps.
#[derive(Clone, Copy, Debug, Default)]
struct Aside {
    times: u32,
    took: Duration,
}

impl Aside {
    fn add(&mut self, took: Duration) {
        self.times += 1;
        self.took += took;
    }

    /// Seconds for another `times`, at the mean so far; 0 if none has happened.
    fn seconds_of(self, times: u64) -> f64 {
        self.took.as_secs_f64() / f64::from(self.times.max(1)) * times as f64
    }
}

impl Pace {
    /// Seconds to the end, given the time `elapsed`: the remaining steps at this process's mean
    /// pace, plus the remaining validations and saves. `None` before the first step.
    fn seconds_left(&self, elapsed: Duration) -> Option<f64> {
        let steps = elapsed.saturating_sub(self.validations.took + self.saves.took);
        let per_step = (self.steps > 0).then(|| steps.as_secs_f64() / self.steps as f64)?;
        let Left { steps, validations, saves } = self.left;
        let asides = self.validations.seconds_of(validations) + self.saves.seconds_of(saves);
        Some(per_step * steps as f64 + asides)
    }
}

/// Time spent on getting a step's rows.
#[derive(Debug, Default)]
pub(crate) struct RowTimes {
    /// Time waiting for hidden states.
    wait: Duration,
    /// Forward passes of a target in this process.
    target: Vec<Interval>,
}

impl RowTimes {
    /// Adds a row that took `asked` to arrive, of which `target` accounts for a part.
    pub(crate) fn add(&mut self, asked: Duration, target: Option<TargetTime>) {
        let host = target.as_ref().map_or(Duration::ZERO, |target| target.host);
        self.wait += asked.saturating_sub(host);
        self.target.extend(target.map(|target| target.device));
    }

    /// Total seconds of the target's passes, if there were any; waits for the GPU to finish them.
    fn target_seconds(&self) -> Result<Option<f64>, Error> {
        let lengths = self.target.iter().map(Interval::length);
        let total = lengths.sum::<Result<Duration, _>>()?;
        Ok((!self.target.is_empty()).then_some(total.as_secs_f64()))
    }
}

/// Sums since the last line.
struct SinceLast {
    since: Instant,
    statistics: Option<Statistics>,
    steps: u64,
    tokens: f64,
    flops: f64,
    times: RowTimes,
    /// Counts of the streams since the process started.
    stream: StreamCounters,
}

struct Outputs {
    run: RunDir,
    trackers: Trackers,
    /// Hidden without a terminal or on request; lines are written instead.
    bar: StepBar,
    /// Updates the display between lines; ends before the bar does.
    pulse: Option<Pulse>,
}

/// Ends a wait on drop, since a wait that runs out of memory panics.
struct WaitIsOver<'a>(&'a Outputs);

impl Drop for WaitIsOver<'_> {
    fn drop(&mut self) {
        self.0.tell(|doing| doing.waits = None);
    }
}

impl SinceLast {
    fn begin(stream: StreamCounters) -> Self {
        let (since, times) = (Instant::now(), RowTimes::default());
        Self { since, statistics: None, steps: 0, tokens: 0.0, flops: 0.0, times, stream }
    }
}

impl Meter {
    /// A meter without output. `peak_tflops` is the peak of all devices together, if known.
    pub(crate) fn silent(device: Device, peak_tflops: Option<f64>, epsilon: f64) -> Self {
        let interval = SinceLast::begin(StreamCounters::default());
        let (begun, pace) = (Instant::now(), Pace::default());
        Self { device, peak_tflops, epsilon, begun, interval, pace, outputs: None }
    }

    /// Opens the output in `run`, dropping earlier lines after `step`.
    pub(crate) fn open(
        &mut self,
        run: RunDir,
        trackers: Trackers,
        step: u64,
        total: u64,
        progress: bool,
    ) -> Result<(), Error> {
        run.keep_until::<MetricLine>(step)?;
        let bar = StepBar::new(step, total, progress);
        let pulse = Some(Pulse::start(bar.clone()));
        self.outputs = Some(Outputs { run, trackers, bar, pulse });
        Ok(())
    }

    /// Adds a finished step and its rows' times. A step that changed nothing is counted but does
    /// not enter the training metrics.
    pub(crate) fn add(&mut self, sums: &StepSums, outcome: StepOutcome, times: RowTimes) {
        let interval = &mut self.interval;
        interval.steps += 1;
        interval.stream = sums.stream;
        interval.times.wait += times.wait;
        interval.times.target.extend(times.target);
        let moved = outcome.effect == Effect::Moved;
        if moved {
            interval.tokens += sums.tokens;
            interval.flops += sums.flops;
        }
        let own = if moved { outcome.statistics } else { outcome.statistics.cleared() };
        match &mut interval.statistics {
            Some(sum) => sum.add(&own),
            None => interval.statistics = Some(own),
        }
    }

    /// Advances the bar by a step of possibly unknown outcome; `left` is the remaining work.
    pub(crate) fn tick(&mut self, left: Left) {
        self.pace.steps += 1;
        self.pace.left = left;
        let seconds = self.pace.seconds_left(self.begun.elapsed());
        if let Some(outputs) = &self.outputs {
            outputs.bar.advance();
            outputs.tell(|doing| doing.left = seconds.map(|seconds| (Instant::now(), seconds)));
        }
    }

    /// Runs `wait` and displays how long it takes, with `what` as its description.
    pub(crate) fn waiting<T>(&self, what: &'static str, wait: impl FnOnce() -> T) -> T {
        let Some(outputs) = &self.outputs else { return wait() };
        outputs.tell(|doing| doing.waits = Some((Instant::now(), what)));
        let _over = WaitIsOver(outputs);
        wait()
    }

    /// Closes the interval, adds its figures to `line` and writes it.
    pub(crate) fn log(&mut self, line: MetricLine) -> Result<(), Error> {
        let Some(statistics) = self.interval.statistics.take() else { return Ok(()) };
        let next = SinceLast::begin(self.interval.stream);
        let SinceLast { since, steps, tokens, flops, times, stream, .. } =
            std::mem::replace(&mut self.interval, next);
        let Some(outputs) = &mut self.outputs else { return Ok(()) };
        let seconds = since.elapsed().as_secs_f64().max(1e-9);
        let report = statistics.report(self.epsilon);
        let (wait, tflops) = (times.wait.as_secs_f64(), flops / seconds / 1e12);
        let target = times.target_seconds()?;
        outputs.write(&MetricLine {
            total_steps: Some(outputs.bar.total()),
            steps: Some(steps),
            time: Some(seconds_since_1970()),
            elapsed_s: Some(self.begun.elapsed().as_secs_f64()),
            slots_per_s: Some(report.supervised as f64 / seconds),
            tokens_per_s: Some(tokens / seconds),
            tflops: Some(tflops),
            mfu: self.peak_tflops.map(|peak| tflops / peak),
            data_wait_s: Some(wait),
            data_wait_share: Some(wait / seconds),
            target_s: target,
            target_share: target.map(|target| target / seconds),
            interval_s: Some(seconds),
            eta_s: self.pace.seconds_left(self.begun.elapsed()),
            peak_memory_mib: machine::peak_memory_mib(self.device),
            stream: Some(stream),
            figures: figures(report),
            ..line
        })
    }

    /// Excludes a save, which took `time`, from the interval.
    pub(crate) fn saved(&mut self, time: Duration) {
        self.interval.since += time;
        self.pace.saves.add(time);
    }

    /// Excludes a validation, which took `time`, from the interval.
    pub(crate) fn validated_for(&mut self, time: Duration) {
        self.interval.since += time;
        self.pace.validations.add(time);
    }

    /// Shows the result of a validation and passes it to the trackers.
    pub(crate) fn validated(&mut self, line: &ValidationLine) -> Result<(), Error> {
        self.say(&summary(line));
        let entry = Entry::of(line, seconds_since_1970());
        self.outputs.as_mut().map_or(Ok(()), |outputs| Ok(outputs.trackers.add(&entry)?))
    }

    /// Runs `work`, which may draw its own progress bar.
    pub(crate) fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        match &self.outputs {
            Some(outputs) => {
                outputs.tell(|doing| doing.is_aside = true);
                let done = outputs.bar.suspend(work);
                outputs.tell(|doing| (doing.is_aside, doing.beat) = (false, None));
                done
            }
            None => work(),
        }
    }

    /// Shows elapsed time and waits on the work's own bar from now on.
    pub(crate) fn beats_on(&self, beat: Beat) {
        if let Some(outputs) = &self.outputs {
            outputs.tell(|doing| doing.beat = Some(beat));
        }
    }

    /// Notes that the work has written a progress line itself.
    pub(crate) fn came_on(&self) {
        if let Some(outputs) = &self.outputs {
            outputs.pulse.iter().for_each(Pulse::wrote);
        }
    }

    /// Time since shortly before this process's first step.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Prints a message above the progress bar.
    pub(crate) fn say(&self, message: &str) {
        if let Some(outputs) = &self.outputs {
            outputs.say(message);
        }
    }

    /// Leaves the bar on screen, so that later output starts on a new line, and tells the trackers
    /// how the run ended.
    pub(crate) fn close(&mut self, end: End) -> Result<(), Error> {
        let Some(outputs) = &mut self.outputs else { return Ok(()) };
        outputs.pulse = None;
        outputs.bar.close();
        Ok(outputs.trackers.close(end)?)
    }
}

impl Outputs {
    fn write(&mut self, line: &MetricLine) -> Result<(), Error> {
        self.run.append(line)?;
        self.trackers.add(&Entry::of(line, line.time.unwrap_or_default()))?;
        self.tell(|doing| doing.message = compact(line));
        if self.bar.is_hidden() {
            self.pulse.iter().for_each(Pulse::wrote);
            let message = message(line);
            let (total, left) = (self.bar.total(), shown(line.eta_s));
            say(format!("step {}/{total}  {message}  {left:.0} s left", line.step));
        } else {
            self.bar.show_figures(compact(line));
        }
        Ok(())
    }

    /// Updates the state that the pulse shows.
    fn tell(&self, change: impl FnOnce(&mut pulse::Doing)) {
        if let Some(pulse) = &self.pulse {
            pulse.tell(change);
        }
    }

    fn say(&self, message: &str) {
        self.pulse.iter().for_each(Pulse::wrote);
        self.bar.say(message);
    }
}

/// Opens the trackers' files; those of an earlier start continue after `step`.
pub(crate) fn trackers(config: &TrainConfig, step: u64) -> Result<Trackers, Error> {
    let settings = &config.settings;
    let path = std::path::absolute(&settings.save_path);
    let path = path.unwrap_or_else(|_| settings.save_path.clone());
    let last = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = settings.run_name.clone().or(last).unwrap_or_else(|| "dflash".to_owned());
    let about = RunAbout { name, config: config.shown(), step };
    Ok(Trackers::open(&RunDir::at(path), &settings.log_to, &about)?)
}

fn seconds_since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A short version for the progress bar; the file has the rest.
fn compact(line: &MetricLine) -> String {
    let memory = line.peak_memory_mib.map_or_else(String::new, |mib| format!("  {mib:.0} MiB"));
    format!(
        "loss {:.4}  length {:.2}  epoch {:.2}  lr {:.1e}  gradient {}  {:.0} tokens/s  waiting {:.0}%{memory}",
        shown(line.figures.loss),
        shown(line.figures.expected_acceptance_length),
        shown(line.epoch),
        shown(line.lr),
        three_digits(shown(line.gradient_norm)),
        shown(line.tokens_per_s),
        100.0 * shown(line.data_wait_share),
    )
}

/// A line's figures for the log.
fn message(line: &MetricLine) -> String {
    let mfu = line.mfu.map_or_else(String::new, |share| format!(" ({:.0}%)", 100.0 * share));
    let target = line
        .target_share
        .map_or_else(String::new, |share| format!("  target {:.0}%", 100.0 * share));
    let memory = line.peak_memory_mib.map_or_else(String::new, |mib| format!("  {mib:.0} MiB"));
    format!(
        "loss {:.4}  expected acceptance length {:.2}  epoch {:.2}  lr {:.1e}  gradient norm {}  {:.0} slots/s  {:.0} tokens/s  {} TFLOP/s{mfu}  waiting {:.0}%{target}{memory}",
        shown(line.figures.loss),
        shown(line.figures.expected_acceptance_length),
        shown(line.epoch),
        shown(line.lr),
        three_digits(shown(line.gradient_norm)),
        shown(line.slots_per_s),
        shown(line.tokens_per_s),
        three_digits(shown(line.tflops)),
        100.0 * shown(line.data_wait_share),
    )
}

/// A validation's figures for the log.
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

/// The number, or NaN if unknown.
fn shown(figure: Option<f64>) -> f64 {
    figure.unwrap_or(f64::NAN)
}

/// A line's figures; NaN and missing values become null.
pub(crate) fn figures(report: StatisticsReport) -> TeacherForced {
    TeacherForced {
        loss: Some(report.loss),
        accuracy: Some(report.accuracy),
        accuracy_by_slot: report.accuracy_by_slot,
        expected_acceptance_length: Some(report.expected_acceptance_length),
        head: report.of_head.into_iter().map(|(name, own)| (name.to_owned(), Some(own))).collect(),
    }
}

/// A stream's counts in a line's format.
pub(crate) fn counted(by: &Counters) -> StreamCounters {
    StreamCounters {
        requests: by.requests,
        retries: by.retries,
        busy: by.busy,
        generated: by.generated,
        stored: by.stored,
        stale: by.stale,
        missing: by.missing,
        rejected: by.rejected,
        invalid: by.invalid,
        damaged: by.damaged,
        cached: by.cached,
        bytes: by.bytes,
    }
}

/// A number with three significant digits: CPUs reach fractions of a TFLOP/s, GPUs hundreds.
fn three_digits(value: f64) -> String {
    let digits = if value > 0.0 { (2.0 - value.log10().floor()).clamp(0.0, 6.0) } else { 0.0 };
    format!("{value:.*}", digits as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_counts_validations_and_saves_to_come() {
        let seconds = Duration::from_secs;
        let mut pace = Pace::default();
        assert_eq!(pace.seconds_left(seconds(9)), None, "before the first step");
        pace.steps = 100;
        pace.left = Left { steps: 50, validations: 2, saves: 3 };
        assert_eq!(pace.seconds_left(seconds(100)), Some(50.0));
        // The elapsed time includes two validations of 15 s on average and a save of 10 s.
        [10, 20].into_iter().for_each(|took| pace.validations.add(seconds(took)));
        pace.saves.add(seconds(10));
        assert_eq!(pace.seconds_left(seconds(140)), Some(50.0 + 30.0 + 30.0));
    }

    #[test]
    fn a_terminal_s_line_begins_with_what_is_looked_at_most() {
        let figures = TeacherForced {
            loss: Some(3.25),
            expected_acceptance_length: Some(2.5),
            ..TeacherForced::default()
        };
        let line = MetricLine {
            figures,
            epoch: Some(0.5),
            lr: Some(6e-4),
            gradient_norm: Some(1.25),
            tokens_per_s: Some(900.0),
            data_wait_share: Some(0.1),
            ..MetricLine::default()
        };
        let begins = "loss 3.2500  length 2.50  epoch 0.50  lr 6.0e-4  gradient 1.25  900 tokens/s";
        assert!(compact(&line).starts_with(begins), "{}", compact(&line));
        assert!(begins.len() < 80);
        let told = message(&line);
        assert!(told.contains("epoch 0.50  lr 6.0e-4  gradient norm 1.25  "), "{told}");
    }

    #[test]
    fn speeds_keep_three_digits() {
        let texts = [0.0, 0.01234, 0.5, 12.34, 412.3].map(three_digits);
        assert_eq!(texts, ["0", "0.0123", "0.500", "12.3", "412"]);
    }
}
