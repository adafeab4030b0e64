//! HTTP/1.1 as far as Hub clients need it: bodies whole or chunked, answers of known length, and
//! connections that break where a test wants.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// A request, with its body unless the connection is to break.
#[derive(Debug, Clone, Default)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Without the query; percent-encoding is kept.
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
}

/// What to do with a request whose head has arrived.
pub(crate) enum Next {
    /// Read the body and answer.
    Go,
    /// Read this many bytes of the body, then break the connection.
    Break(usize),
    /// Read the body, execute the request, then break the connection.
    Lose,
    /// Read nothing and keep the connection open.
    Stall,
    /// Read the body and send this answer.
    Say(Answer),
}

/// Answers requests.
pub(crate) trait Service: Send + Sync + 'static {
    fn begin(&self, request: &Request) -> Next;
    fn answer(&self, request: &Request) -> Answer;
}

impl Answer {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into() }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    fn write(&self, stream: &mut TcpStream, method: &str) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} x\r\n", self.status);
        // An answer to HEAD announces the length of the GET answer.
        head.push_str(&format!("content-length: {}\r\n", self.body.len()));
        self.headers
            .iter()
            .for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        if method == "HEAD" { Ok(()) } else { stream.write_all(&self.body) }
    }
}

/// Serves on a port of this machine until the test's process ends; returns its address.
pub(crate) fn serve(service: Arc<impl Service>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let service = Arc::clone(&service);
            // A disconnecting client does not matter.
            thread::spawn(move || _ = converse(&*service, stream));
        }
    });
    address
}

fn converse(service: &impl Service, mut stream: TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    loop {
        let mut request = head(&mut reader)?;
        let answer = match service.begin(&request) {
            Next::Break(bytes) => {
                let mut some = vec![0; bytes];
                reader.read_exact(&mut some).ok()?;
                return None;
            }
            Next::Lose => {
                request.body = read_body(&mut reader, &request)?;
                service.answer(&request);
                return None;
            }
            Next::Stall => {
                thread::sleep(Duration::from_secs(600));
                return None;
            }
            Next::Say(answer) => {
                read_body(&mut reader, &request)?;
                answer
            }
            Next::Go => {
                request.body = read_body(&mut reader, &request)?;
                service.answer(&request)
            }
        };
        answer.write(&mut stream, &request.method).ok()?;
    }
}

fn head(reader: &mut impl BufRead) -> Option<Request> {
    let line = line(reader)?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request =
        Request { method, path: path.into(), query: query.into(), ..Request::default() };
    loop {
        let line = self::line(reader)?;
        let Some((name, value)) = line.split_once(':') else { return Some(request) };
        request.headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
}

fn read_body(reader: &mut impl BufRead, request: &Request) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    if request.headers.get("transfer-encoding").is_some_and(|it| it.contains("chunked")) {
        loop {
            let size = usize::from_str_radix(line(reader)?.trim(), 16).ok()?;
            let start = body.len();
            body.resize(start + size, 0);
            reader.read_exact(&mut body[start..]).ok()?;
            line(reader)?;
            if size == 0 {
                return Some(body);
            }
        }
    }
    let length = request.headers.get("content-length").and_then(|it| it.parse().ok());
    body.resize(length.unwrap_or(0), 0);
    reader.read_exact(&mut body).ok()?;
    Some(body)
}

fn line(reader: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&count| count > 0)?;
    Some(line.trim_end_matches(['\r', '\n']).to_owned())
}
