//! The chat page of `dflash serve` as a user opens it: in a browser, with a drafter, with n-grams and without.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use dflash_test_support::eventually;

#[path = "../../../decode/dflash-serve/tests/it/models.rs"]
mod models;

/// The exit code of the script where there is no browser.
const NO_BROWSER: i32 = 77;

/// `dflash serve`, killed when dropped.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(dir: &Path, arguments: &[&str]) -> Self {
        let port_file = dir.join("port");
        let _ = std::fs::remove_file(&port_file);
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        command.args(["serve", "--target"]).arg(dir.join("target")).args(arguments);
        command.args(["--port", "0", "--quiet", "--port-file"]).arg(&port_file);
        command.env_remove("DFLASH_API_KEY").env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
        let child = command.spawn().unwrap();
        let port = || std::fs::read_to_string(&port_file).ok()?.trim().parse::<u16>().ok();
        eventually("the server tells its port", || port().is_some());
        Self { child, url: format!("http://127.0.0.1:{}", port().unwrap()) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_page_shows_what_the_api_says() {
    let dir = tempfile::tempdir().unwrap();
    models::save_models(dir.path());
    let draft = dir.path().join("draft");
    let draft = draft.to_str().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scripts/pages-serve.py");
    for (server, page) in [
        (&["--draft", draft, "--speculate", "3", "--api-key", "k3y"][..], &["--key", "k3y"][..]),
        (&["--draft", "ngram", "--speculate", "3"], &[]),
        (&[], &[]),
    ] {
        let server = Server::start(dir.path(), server);
        let mut command = Command::new("python3");
        command.arg(&script).arg(&server.url).args(page).args(["--question", "tell me"]);
        let output = command.arg("--out").arg(dir.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(NO_BROWSER) {
            eprint!("{said}");
            return;
        }
        assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stdout));
        assert!(dir.path().join("serve-narrow.png").exists());
    }
}
