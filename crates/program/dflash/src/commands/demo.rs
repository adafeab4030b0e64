//! `dflash demo`: runs the whole pipeline on a synthetic corpus. It trains a tiny target,
//! regenerates the corpus's answers with it, serves its hidden states, trains a drafter and
//! measures it.
//!
//! Every stage runs this program with a command line that a user could type. Finished stages are
//! kept, so an interrupted demo continues where it stopped.

mod stage;
mod worth;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use dflash_io::say;
use dflash_settings::DemoSettings;

use stage::{Programs, Running, path_text};
use worth::{Worth, shown};

/// Layers of the 8-layer target to take states from; 0 would be the embedding's output.
const LAYERS: [&str; 4] = ["2", "3", "5", "6"];
const RANKS: &str = "2";
/// Settings that the figures in docs/proven.md were measured with; their defaults have changed since.
const MEASURED_WITH: &str = "--adam-betas 0.9,0.999 --validation-ratio 0";
/// Long enough for a busy machine.
const SERVER_START: Duration = Duration::from_secs(120);

struct Sizes {
    target: &'static str,
    answers: &'static str,
    training: &'static str,
    new_tokens: &'static str,
    /// Number of prompts for the widened target, which takes as long per token as a real model.
    wide_prompts: &'static str,
    /// Size of the widened target's weights on disk, in MB. This exceeds a core's own caches a
    /// hundredfold. A last-level cache reported as larger is shared by all cores of a large machine
    /// and gives two of them no more than memory bandwidth.
    wide_megabytes: u64,
}

/// Takes a few minutes on two cores.
const WHOLE: Sizes = Sizes {
    target: "--rows 6000 --held-out 64 --steps 150",
    answers: "--limit 2000 --max-new-tokens 128",
    training: "--max-steps 250",
    new_tokens: "128",
    wide_prompts: "8",
    wide_megabytes: 400,
};

/// Takes half a minute on two cores.
const QUICK: Sizes = Sizes {
    target: "--rows 60 --held-out 4 --steps 4",
    answers: "--limit 24 --max-new-tokens 32",
    training: "--max-steps 4",
    new_tokens: "24",
    wide_prompts: "2",
    wide_megabytes: 20,
};

/// Runs the demo; prints the table, the drafter's path and the time.
pub(crate) fn run(settings: &DemoSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let dir = &settings.dir;
    if settings.fresh {
        remove(dir)?;
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let sizes = if settings.quick { QUICK } else { WHOLE };
    let demo = Demo {
        programs: Programs::new(settings.processor, stop)?,
        dir,
        sizes,
        began: Instant::now(),
    };
    demo.make_target()?;
    demo.regenerate_answers()?;
    demo.prepare_data()?;
    demo.train_drafter()?;
    let (table, drafter) = demo.measure()?;
    let worth = demo.weigh(&drafter)?;
    let seconds = demo.began.elapsed().as_secs();
    println!("\n{table}\n{worth}\ndrafter: {}\ndone in {seconds} s", drafter.display());
    Ok(())
}

/// Removes the directory, but only if a demo wrote it.
fn remove(dir: &Path) -> anyhow::Result<()> {
    let is_ours = dir.join("settings.json").is_file() || dflash_io::is_absent_or_empty(dir)?;
    if !is_ours {
        bail!(
            "{} was not made by the demo; remove it yourself, or name another --dir",
            dir.display()
        );
    }
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    Ok(())
}

struct Demo<'a> {
    programs: Programs,
    dir: &'a Path,
    sizes: Sizes,
    began: Instant,
}

impl Demo<'_> {
    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The path of file `name` as an argument.
    fn arg(&self, name: &str) -> String {
        path_text(&self.file(name))
    }

    fn heading(&self, number: usize, text: &str) {
        let seconds = self.began.elapsed().as_secs();
        say(format!("\n[{number}/6] {text} ({seconds} s so far)"));
    }

    /// Whether an earlier demo produced `name`.
    fn kept(&self, name: &str) -> bool {
        let path = self.file(name);
        let kept = path.exists();
        if kept {
            say(format!("      kept from an earlier run: {}", path.display()));
        }
        kept
    }

    fn make_target(&self) -> anyhow::Result<()> {
        self.heading(
            1,
            "a synthetic chat corpus, its tokenizer, and a tiny target trained on both",
        );
        let line = format!("demo-target {} --output", self.sizes.target);
        self.programs.run(&line, &[&path_text(self.dir)])
    }

    fn regenerate_answers(&self) -> anyhow::Result<()> {
        self.heading(2, "dflash regenerate: the target answers the corpus's questions itself");
        if self.kept("answers.jsonl") {
            return Ok(());
        }
        let line = format!("regenerate {}", self.sizes.answers);
        let (target, data) = (self.arg("target"), self.arg("conversations.jsonl"));
        let output = self.arg("answers.jsonl");
        self.programs.run(&line, &["--target", &target, "--data", &data, "--output", &output])
    }

    fn prepare_data(&self) -> anyhow::Result<()> {
        self.heading(3, "dflash prepare: makes a tokenized, masked dataset of the answers");
        if self.kept("data") {
            return Ok(());
        }
        let (target, data) = (self.arg("target"), self.arg("answers.jsonl"));
        let more = ["--target", &target, "--data", &data, "--output", &self.arg("data")];
        self.programs.run("prepare --seq-length 1024", &more)
    }

    fn train_drafter(&self) -> anyhow::Result<()> {
        self.heading(4, "dflash hidden-server and dflash train --nproc 2 against it");
        if self.kept("trained") {
            return Ok(());
        }
        let mut server = self.start_server()?;
        let endpoint = format!("http://127.0.0.1:{}/v1", self.await_port(&mut server)?);
        let (target, data, drafts) = (self.arg("target"), self.arg("data"), self.arg("drafts"));
        let line = format!(
            "train --resume=auto --speculator-type dflash --num-layers 2 --epochs 3 --lr 0.002 \
             --total-seq-len 1024 --on-missing generate --on-generate delete --seed 42 \
             --scheduler-type cosine --max-anchors 256 --block-size 8 --anchors-per-sequence 64 \
             --gamma 4 {MEASURED_WITH} --nproc {RANKS} {} --target-layer-ids {}",
            self.sizes.training,
            LAYERS.join(" ")
        );
        let more = ["--target", &target, "--data-path", &data, "--save-path", &drafts];
        self.programs.run(&line, &[&more[..], &["--vllm-endpoint", &endpoint]].concat())?;
        server.end();
        dflash_io::write_bytes(&self.file("trained"), b"")?;
        Ok(())
    }

    fn start_server(&self) -> anyhow::Result<Running> {
        let (port_file, log) = (self.file("port"), self.file("server.log"));
        let _ = fs::remove_file(&port_file);
        let log = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let line = format!("hidden-server --port 0 --target-layer-ids {}", LAYERS.join(" "));
        let more = ["--target", &self.arg("target"), "--port-file", &path_text(&port_file)];
        self.programs.start(&line, &more, log.try_clone()?.into(), log.into())
    }

    /// Waits for the port that the server writes when it is ready.
    fn await_port(&self, server: &mut Running) -> anyhow::Result<u16> {
        let (file, log) = (self.file("port"), self.file("server.log"));
        let ready = || fs::read_to_string(&file).ok().filter(|text| text.ends_with('\n'));
        let text = self.programs.wait_for(server, SERVER_START, ready).with_context(|| {
            let said = fs::read_to_string(&log).unwrap_or_default();
            format!("the hidden-state server did not start; {} says:\n{said}", log.display())
        })?;
        let digits = text.trim().rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        say(format!("      server at port {digits}, log in {}", log.display()));
        digits.parse().with_context(|| format!("{} holds no port", file.display()))
    }

    /// The results with the original target, and the drafter's path.
    fn measure(&self) -> anyhow::Result<(String, PathBuf)> {
        self.heading(5, "dflash eval: speculative against plain greedy decoding");
        let drafter = fs::canonicalize(self.file("drafts/latest")).with_context(|| {
            format!("{} has no checkpoint; --fresh starts over", self.dir.display())
        })?;
        let (target, prompts) = (self.arg("target"), self.arg("prompts.jsonl"));
        let (draft, json) = (path_text(&drafter), self.arg("eval.json"));
        let line = format!("eval --max-new-tokens {}", self.sizes.new_tokens);
        let more = ["--target", &target, "--draft", &draft, "--prompts", &prompts, "--json", &json];
        let table = self.file("table.txt");
        let file =
            File::create(&table).with_context(|| format!("cannot write {}", table.display()))?;
        self.programs.run_into(&line, &more, file.into())?;
        Ok((fs::read_to_string(&table)?, drafter))
    }

    /// Compares the speed-up with weights that fit in a cache and with weights in memory.
    fn weigh(&self, drafter: &Path) -> anyhow::Result<String> {
        self.heading(6, "dflash eval: the same pair with weights that do not fit in the cache");
        let (wide, json) = (self.file("wide"), self.arg("wide.json"));
        let (megabytes, output) = (self.sizes.wide_megabytes, path_text(self.dir));
        let line = format!("demo-target {} --widen-to {megabytes} --output", self.sizes.target);
        self.programs.run(&line, &[&output])?;
        let (prompts, draft) = (self.arg("prompts.jsonl"), path_text(drafter));
        // The widened weights differ from those that the drafter was trained for, so these results
        // must not be recorded as the drafter's: `dflash push` would refuse it.
        let line = format!(
            "eval --allow-other-target --no-record --max-new-tokens {} --limit {}",
            self.sizes.new_tokens, self.sizes.wide_prompts
        );
        let more = ["--target", &path_text(&wide), "--draft", &draft, "--prompts", &prompts];
        self.programs.run(&line, &[&more[..], &["--json", &json]].concat())?;
        let rows = [
            Worth::read("the target as it is", &self.file("target"), &self.file("eval.json"))?,
            Worth::read("widened by zeros", &wide, &self.file("wide.json"))?,
        ];
        dflash_io::remove_dir(&wide)?;
        Ok(shown(&rows))
    }
}
