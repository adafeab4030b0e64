//! Runs with hidden states from servers that are late, killed, replaced, behind a faulty
//! connection, or hostile.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

use dflash_data::{DatasetWriter, Sample, WriterOptions};
use dflash_test_support::{ChaCha8Rng, Rng, eventually, random};

use crate::running::{Running, free_port, send};
use crate::world::{World, losses, sorted_checkpoints};

/// A real server of a world's target; killed when dropped.
pub(crate) struct Server(Child);

impl Server {
    fn start(world: &World, port: u16, layers: &[&str]) -> Self {
        Self::start_with(world, &world.path("target"), (port, layers), &[])
    }

    /// A server of the `target` with more flags.
    pub(crate) fn start_with(
        world: &World,
        target: &Path,
        (port, layers): (u16, &[&str]),
        more: &[&str],
    ) -> Self {
        let ready = world.path("ready");
        let _ = std::fs::remove_file(&ready);
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        command.arg("hidden-server").arg(target).arg("--target-layer-ids");
        command
            .args(layers)
            .args(more)
            .args(["--port", &port.to_string()])
            .arg("--port-file")
            .arg(&ready);
        command.env("OMP_NUM_THREADS", "1").stderr(Stdio::null());
        let server = Self(command.spawn().unwrap());
        eventually("the server is ready", || ready.exists());
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Flags of a run that fetches all states from the server at `endpoint`, with few ahead.
fn served<'a>(endpoint: &'a str, nowhere: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let flags = [
        "--endpoint",
        endpoint,
        "--hidden-states-path",
        nowhere,
        "--on-missing",
        "generate",
        "--epochs",
        "60",
        "--window-mib",
        "1",
        "--max-in-flight",
        "2",
    ];
    [&flags[..], more].concat()
}

#[test]
fn a_run_waits_for_its_server_and_knows_it_again() {
    let world = World::new();
    let port = free_port();
    let (endpoint, nowhere) = (format!("http://127.0.0.1:{port}"), world.path("nowhere"));
    let nowhere = nowhere.to_string_lossy();
    let flags = served(&endpoint, &nowhere, &[]);
    // The server comes after the run.
    let mut whole = Running::start(&mut world.command("whole", &flags));
    whole.await_said("waiting up to 60 s for a server", 1);
    let server = Server::start(&world, port, &["1", "2"]);
    assert!(whole.end().success(), "it waits");
    // It is killed and replaced: first by one with other layers, then by the right one.
    let mut part = Running::start(&mut world.command("part", &flags));
    part.await_step(&world.path("part"), 3);
    drop(server);
    part.await_said("asking again for up to 300 s", 1);
    let other = Server::start(&world, port, &["0"]);
    let part = part.end();
    assert_eq!(part.code, Some(1), "{}", part.stderr);
    assert!(part.stderr.contains("serves layers [0], the draft needs [1, 2]"), "{}", part.stderr);
    assert!(!part.stderr.contains("leaving out"), "{}", part.stderr);
    let trained = losses(&world.path("part")).last().unwrap().0;
    let saved = sorted_checkpoints(&world.path("part")).pop();
    assert_eq!(saved, Some(format!("step-{trained:06}")), "{}", part.stderr);
    drop(other);
    let resumed = [&flags[..], &["--resume"]].concat();
    let mut resumed = Running::start(&mut world.command("part", &resumed));
    resumed.await_said("for a server", 1);
    let server = Server::start(&world, port, &["1", "2"]);
    let resumed = resumed.end();
    assert!(resumed.success(), "{}", resumed.stderr);
    super::assert_same_losses(&losses(&world.path("whole")), &losses(&world.path("part")));
    drop(server);
}

#[test]
fn a_terminal_shows_that_a_server_is_slow_while_it_is() {
    let world = World::new();
    let port = free_port();
    let server = Server::start(&world, port, &["1", "2"]);
    let (endpoint, nowhere) = (format!("http://127.0.0.1:{port}"), world.path("nowhere"));
    let nowhere = nowhere.to_string_lossy();
    let mut line = world.arguments("out", &served(&endpoint, &nowhere, &["--epochs", "100000"]));
    line.retain(|word| word != "--no-progress");
    let command = format!("{} {}", env!("CARGO_BIN_EXE_dflash-engine"), line.join(" "));
    let log = world.path("typescript");
    // `script` provides a terminal and records its output.
    let mut script = Command::new("script");
    if script.arg("--version").output().is_err() {
        println!("skipped: no program `script` here");
        return;
    }
    let mut script = Command::new("script");
    script.args(["-qefc", &command]).arg(&log).env("OMP_NUM_THREADS", "1").env("TERM", "xterm");
    let mut run = Running::start(script.stdin(Stdio::null()));
    run.await_step(&world.path("out"), 3);
    let shown = || String::from_utf8_lossy(&std::fs::read(&log).unwrap()).into_owned();
    assert!(!shown().contains("waiting for hidden states"), "{}", shown());
    send("-STOP", server.0.id());
    eventually("the wait is shown", || shown().contains("waiting for hidden states: 3 s"));
    eventually("it goes on", || shown().contains("waiting for hidden states: 5 s"));
    send("-CONT", server.0.id());
    let step = losses(&world.path("out")).last().unwrap().0;
    run.await_step(&world.path("out"), step + 3);
}

/// The preflight reads the first row; with equal tokens all layers of a target may look alike.
#[test]
fn our_own_server_is_believed_whatever_the_first_row_says() {
    let world = World::new();
    let port = free_port();
    let _server = Server::start(&world, port, &["1", "2"]);
    let endpoint = format!("http://127.0.0.1:{port}");
    let nowhere = world.path("nowhere").display().to_string();
    let text = |row: i64| (0..20).map(move |t| (row * 13 + t * t) % 60);
    let equal: Vec<i64> = vec![7; 64];
    let spaces: Vec<i64> = [9; 40].into_iter().chain(text(3)).collect();
    for (name, first) in [("equal", equal), ("spaces", spaces)] {
        let data = world.path(name);
        let mut writer = DatasetWriter::create(&data, WriterOptions::default()).unwrap();
        let rows = std::iter::once(first).chain((0..6).map(|row| text(row).collect()));
        for input_ids in rows {
            let loss_mask = vec![true; input_ids.len()];
            writer.push(&Sample { input_ids, loss_mask }).unwrap();
        }
        writer.finish().unwrap();
        let data = data.display().to_string();
        let flags = served(&endpoint, &nowhere, &["--data-path", &data, "--epochs", "1"]);
        let run = world.train(&format!("{name}-run"), &flags);
        assert!(run.success(), "{name}: {}", run.stderr);
    }
}

#[test]
fn a_wire_that_turns_bits_changes_nothing_and_passwords_stay_secret() {
    let world = World::new();
    let port = free_port();
    let _server = Server::start(&world, port, &["1", "2"]);
    let nowhere = world.path("nowhere");
    let nowhere = nowhere.to_string_lossy();
    let straight = format!("http://me:secret@127.0.0.1:{port}/v1");
    let whole = world.train("whole", &served(&straight, &nowhere, &[]));
    assert!(whole.success(), "{}", whole.stderr);
    let bad = format!("127.0.0.1:{}", bad_wire(port, random()));
    let hurt = world.train("hurt", &served(&bad, &nowhere, &[]));
    assert!(hurt.success(), "{}", hurt.stderr);
    assert!(!hurt.stderr.contains("panicked"), "{}", hurt.stderr);
    let last = sorted_checkpoints(&world.path("whole")).pop().unwrap();
    assert_eq!(world.state("whole", &last), world.state("hurt", &last));
    let line = world.lines("hurt", "metrics.jsonl").pop().unwrap();
    assert!(line["stream"]["damaged"].as_u64().unwrap() > 0, "{line}");
    assert_eq!(line["stream"]["rejected"], 0, "{line}");
    // The password was sent, and is not recorded.
    let recorded = std::fs::read_to_string(world.path("whole").join("run.json")).unwrap();
    assert!(recorded.contains("***@127.0.0.1") && !recorded.contains("secret"), "{recorded}");
    let dumped = world.arguments("whole", &served(&straight, &nowhere, &["--dump-config"]));
    let dumped = world.engine(&dumped.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(dumped.stdout.contains("***@") && !dumped.stdout.contains("secret"));
    let gone = straight.replace(&port.to_string(), "9");
    let more = ["--wait-for-server", "0"];
    let refused = world.train("refused", &served(&gone, &nowhere, &more));
    assert!(refused.stderr.contains("***@127.0.0.1:9"), "{}", refused.stderr);
    assert!(!refused.stderr.contains("secret"), "{}", refused.stderr);
}

/// The port of a proxy to the server that flips a bit in one of twenty pieces.
fn bad_wire(server: u16, random: ChaCha8Rng) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for (number, client) in listener.incoming().flatten().enumerate() {
            let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { return };
            for (way, (from, to)) in [(&client, &server), (&server, &client)].iter().enumerate() {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let mut own = random.clone();
                own.set_stream((2 * number + way) as u64 + 1);
                thread::spawn(move || pass(from, to, own));
            }
        }
    });
    port
}

fn pass(mut from: TcpStream, mut to: TcpStream, mut random: ChaCha8Rng) {
    let mut piece = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut piece) {
        // Only the body, which is most of a message: the client's own tests cover headers.
        if length > 400 && random.random_range(0..20) == 0 {
            piece[random.random_range(300..length)] ^= 1 << random.random_range(0..8);
        }
        if to.write_all(&piece[..length]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// A server that claims to be a vLLM and names `file` for every prompt; returns its port.
fn hostile_vllm(file: String) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let mut request = vec![0; 1 << 16];
            let Ok(length) = client.read(&mut request) else { continue };
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            let prompt =
                request.split("\"prompt\":").nth(1).and_then(|rest| rest.split(']').next());
            let body = match prompt {
                None => r#"{"data":[{"id":"m","owned_by":"vllm"}]}"#.to_owned(),
                Some(prompt) => format!(
                    r#"{{"choices":[{{"prompt_token_ids":{prompt}]}}],
                        "kv_transfer_params":{{"hidden_states_path":"{file}"}}}}"#
                ),
            };
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n", body.len());
            let _ = client.write_all(format!("{head}connection: close\r\n\r\n{body}").as_bytes());
        }
    });
    port
}

#[test]
fn a_server_cannot_make_a_run_delete_the_target() {
    let world = World::new();
    let weights = world.path("target").join("model.safetensors");
    let before = std::fs::read(&weights).unwrap();
    let endpoint = format!("127.0.0.1:{}", hostile_vllm(weights.to_string_lossy().into_owned()));
    let (nowhere, storage) = (world.path("nowhere"), world.path("storage"));
    std::fs::create_dir(&storage).unwrap();
    let (nowhere, storage) = (nowhere.to_string_lossy(), storage.to_string_lossy());
    let check = |more: &[&str], expect: &str| {
        let run = world.train("out", &served(&endpoint, &nowhere, more));
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains(expect), "{}", run.stderr);
        assert!(std::fs::read(&weights).unwrap() == before, "the target is as it was");
        let _ = std::fs::remove_dir_all(world.path("out"));
    };
    check(&[], "pass its shared_storage_path as --shared-storage-path DIR");
    check(&["--shared-storage-path", &storage], "which is not a .safetensors file in");
    // Even if the user names the target's directory: its files belong to no prompt.
    let target = world.path("target");
    check(&["--shared-storage-path", &target.to_string_lossy()], "model.safetensors");
}
