//! A headless Chromium, driven over pipes by its own protocol: JSON messages that end in a zero byte.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use serde_json::{Value, json};

/// How a page is looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) dark: bool,
}

pub(crate) const WIDE: Screen = Screen { width: 1200, height: 900, dark: false };
pub(crate) const DARK: Screen = Screen { dark: true, ..WIDE };
pub(crate) const NARROW: Screen = Screen { width: 360, height: 740, dark: false };

/// A browser with one tab; ended when this is dropped.
pub(crate) struct Browser {
    process: Child,
    to: File,
    from: BufReader<File>,
    session: Option<String>,
    calls: u64,
    /// What the pages complained about.
    pub(crate) complaints: Vec<String>,
    _profile: tempfile::TempDir,
}

/// The names under which distributions install it.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

impl Browser {
    /// `None`, and a word about it, if none is installed.
    pub(crate) fn start() -> Option<Self> {
        let is_there = |name: &&str| {
            let version = Command::new(name).arg("--version").stderr(Stdio::null()).output();
            version.is_ok_and(|output| output.status.success())
        };
        let Some(name) = NAMES.into_iter().find(is_there) else {
            println!("skipped: no chromium (Debian: apt-get install chromium)");
            return None;
        };
        let profile = tempfile::tempdir().unwrap();
        let pipe = |name: &str| profile.path().join(name);
        for name in ["to", "from"] {
            assert!(Command::new("mkfifo").arg(pipe(name)).status().unwrap().success());
        }
        // The browser reads messages from descriptor 3 and writes them to 4. A pipe opens when both of
        // its ends do.
        let process = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<\"$TO\" 4>\"$FROM\"", name])
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"])
            .args(["--no-first-run", "--disable-background-networking", "--hide-scrollbars"])
            .args(["--disable-component-update", "--disable-sync", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", pipe("profile").display()))
            .envs([("TO", pipe("to")), ("FROM", pipe("from"))])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let to = File::options().write(true).open(pipe("to")).unwrap();
        let from = BufReader::new(File::open(pipe("from")).unwrap());
        let (session, calls, complaints) = (None, 0, Vec::new());
        let mut browser = Self { process, to, from, session, calls, complaints, _profile: profile };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let target = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", target);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// The result of `method`.
    pub(crate) fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut bytes = Vec::new();
            let length = self.from.read_until(0, &mut bytes).unwrap();
            assert!(length > 0, "the browser ended during {method}");
            bytes.pop();
            let mut reply: Value = serde_json::from_slice(&bytes).unwrap();
            if reply["id"] == self.calls {
                assert!(reply.get("error").is_none(), "{method}: {reply}");
                return reply["result"].take();
            }
            let is_complaint = reply["method"] == "Runtime.exceptionThrown"
                || (reply["method"] == "Log.entryAdded"
                    && reply["params"]["entry"]["level"] == "error");
            self.complaints.extend(is_complaint.then(|| reply["params"].to_string()));
        }
    }

    /// Opens `address` on `screen`.
    pub(crate) fn open(&mut self, address: &str, screen: Screen) {
        let Screen { width, height, dark } = screen;
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
        self.call("Page.navigate", json!({"url": address}));
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'");
    }

    /// The value of an expression in the page.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true});
        let mut result = self.call("Runtime.evaluate", parameters);
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].take()
    }

    /// Waits until an expression in the page is true.
    pub(crate) fn wait_for(&mut self, expression: &str) {
        let begun = Instant::now();
        while self.value(expression) != true {
            assert!(begun.elapsed() < Duration::from_secs(60), "{expression}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The text of the first element that `selector` finds.
    pub(crate) fn text(&mut self, selector: &str) -> String {
        let text = self.value(&format!("document.querySelector({selector:?}).textContent"));
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Presses a key.
    pub(crate) fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            self.call("Input.dispatchKeyEvent", json!({"type": kind, "key": key, "code": key}));
        }
    }

    /// Moves the pointer to the middle of the first element that `selector` finds.
    pub(crate) fn point_at(&mut self, selector: &str) {
        let middle = self.value(&format!(
            "(() => {{ const one = document.querySelector({selector:?}); one.scrollIntoView({{block: 'center'}}); \
             const box = one.getBoundingClientRect(); \
             return [box.left + box.width / 2, box.top + box.height / 2]; }})()"
        ));
        let event = json!({"type": "mouseMoved", "x": middle[0], "y": middle[1]});
        self.call("Input.dispatchMouseEvent", event);
    }

    /// Writes what is on screen to `path`, the first `height` pixels of the page.
    pub(crate) fn shoot(&mut self, path: &Path, height: u32) {
        let width = self.value("innerWidth");
        self.value("scrollTo(0, 0)");
        let clip = json!({"x": 0, "y": 0, "width": width, "height": height, "scale": 1});
        let asked = json!({"format": "png", "clip": clip, "captureBeyondViewport": true});
        let shot = self.call("Page.captureScreenshot", asked);
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(shot["data"].as_str().unwrap())
            .unwrap();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
