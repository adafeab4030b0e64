//! The pages in a browser: what they show, light and dark, wide and narrow, by pointer and by keys,
//! and a run that is followed. Skipped where there is no Chromium.
//!
//! The screenshots go to `target/pages`; `make pages` also writes those of the documentation, with
//! `DFLASH_WRITE_DOCS=1`. The run is a real one of 60 steps (tests/pages/run), without its weights.

#[path = "pages/browser.rs"]
mod browser;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use browser::{Browser, DARK, NARROW, Screen, WIDE};
use dflash_eval::{DraftFacts, EvalReport, Facts, Measured, Memory, SetFacts};
use dflash_run::SavePath;
use dflash_settings::EvalSettings;

/// A checkpoint's size in the run that the files are of.
const CHECKPOINT_BYTES: u64 = 47_769_815;
/// Largest screenshot in the documentation.
const MOST_BYTES: u64 = 200_000;

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pages").join(path)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(source(&format!("run/{name}"))).unwrap()
}

/// A run's directory with all files but its metrics.
fn run_dir(parent: &Path) -> PathBuf {
    let dir = parent.join("qwen3-tiny");
    for step in [20, 40, 60] {
        let checkpoint = dir.join(format!("step-{step:06}"));
        std::fs::create_dir_all(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("config.json"), "{}").unwrap();
        let weights = File::create(checkpoint.join("model.safetensors")).unwrap();
        weights.set_len(CHECKPOINT_BYTES - 2).unwrap();
    }
    for name in ["validation.jsonl", "best.json", "run.json"] {
        std::fs::write(dir.join(name), read(name)).unwrap();
    }
    dir
}

fn dflash() -> Command {
    Command::new(env!("CARGO_BIN_EXE_dflash"))
}

/// A page of the documentation has at most so many pixels of its screenshot.
fn shoot(browser: &mut Browser, name: &str, height: u32) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    browser.shoot(&root.join("target/pages").join(name), height);
    if std::env::var_os("DFLASH_WRITE_DOCS").is_some() {
        let path = root.join("docs/figures").join(name);
        browser.shoot(&path, height);
        let bytes = path.metadata().unwrap().len();
        assert!(bytes < MOST_BYTES, "{} has {bytes} bytes", path.display());
    }
}

/// The page fits, and shows nothing cut off.
fn check_fit(browser: &mut Browser, address: &str, screen: Screen) {
    browser.open(address, screen);
    let width = browser.value("document.documentElement.scrollWidth");
    assert_eq!(width, screen.width, "{address} on {screen:?} scrolls sideways");
    let small = browser.value(
        "[...document.querySelectorAll('svg text')].map((one) => one.getBoundingClientRect().height) \
         .filter((height) => height > 0 && height < 8).length",
    );
    assert_eq!(small, 0, "labels too small to read on {screen:?}");
}

/// Contrast of text with what is behind it, at least that of WCAG's level AA.
fn check_contrast(browser: &mut Browser, selectors: &[&str]) {
    for selector in selectors {
        let contrast = browser.value(&format!(
            "(() => {{ const one = document.querySelector({selector:?}); \
             const rgb = (text) => text.match(/[0-9.]+/g).map(Number); \
             const light = ([r, g, b]) => [r, g, b].map((c) => c / 255) \
               .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)) \
               .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0); \
             const ground = (it) => {{ const c = rgb(getComputedStyle(it).backgroundColor); \
               return c.length === 4 && c[3] === 0 ? ground(it.parentElement) : c; }}; \
             const [a, b] = [light(rgb(getComputedStyle(one).color)), light(ground(one))]; \
             return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }})()"
        ));
        assert!(contrast.as_f64().unwrap() >= 4.5, "{selector}: contrast {contrast}");
    }
}

#[test]
fn a_report_reads_well_in_every_form() {
    let Some(mut browser) = Browser::start() else { return };
    let parent = tempfile::tempdir().unwrap();
    let dir = run_dir(parent.path());
    std::fs::write(dir.join("metrics.jsonl"), read("metrics.jsonl")).unwrap();
    let made = dflash().current_dir(parent.path()).args(["report", "qwen3-tiny"]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let address = format!("file://{}", dir.join("report.html").display());
    for (name, screen, height) in [
        ("report.png", WIDE, 900),
        ("report-dark.png", DARK, 900),
        ("report-narrow.png", NARROW, 740),
    ] {
        check_fit(&mut browser, &address, screen);
        check_contrast(
            &mut browser,
            &[".lede", ".sub", ".tiles dt", ".tiles .about", ".state", ".value", "thead th"],
        );
        shoot(&mut browser, name, height);
    }
    let sentence = browser.text(".lede");
    assert!(sentence.starts_with("Finished 60 steps in "), "{sentence}");
    assert!(sentence.contains("acceptance length 1.28 of at most 8 tokens (measured)"));
    // The pointer and the arrow keys show values; without them the ends stand there.
    let plot = "svg.plot[aria-label='Loss']";
    let value = ".chart:has(svg[aria-label='Loss']) .value";
    let ends = browser.text(value);
    browser.open(&address, WIDE);
    browser.point_at(plot);
    let middle = browser.text(value);
    assert!(middle.starts_with("step 28: training "), "{middle}");
    browser.value(&format!("document.querySelector({plot:?}).focus()"));
    for (key, expect) in
        [("Home", "step 1: training 39.47"), ("ArrowRight", "step 2: training 21.96")]
    {
        browser.press(key);
        assert_eq!(browser.text(value), expect);
    }
    browser.press("Escape");
    assert_eq!(browser.text(value), ends);
    // Everything that a screen reader needs to say.
    for (name, expect) in [
        ("main", 1),
        ("h1", 1),
        ("svg:not([role=img])", 0),
        ("svg:not([aria-label])", 0),
        ("th:not([scope])", 0),
    ] {
        let count = browser.value(&format!("document.querySelectorAll({name:?}).length"));
        assert_eq!(count, expect, "{name}");
    }
    assert!(browser.complaints.is_empty(), "{:?}", browser.complaints);
}

/// The page of a real evaluation: that of the run, on 16 questions.
fn evaluation(dir: &Path) -> PathBuf {
    let results: Vec<Measured> =
        serde_json::from_str(&std::fs::read_to_string(source("eval-results.json")).unwrap())
            .unwrap();
    let draft = |label: &str, name: &str, block_size| DraftFacts {
        label: label.into(),
        name: name.into(),
        block_size: Some(block_size),
        ..DraftFacts::default()
    };
    let ngram = "ngram: last 3 tokens or fewer, 10 proposals";
    let facts = Facts {
        target: "models/qwen3-tiny-gsm8k".into(),
        drafts: vec![draft("run", "drafts/qwen3-tiny/step-000060", 8), draft("ngram", ngram, 11)],
        sets: vec![SetFacts {
            name: "gsm8k".into(),
            title: "GSM8K".into(),
            source: "gsm8k_test.jsonl".into(),
            rows: 16,
            ..SetFacts::default()
        }],
        max_new_tokens: 128,
        device: "cpu (avx512bf16), float32, 2 threads".into(),
        memory: Memory { process_mib: Some(227.9), device_mib: None },
        ..Facts::default()
    };
    let path = dir.join("eval.html");
    let settings = EvalSettings { html: Some(path.clone()), ..EvalSettings::default() };
    dflash_eval::write(&EvalReport::new(facts, results), &settings).unwrap();
    path
}

#[test]
fn an_evaluation_reads_well_in_every_form() {
    let Some(mut browser) = Browser::start() else { return };
    let parent = tempfile::tempdir().unwrap();
    let address = format!("file://{}", evaluation(parent.path()).display());
    for (name, screen, height) in
        [("eval.png", WIDE, 1000), ("eval-dark.png", DARK, 1000), ("eval-narrow.png", NARROW, 740)]
    {
        check_fit(&mut browser, &address, screen);
        check_contrast(&mut browser, &[".lede", ".tiles dt", ".state", ".value", "thead th"]);
        shoot(&mut browser, name, height);
    }
    let sentence = browser.text(".lede");
    let expect = "run answers 0.16 \u{b1} 0.01 times as fast as plain decoding, with 1.27 \u{b1} 0.04 \
                  tokens of at most 8 per step, on 16 answers to GSM8K (greedy); every text is the same.";
    assert_eq!(sentence, expect);
    // No word is broken inside a cell: each is one line high.
    let broken = browser.value(
        "[...document.querySelectorAll('table:not(.facts) td, table:not(.facts) th')] \
         .filter((one) => one.getClientRects()[0].height > 60).length",
    );
    assert_eq!(broken, 0);
    browser.open(&address, WIDE);
    browser.point_at("svg.plot[aria-label='Acceptance by position']");
    let value = browser.text(".chart:has(svg[aria-label='Acceptance by position']) .value");
    assert!(value.starts_with("position ") && value.contains("ngram "), "{value}");
    assert!(browser.complaints.is_empty(), "{:?}", browser.complaints);
}

/// `dflash report --follow`, ended with its guard.
struct Follower(Child, String);

impl Follower {
    fn start(dir: &Path) -> Self {
        let mut child = dflash()
            .args(["report", "--follow", "--port", "0"])
            .arg(dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Self(child, address.trim().to_owned())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A line of metrics as if it were written now.
fn written_now(line: &str) -> String {
    let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
    line["time"] = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64().into();
    line.to_string()
}

#[test]
fn a_followed_run_is_shown_as_it_grows() {
    let Some(mut browser) = Browser::start() else { return };
    let parent = tempfile::tempdir().unwrap();
    let dir = run_dir(parent.path());
    let claimed = SavePath::claim(&dir).unwrap();
    let follower = Follower::start(&dir);
    browser.open(&follower.1, WIDE);
    browser.wait_for("document.querySelector('.lede').textContent.startsWith('St')");
    browser.value("window.isTheSame = true");
    let metrics = read("metrics.jsonl");
    let mut file = File::create(dir.join("metrics.jsonl")).unwrap();
    let mut lines = metrics.lines().map(written_now);
    for line in lines.by_ref().take(12) {
        writeln!(file, "{line}").unwrap();
    }
    browser
        .wait_for("document.querySelector('.lede').textContent.includes('Running: step 22 of 60')");
    browser.value("document.querySelector('#settings').open = true");
    browser.value("document.querySelector('svg[aria-label=Loss]').focus()");
    browser.press("Home");
    for line in lines {
        writeln!(file, "{line}").unwrap();
    }
    browser.wait_for("document.querySelector('.lede').textContent.includes('Finished 60 steps')");
    assert_eq!(browser.value("window.isTheSame"), true, "the page was loaded again");
    assert_eq!(browser.value("document.querySelector('#settings').open"), true);
    // Who looks at a value goes on looking at it.
    let focused = browser.value("document.activeElement.getAttribute('aria-label')");
    assert_eq!(focused, "Loss");
    let value = browser.text(".chart:has(svg[aria-label='Loss']) .value");
    assert_eq!(value, "step 1: training 39.47");
    assert!(browser.complaints.is_empty(), "{:?}", browser.complaints);
    drop((follower, claimed));
    browser.wait_for("document.querySelector('#link').textContent.startsWith('No answer')");
}
