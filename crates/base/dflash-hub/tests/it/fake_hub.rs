//! A Hub on a port of this machine: the few routes that the client needs, with files from memory.
//!
//! Other crates' tests include this file by its path.

#![allow(dead_code, reason = "each of them needs a part of it")]

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Contents by path in the repository.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// The files in `dir`, for a repository like it.
pub(crate) fn files_of(dir: &Path) -> Files {
    let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    paths
        .filter(|path| path.is_file())
        .map(|path| (name(&path), std::fs::read(&path).unwrap()))
        .collect()
}

#[derive(Clone)]
pub(crate) struct Branch {
    /// `models/owner/name` or `datasets/owner/name`.
    pub(crate) repository: &'static str,
    pub(crate) name: &'static str,
    /// Forty hexadecimal digits.
    pub(crate) commit: String,
    pub(crate) files: Files,
}

/// How the Hub misbehaves.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum Mood {
    #[default]
    Well,
    /// Lists files but withholds them until terms are accepted.
    Gated,
    /// Asks everybody to log in.
    Private,
    /// Announces this file but sends an error page instead.
    Page(&'static str),
    /// Sends half of this file and then nothing.
    Stall(&'static str),
}

/// A running Hub; it serves until the test's process ends.
pub(crate) struct FakeHub {
    pub(crate) endpoint: String,
    mood: Arc<Mutex<Mood>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Branch {
    /// The only branch of `repository`, with the files of `dir`.
    pub(crate) fn main(repository: &'static str, dir: &Path) -> Self {
        Self { repository, name: "main", commit: "1".repeat(40), files: files_of(dir) }
    }
}

impl FakeHub {
    pub(crate) fn start(branches: Vec<Branch>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (mood, requests) =
            (Arc::<Mutex<Mood>>::default(), Arc::<Mutex<Vec<String>>>::default());
        let service =
            Service { branches, mood: Arc::clone(&mood), requests: Arc::clone(&requests) };
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let service = service.clone();
                thread::spawn(move || service.answer_all(stream));
            }
        });
        Self { endpoint, mood, requests }
    }

    pub(crate) fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    /// `METHOD path` of every request since the last call.
    pub(crate) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

#[derive(Clone)]
struct Service {
    branches: Vec<Branch>,
    mood: Arc<Mutex<Mood>>,
    requests: Arc<Mutex<Vec<String>>>,
}

struct Answer {
    status: u16,
    headers: String,
    body: Vec<u8>,
    /// Number of body bytes after which the connection stalls.
    stall: Option<usize>,
}

impl Answer {
    fn plain(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: String::new(), body: body.into(), stall: None }
    }
}

impl Service {
    fn answer_all(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        while let Some((method, path)) = read_request(&mut reader) {
            self.requests.lock().unwrap().push(format!("{method} {path}"));
            let answer = self.answer(&method, &path.replace("%2F", "/"));
            let head = format!(
                "HTTP/1.1 {} x\r\ncontent-length: {}\r\n{}\r\n",
                answer.status,
                answer.body.len(),
                answer.headers
            );
            let body = if method == "HEAD" { &[][..] } else { &answer.body };
            let sent = &body[..answer.stall.unwrap_or(body.len()).min(body.len())];
            let done = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(sent));
            if sent.len() < body.len() {
                thread::sleep(Duration::from_secs(600));
            }
            if done.is_err() {
                return;
            }
        }
    }

    fn answer(&self, method: &str, path: &str) -> Answer {
        let mood = *self.mood.lock().unwrap();
        if mood == Mood::Private {
            return Answer::plain(401, "");
        }
        let path = path.split('?').next().unwrap_or_default();
        let unknown = || Answer::plain(404, "");
        if let Some(rest) = path.strip_prefix("/api/") {
            return self.describe(rest).unwrap_or_else(unknown);
        }
        if mood == Mood::Gated {
            return Answer::plain(403, "");
        }
        let Some((branch, file)) = self.find(path) else { return unknown() };
        let content = &branch.files[file];
        match mood {
            Mood::Page(page) if page == file && method == "GET" => {
                Answer::plain(403, "<p>not now</p>")
            }
            mood => Answer {
                status: 200,
                headers: format!(
                    "etag: \"{:016x}\"\r\nx-repo-commit: {}\r\n",
                    hash(content),
                    branch.commit
                ),
                body: content.clone(),
                stall: matches!(mood, Mood::Stall(stalled) if stalled == file)
                    .then_some(content.len() / 2),
            },
        }
    }

    /// `KIND/OWNER/NAME`, `.../revision/REVISION` or `.../tree/COMMIT`.
    fn describe(&self, path: &str) -> Option<Answer> {
        let parts: Vec<&str> = path.splitn(5, '/').collect();
        let repository = parts.get(..3)?.join("/");
        let mut branches = self.branches.iter().filter(|branch| branch.repository == repository);
        let at = |branch: &&Branch| branch.commit == parts[4] || branch.name == parts[4];
        let branch = if parts.len() == 5 { branches.find(at)? } else { branches.next()? };
        let body = match parts.get(3) {
            Some(&"tree") => {
                let entry = |(path, content): (&String, &Vec<u8>)| {
                    let size = content.len();
                    format!(r#"{{"type":"file","oid":"0","size":{size},"path":"{path}"}}"#)
                };
                format!("[{}]", branch.files.iter().map(entry).collect::<Vec<_>>().join(","))
            }
            _ => format!(r#"{{"id":"{repository}","sha":"{}"}}"#, branch.commit),
        };
        Some(Answer::plain(200, body))
    }

    /// `/OWNER/NAME/resolve/COMMIT/FILE`; datasets behind `/datasets`.
    fn find<'a>(&self, path: &'a str) -> Option<(&Branch, &'a str)> {
        let (repository, rest) = path.strip_prefix('/')?.split_once("/resolve/")?;
        let (commit, file) = rest.split_once('/')?;
        let named = |branch: &&Branch| {
            branch.repository.trim_start_matches("models/") == repository && branch.commit == commit
        };
        let branch = self.branches.iter().find(named)?;
        branch.files.contains_key(file).then_some((branch, file))
    }
}

fn hash(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}

/// The method and path of the next request; headers are ignored.
fn read_request(reader: &mut impl BufRead) -> Option<(String, String)> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&count| count > 0)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let request = (words.next()?, words.next()?);
    let mut header = String::new();
    while reader.read_line(&mut header).ok()? > 0 && !header.trim().is_empty() {
        header.clear();
    }
    Some(request)
}
