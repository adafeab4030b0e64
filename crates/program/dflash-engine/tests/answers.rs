//! `dflash generate` and `dflash serve` as users run them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dflash_decode::{Conversation, DraftSource, Models, ModelsConfig};
use dflash_settings::{Device, Dtype, GenerateSettings};
use dflash_test_support::eventually;
use rustix::process::{Pid, Resource, Rlimit, prlimit};

#[path = "../../../decode/dflash-serve/tests/it/models.rs"]
mod models;

struct Saved(tempfile::TempDir);

impl Saved {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        models::save_models(dir.path());
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn engine(&self, command: &str) -> Command {
        let mut engine = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        engine.arg(command).arg("--target").arg(self.path("target")).env_remove("DFLASH_API_KEY");
        // Models this small gain nothing from a second thread, and other tests need the cores.
        engine.env("OMP_NUM_THREADS", "1").env_remove("NO_COLOR").stdin(Stdio::null());
        engine
    }

    fn generate(&self, arguments: &[&str]) -> Output {
        let mut command = self.engine("generate");
        command.args(["--max-new-tokens", "30"]).args(arguments).output().unwrap()
    }

    fn drafted(&self, arguments: &[&str]) -> Output {
        let draft = self.path("draft");
        self.generate(&[&["--draft", draft.to_str().unwrap()], arguments].concat())
    }
}

fn stdout(output: &Output) -> &str {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

#[test]
fn an_answer_is_the_same_with_and_without_the_draft() {
    let saved = Saved::new();
    let plain = saved.generate(&["hello"]);
    let text = stdout(&plain);
    assert!(text.len() > 5 && text.ends_with('\n'), "{text:?}");
    assert_eq!(stdout(&saved.drafted(&["hello"])), text);
    // From a file, and from standard input.
    std::fs::write(saved.path("prompt"), "hello").unwrap();
    let file = saved.path("prompt");
    assert_eq!(stdout(&saved.drafted(&["--prompt-file", file.to_str().unwrap()])), text);
    let mut piped = saved.engine("generate");
    piped.args(["--max-new-tokens", "30"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    assert_eq!(stdout(&child.wait_with_output().unwrap()), text);
    let stop = &text[3..6];
    let cut = saved.drafted(&["--stop", stop, "hello"]);
    assert_eq!(stdout(&cut).trim_end_matches('\n'), &text[..text.find(stop).unwrap()]);
    for other in [["--system", "be brief"], ["--chat-template-kwargs", "{\"shout\": true}"]] {
        assert_ne!(stdout(&saved.drafted(&[&other[..], &["hello"]].concat())), text);
    }
}

#[test]
fn samples_follow_their_seed() {
    let saved = Saved::new();
    let ask = |seed: &str| {
        let sampled =
            ["--temperature", "0.9", "--top-p", "0.9", "--top-k", "20", "--seed", seed, "hi"];
        stdout(&saved.drafted(&sampled)).to_owned()
    };
    assert_eq!(ask("1"), ask("1"));
    assert_ne!(ask("1"), ask("2"));
}

#[test]
fn blocks_are_shown_with_what_was_measured() {
    let saved = Saved::new();
    let text = stdout(&saved.drafted(&["hello"])).to_owned();
    // Proposes two per step whether or not that pays off.
    let shown = saved.drafted(&["--speculate", "2", "--show-blocks", "hello"]);
    // Without the rejected tokens and the markers, it equals the answer.
    let mut rest = stdout(&shown).to_owned();
    assert!(rest.contains("[-") && !rest.contains('\x1b'), "{rest}");
    while let Some((start, end)) = rest.find("[-").zip(rest.find("-]")) {
        rest.replace_range(start..end + 2, "");
    }
    assert_eq!(rest.replace("{+", "").replace("+}", ""), text);
    let said = stderr(&shown);
    for words in
        ["acceptance length ", " blocks; ", "30 tokens at ", "plain decoding ", " times as fast"]
    {
        assert!(said.contains(words) || text.len() < 31, "{words:?} is not in {said}");
    }
    let colored = saved.drafted(&["--speculate=2", "--show-blocks", "--color=always", "hello"]);
    assert!(stdout(&colored).contains("\x1b[31;9m"), "{}", stdout(&colored));
}

#[test]
fn prompts_that_cannot_be_answered_say_why() {
    let saved = Saved::new();
    let refuse = |arguments: &[&str], words: &str| {
        let output = saved.drafted(arguments);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
        assert!(output.stdout.is_empty());
    };
    refuse(&[&"long ".repeat(120)], "within the target's 512 positions");
    refuse(&["--raw", ""], "the prompt is empty");
    refuse(&["--prompt-file", "/no/such/file"], "/no/such/file");
    refuse(&["--stop", "", "hello"], "--stop is empty");
    refuse(&["--top-p", "0", "hello"], "--top-p is 0");
    refuse(&[""], "the prompt is empty");
    refuse(&[" \n"], "the prompt is empty");
    // Standard input that is closed or empty.
    refuse(&[], "the prompt is empty");
}

/// A terminal with `dflash generate` at its other end; killed when dropped.
struct Chat {
    child: Child,
    typed: std::fs::File,
    shown: std::sync::Arc<std::sync::Mutex<String>>,
}

impl Chat {
    fn start(saved: &Saved, arguments: &[&str]) -> Self {
        Self::start_in(saved, arguments, "xterm")
    }

    fn start_in(saved: &Saved, arguments: &[&str], terminal: &str) -> Self {
        let pty = nix::pty::openpty(None, None).unwrap();
        let other = || Stdio::from(pty.slave.try_clone().unwrap());
        // In its own session: this terminal is its controlling one and delivers Ctrl-C.
        let generate = saved.engine("generate");
        let mut command = Command::new("setsid");
        command.arg("-c").arg(generate.get_program()).args(generate.get_args()).args(arguments);
        command.env_remove("NO_COLOR").env("OMP_NUM_THREADS", "1").env("TERM", terminal);
        command.stdin(other()).stdout(other()).stderr(other());
        let child = command.spawn().unwrap();
        drop(pty.slave);
        let typed = std::fs::File::from(pty.master);
        let (mut reader, shown) = (typed.try_clone().unwrap(), std::sync::Arc::default());
        let said = std::sync::Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
                let said: &std::sync::Mutex<String> = &said;
                said.lock().unwrap().push_str(&text);
            }
        });
        Self { child, typed, shown }
    }

    fn shown(&self) -> String {
        self.shown.lock().unwrap().clone()
    }

    /// Types `keys` at a prompt and waits for the answer; returns the output since.
    fn turn(&self, keys: &str, answer: &str) -> String {
        let length = self.shown().len();
        (&self.typed).write_all(keys.as_bytes()).unwrap();
        eventually("the answer and another prompt", || {
            let shown = self.shown();
            let rest = shown[length..].split_once(answer);
            rest.is_some_and(|(_, rest)| rest.contains("> "))
        });
        self.shown()[length..].to_owned()
    }
}

impl Drop for Chat {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn turns_are_edited_and_called_back() {
    let saved = Saved::new();
    let chat = Chat::start(&saved, &["--max-new-tokens", "8", "--raw"]);
    eventually("the first prompt", || chat.shown().contains("> "));
    let expected = saved.generate(&["--max-new-tokens", "8", "--raw", "hello"]);
    let expected = stdout(&expected).lines().next().unwrap().to_owned();
    // "hallo" with the second letter replaced: three times left, then delete the letter before.
    chat.turn("hallo\x1b[D\x1b[D\x1b[D\x7fe\r", &expected);
    // Up, and Enter.
    let again = chat.turn("\x1b[A\r", &expected);
    assert!(again.contains("hello") && !again.contains("^[[A"), "{again:?}");
}

#[test]
fn a_dumb_terminal_gets_no_colors() {
    let saved = Saved::new();
    let draft = saved.path("draft");
    let shown = |terminal: &str| {
        let mut line = vec!["--draft", draft.to_str().unwrap(), "--speculate=2", "--show-blocks"];
        line.extend(["--max-new-tokens", "20", "hello"]);
        let mut chat = Chat::start_in(&saved, &line, terminal);
        eventually("it ends", || chat.child.try_wait().unwrap().is_some());
        // The last output may still be in transit.
        eventually("all is read", || chat.shown().contains("acceptance length"));
        chat.shown()
    };
    assert!(shown("xterm").contains("\x1b[31;9m"));
    let dumb = shown("dumb");
    assert!(!dumb.contains('\x1b') && dumb.contains("[-"), "{dumb:?}");
}

fn port_in(path: &Path) -> Option<u16> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// `dflash serve`, killed when dropped.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Starts it with full logging to the file `log`.
    fn start(saved: &Saved) -> Self {
        let port_file = saved.path("port");
        let mut command = saved.engine("serve");
        command.arg("--draft").arg(saved.path("draft"));
        command.args(["-vv", "--port", "0", "--port-file"]).arg(&port_file);
        command.stderr(std::fs::File::create(saved.path("log")).unwrap());
        let child = command.spawn().unwrap();
        eventually("the server tells its port", || port_in(&port_file).is_some());
        Self { child, port: port_in(&port_file).unwrap() }
    }

    /// Sends a request and leaves the connection open for the reply.
    fn send(&self, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
        );
        write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }

    fn ask(&self, path: &str, body: &str) -> String {
        let mut reply = String::new();
        self.send(path, body).read_to_string(&mut reply).unwrap();
        reply
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_pass_without_memory_drops_its_answers_and_not_the_server() {
    let saved = Saved::new();
    // Allows a prompt whose keys and values exceed the memory.
    for config in ["target/config.json", "draft/config.json"] {
        let text = std::fs::read_to_string(saved.path(config)).unwrap();
        let mut config_json: serde_json::Value = serde_json::from_str(&text).unwrap();
        config_json["max_position_embeddings"] = 400_000.into();
        std::fs::write(saved.path(config), config_json.to_string()).unwrap();
    }
    let server = Server::start(&saved);
    let short = r#"{"prompt": "hello", "max_tokens": 20, "temperature": 0}"#;
    let before = server.ask("/v1/completions", short);
    assert!(before.starts_with("HTTP/1.1 200 OK"), "{before}");
    let pid = Pid::from_raw(server.child.id().try_into().unwrap());
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let kib: u64 = line.split_whitespace().next().unwrap().parse().unwrap();
    let limit = |current| prlimit(pid, Resource::As, Rlimit { current, maximum: None }).unwrap();
    limit(Some((kib << 10) + (16 << 20)));
    let ids = vec!["97"; 120_000].join(",");
    let refused =
        server.ask("/v1/completions", &format!("{{\"prompt\": [{ids}], \"max_tokens\": 5}}"));
    let log = || std::fs::read_to_string(saved.path("log")).unwrap();
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}\n{}", log());
    assert!(refused.contains("ran out of memory") && refused.contains("--max-num-seqs"));
    let streamed = format!("{{\"prompt\": [{ids}], \"max_tokens\": 5, \"stream\": true}}");
    let broken = server.ask("/v1/completions", &streamed);
    assert!(broken.contains("ran out of memory") && broken.contains("[DONE]"), "{broken}");
    let text = |reply: &str| {
        let body = reply.split("\r\n\r\n").nth(1).unwrap();
        let answer: serde_json::Value = serde_json::from_str(body).unwrap();
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(text(&server.ask("/v1/completions", short)), text(&before));
    limit(None);
    assert_eq!(text(&server.ask("/v1/completions", short)), text(&before));
    let mut page = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    write!(page, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut metrics = String::new();
    page.read_to_string(&mut metrics).unwrap();
    let errors = metrics.lines().find(|line| line.contains("finished_reason=\"error\"")).unwrap();
    assert!(errors.ends_with(" 2"), "{errors}");
}

#[test]
fn a_prompt_is_told_by_a_server() {
    let saved = Saved::new();
    let server = Server::start(&saved);
    let body = r#"{"prompt": "hello", "max_tokens": 0, "echo": true, "logprobs": 1}"#;
    let reply = json_of(&server.ask("/v1/completions", body));
    let choice = &reply["choices"][0];
    assert_eq!(choice["text"], "hello", "{reply}");
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    assert!(logprobs.len() == 5 && logprobs[0].is_null(), "{reply}");
    assert!(logprobs[1..].iter().all(|share| share.as_f64().unwrap() < 0.0), "{reply}");
    let refused = server.ask("/v1/completions", r#"{"prompt": "hello", "max_tokens": 0}"#);
    assert!(refused.starts_with("HTTP/1.1 400 ") && refused.contains("without echo"), "{refused}");
}

#[test]
fn a_server_makes_the_call_that_is_asked_for() {
    let saved = Saved::new();
    let template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}\
        {% for c in m.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ c.function.name }}\", \
        \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}";
    std::fs::write(saved.path("target/chat_template.jinja"), template).unwrap();
    let server = Server::start(&saved);
    // It is logged once requests are accepted, after the port.
    let log = || std::fs::read_to_string(saved.path("log")).unwrap();
    eventually("the form of calls is said", || {
        log().contains("calls of tools as <tool_call>{json}")
    });
    let ask = |choice: &str| {
        let body = format!(
            r#"{{"seed": 1, "messages": [{{"role": "user", "content": "hi"}}], "tools": [{{"type": "function", "function":
                {{"name": "light", "parameters": {{"properties": {{"on": {{"type": "boolean"}}}}, "required": ["on"],
                "additionalProperties": false}}}}}}], "tool_choice":
                {{"type": "function", "function": {{"name": "{choice}"}}}}}}"#
        );
        server.ask("/v1/chat/completions", &body)
    };
    let reply = json_of(&ask("light"));
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{reply}");
    let function = &choice["message"]["tool_calls"][0]["function"];
    let arguments = function["arguments"].as_str().unwrap();
    let arguments: serde_json::Value = serde_json::from_str(arguments).unwrap();
    assert!(function["name"] == "light" && arguments["on"].is_boolean(), "{reply}");
    let refused = ask("lamp");
    assert!(refused.starts_with("HTTP/1.1 400 ") && refused.contains("not in tools"), "{refused}");
}

#[test]
fn a_server_ends_what_is_under_way_at_sigterm_and_logs_no_text() {
    let saved = Saved::new();
    let mut server = Server::start(&saved);
    let body = r#"{"messages": [{"role": "user", "content": "purple walrus"}], "max_tokens": 300}"#;
    let mut stream = server.send("/v1/chat/completions", body);
    // It has started before it is told to stop.
    std::thread::sleep(Duration::from_millis(100));
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").arg(pid).status().unwrap().success());
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 OK"), "{reply}");
    let answer: serde_json::Value =
        serde_json::from_str(reply.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(server.child.wait().unwrap().success());
    let log = std::fs::read_to_string(saved.path("log")).unwrap();
    assert!(log.contains("ready on http://127.0.0.1:"), "{log}");
    let line = log.lines().find(|line| line.contains("POST /v1/chat/completions 200 in "));
    let line = line.unwrap_or_else(|| panic!("no line for the request in {log}"));
    assert!(line.contains("INFO") && line.contains(" answer tokens, first token after "), "{line}");
    assert!(!log.contains("purple") && !log.contains(text), "{log}");
    // Nor letter by letter, as in the tokenizer's own lines.
    assert!(!log.contains("'w'"), "{log}");
}

#[test]
fn a_server_for_all_without_a_key_warns() {
    let saved = Saved::new();
    let said = |arguments: &[&str]| {
        let port_file = saved.path("port");
        let _ = std::fs::remove_file(&port_file);
        let mut command = saved.engine("serve");
        command.args(["--port", "0", "--port-file"]).arg(&port_file).args(arguments);
        let log = saved.path("warned");
        let mut child = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
        eventually("the server tells its port", || port_in(&port_file).is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        std::fs::read_to_string(log).unwrap()
    };
    let warning = "may use this server; pass --api-key";
    assert!(said(&["--host", "0.0.0.0"]).contains(warning));
    assert!(!said(&["--host", "0.0.0.0", "--api-key", "k"]).contains(warning));
    assert!(!said(&[]).contains(warning));
}

#[test]
fn a_target_is_timed_beside_a_plain_read_of_its_weights() {
    let saved = Saved::new();
    let bench = |arguments: &[&str]| {
        let mut engine = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        engine.args(["bench", "target", "--target"]).arg(saved.path("target")).args(arguments);
        engine.env("OMP_NUM_THREADS", "1").output().unwrap()
    };
    let few = ["--contexts", "0,40", "--prompts", "1,50", "--steps", "2"];
    let json = bench(&[&few[..], &["--rows", "3", "--json"]].concat());
    let report: serde_json::Value = serde_json::from_str(stdout(&json)).unwrap();
    let numbers = |list: &str, key: &str| -> Vec<f64> {
        let all = report[list].as_array().unwrap();
        all.iter().map(|one| one[key].as_f64().unwrap()).collect()
    };
    assert_eq!(numbers("steps", "context"), [0.0, 40.0]);
    assert_eq!(numbers("prompts", "tokens"), [1.0, 50.0]);
    let times = [numbers("steps", "ms"), numbers("steps", "floor_ms"), numbers("prompts", "ms")];
    assert!(times.concat().iter().all(|&ms| ms > 0.0), "{report}");
    // Cached entries are read too.
    assert!(times[1][1] > times[1][0], "{report}");
    assert!(report["resident_mib"].as_f64().unwrap() > report["before_mib"].as_f64().unwrap());
    let table = bench(&few);
    for line in ["load ", "memory ", "plain read ", "step         1 rows behind 40", "prompt "] {
        assert!(stdout(&table).contains(line), "{line}: {}", stdout(&table));
    }
    let none = bench(&["--prompts", "0"]);
    assert_eq!(none.status.code(), Some(1), "{}", stderr(&none));
    assert!(stderr(&none).contains("prompts"), "{}", stderr(&none));
}
#[test]
fn ctrl_c_stops_an_answer_and_keeps_the_chat() {
    let saved = Saved::new();
    // Long enough that nobody waits for its end.
    for config in ["target/config.json", "draft/config.json"] {
        let text = std::fs::read_to_string(saved.path(config)).unwrap();
        let mut config_json: serde_json::Value = serde_json::from_str(&text).unwrap();
        config_json["max_position_embeddings"] = 200_000.into();
        config_json["eos_token_id"] = 259.into();
        std::fs::write(saved.path(config), config_json.to_string()).unwrap();
    }
    let mut chat = Chat::start(&saved, &["--max-new-tokens", "150000"]);
    eventually("the first prompt", || chat.shown().contains("> "));
    for turn in ["hello\r", "again\r"] {
        let length = chat.shown().len();
        chat.typed.write_all(turn.as_bytes()).unwrap();
        // After the newline the terminal is no longer the editor's: only then is Ctrl-C a signal.
        eventually("an answer begins", || {
            let shown = chat.shown();
            shown[length..].split_once("\x1b[?2004l").is_some_and(|(_, text)| text.len() > 60)
        });
        let prompts = chat.shown().matches("> ").count();
        chat.typed.write_all(b"\x03").unwrap();
        eventually("the next prompt", || chat.shown().matches("> ").count() > prompts);
        // Longer than the deadline of a command that does not stop.
        std::thread::sleep(Duration::from_millis(4500));
        assert!(chat.child.try_wait().unwrap().is_none(), "{}", chat.shown());
    }
    chat.typed.write_all(b"\x04").unwrap();
    eventually("the end", || chat.child.try_wait().unwrap().is_some());
    assert_eq!(chat.child.wait().unwrap().code(), Some(0), "{}", chat.shown());
}

/// A terminal that presses Ctrl-C after this many bytes of output.
struct Presses<'a> {
    shown: Vec<u8>,
    at: usize,
    stop: &'a AtomicBool,
}

impl Write for Presses<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.shown.extend(bytes);
        self.stop.store(self.shown.len() >= self.at, Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn ctrl_c_after_an_answer_keeps_the_turn_that_was_shown() {
    let saved = Saved::new();
    let name = saved.path("draft").display().to_string();
    let models = Models::load(ModelsConfig {
        target_dir: saved.path("target"),
        target_name: "target".to_owned(),
        draft: DraftSource::Trained { name, dir: saved.path("draft") },
        allow_other_target: true,
        device: Device::Cpu,
        dtype: Dtype::Float32,
        threads: None,
        template_variables: None,
    })
    .unwrap();
    let settings: GenerateSettings = serde_json::from_value(serde_json::json!({
        "target": "target", "raw": false, "max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0,
        "seed": 0, "speculate": "2", "show_blocks": true, "color": "never",
        "allow_other_target": true, "device": "cpu", "dtype": "float32",
    }))
    .unwrap();
    // The output of a chat of two turns, the first interrupted after this many bytes.
    let chat = |at: usize| {
        let mut chat = Conversation::new(&models, &settings, false).unwrap();
        let stop = AtomicBool::new(at == 0);
        let mut first = Presses { shown: Vec::new(), at, stop: &stop };
        let answered = chat.answer("hello", &mut first, &stop);
        let mut second = Vec::new();
        chat.answer("again", &mut second, &AtomicBool::new(false)).unwrap();
        (answered.is_ok(), first.shown, second)
    };
    let (is_whole, first, second) = chat(usize::MAX);
    assert!(is_whole);
    // While plain decoding is timed, which shows nothing.
    assert_eq!(chat(first.len()), (false, first, second.clone()));
    // Before the answer's first word, the turn is withdrawn.
    let (is_whole, first, alone) = chat(0);
    assert!(!is_whole && first.is_empty() && alone != second);
}

/// The JSON of a reply with status 200.
fn json_of(reply: &str) -> serde_json::Value {
    assert!(reply.starts_with("HTTP/1.1 200 OK"), "{reply}");
    serde_json::from_str(reply.split("\r\n\r\n").nth(1).unwrap()).unwrap()
}

#[test]
fn answers_of_a_server_are_held_to_their_schema() {
    let saved = Saved::new();
    let server = Server::start(&saved);
    let ask = |schema: &str| {
        let body = format!(
            r#"{{"messages": [{{"role": "user", "content": "hi"}}], "temperature": 0.9, "n": 3, "response_format":
                {{"type": "json_schema", "json_schema": {{"name": "it", "strict": true, "schema": {schema}}}}}}}"#
        );
        server.ask("/v1/chat/completions", &body)
    };
    let reply = json_of(&ask(
        r#"{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
            "additionalProperties": false}"#,
    ));
    for choice in reply["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        assert!(value["ok"].is_boolean() && value.as_object().unwrap().len() == 1, "{text}");
    }
    let refused = ask(r#"{"type": "strin"}"#);
    assert!(refused.starts_with("HTTP/1.1 400 "), "{refused}");
    assert!(refused.contains("response_format.json_schema.schema cannot be used"), "{refused}");
}
