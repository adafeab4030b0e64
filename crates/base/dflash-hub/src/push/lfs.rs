//! Large files: Git LFS's batch protocol, with the Hub's multipart extension.

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, ETAG};
use reqwest::{Body, Method, RequestBuilder, Response, Url};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::push::Publication;
use crate::push::api::{Api, Fault, JSON, LFS_JSON, lost};
use crate::push::meter::Meter;
use crate::push::outgoing::{Content, Outgoing};
use crate::push::refusal::Refusal;

/// Read and sent at once, bytes.
const PIECE: u64 = 1 << 20;
/// An upload without progress for this long counts as lost.
const QUIET: Duration = Duration::from_secs(120);
/// A mirror's answers contain the Hub's own address, which must be replaced.
const HUB: &str = "https://huggingface.co";
const BATCH: &str = "asking where to put a large file";
const SEND: &str = "sending a large file";
const CHECK: &str = "having a large file checked";

/// The Hub's instructions for a file.
#[derive(Debug, Deserialize)]
struct Object {
    actions: Option<Actions>,
    error: Option<ObjectError>,
}

#[derive(Debug, Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Debug, Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct ObjectError {
    code: u16,
    message: String,
}

/// A range of a file that is sent in one request.
#[derive(Debug, Clone, Copy)]
struct UploadRange {
    start: u64,
    bytes: u64,
}

/// Uploads `file` to the large-file storage; returns whether it was not there yet.
pub(crate) async fn upload(
    api: &Api<'_>,
    publication: &Publication,
    file: &Outgoing,
    meter: &Meter,
) -> Result<bool, Refusal> {
    let Some(Actions { upload, verify }) = ask(api, publication, file).await? else {
        return Ok(false);
    };
    let Some(upload) = upload else { return Ok(false) };
    match upload.header.get("chunk_size") {
        Some(size) => send_parts(api, &upload, size, file, meter).await?,
        None => {
            let whole = UploadRange { start: 0, bytes: file.bytes };
            let url = address(api, &upload.href)?;
            put(api, &url, &upload.header, file, whole, meter).await?;
        }
    }
    if let Some(verify) = verify {
        let body = json!({"oid": file.sha256, "size": file.bytes});
        let url = address(api, &verify.href)?;
        answered(api, api.request(Method::POST, url), JSON, body).await?;
    }
    Ok(true)
}

/// Where the Hub wants the file; `None` if it has it.
async fn ask(
    api: &Api<'_>,
    publication: &Publication,
    file: &Outgoing,
) -> Result<Option<Actions>, Refusal> {
    let name = publication.name()?;
    let body = json!({
        "operation": "upload",
        "transfers": ["basic", "multipart"],
        "objects": [{"oid": file.sha256, "size": file.bytes}],
        "hash_algo": "sha256",
        "ref": {"name": publication.revision()},
    });
    let git = format!("{}.git", name.name);
    let url = api.url([name.owner, &git, "info", "lfs", "objects", "batch"]);
    let mut answer = api.post(BATCH, url, LFS_JSON, body.to_string().into_bytes()).await?;
    let transfer = answer["transfer"].as_str().unwrap_or("basic");
    if !["basic", "multipart"].contains(&transfer) {
        return Err(protocol(BATCH, format!("it wants the file by {transfer}")));
    }
    let mut objects: Vec<Object> = serde_json::from_value(answer["objects"].take())
        .map_err(|error| protocol(BATCH, error.to_string()))?;
    match objects.pop() {
        Some(Object { error: Some(error), .. }) => {
            let (status, said, body) = (error.code, error.message, String::new());
            Err(api.refusal(BATCH, Fault::Status { status, code: None, said, body }))
        }
        Some(object) => Ok(object.actions),
        None => Err(protocol(BATCH, "it says nothing of the file".to_owned())),
    }
}

/// Sends the file in parts to their own addresses, and then the list of results.
async fn send_parts(
    api: &Api<'_>,
    upload: &Action,
    size: &Value,
    file: &Outgoing,
    meter: &Meter,
) -> Result<(), Refusal> {
    let parse = || size.as_u64().or_else(|| size.as_str()?.parse().ok()).filter(|&size| size > 0);
    let wrong = || protocol(BATCH, format!("chunk_size is {size}"));
    let size = parse().ok_or_else(wrong)?;
    let numbered = upload
        .header
        .iter()
        .filter_map(|(key, url)| Some((key.parse().ok()?, url.as_str()?.to_owned())));
    let urls: BTreeMap<u64, String> = numbered.collect();
    if urls.len() as u64 != file.bytes.div_ceil(size) {
        let what = format!("{} parts of {size} bytes for {} bytes", urls.len(), file.bytes);
        return Err(protocol(BATCH, what));
    }
    let mut parts = Vec::new();
    for (place, (_, url)) in urls.into_iter().enumerate() {
        let start = place as u64 * size;
        let part = UploadRange { start, bytes: size.min(file.bytes - start) };
        let answer = put(api, &address(api, &url)?, &Map::new(), file, part, meter).await?;
        let etag = answer.headers().get(ETAG).and_then(|etag| etag.to_str().ok());
        let etag = etag.ok_or_else(|| protocol(SEND, "a part came back without an etag".into()))?;
        parts.push(json!({"partNumber": place + 1, "etag": etag}));
    }
    let body = json!({"oid": file.sha256, "parts": parts});
    // Its address includes its own permission, like those of the parts.
    let request = api.plain(Method::POST, address(api, &upload.href)?);
    answered(api, request, LFS_JSON, body).await
}

/// Sends a part. The addresses belong to the storage and include their own permission, so the token
/// is not sent.
async fn put(
    api: &Api<'_>,
    url: &Url,
    headers: &Map<String, Value>,
    file: &Outgoing,
    part: UploadRange,
    meter: &Meter,
) -> Result<Response, Refusal> {
    let request = || {
        meter.begin();
        let body = body(file, part, meter.clone())?;
        let request = api.plain(Method::PUT, url.clone()).header(CONTENT_LENGTH, part.bytes);
        let words = headers.iter().filter_map(|(key, value)| Some((key, value.as_str()?)));
        let request = words.fold(request, |request, (key, value)| request.header(key, value));
        let sent = request.body(body).send();
        Ok(watched(sent, meter.clone()))
    };
    let answer = api.send(request).await.map_err(|fault| match fault {
        // The storage does not check tokens: if it refuses, the address has expired.
        Fault::Status { status: status @ (401 | 403), said, .. } => {
            Refusal::Status { doing: SEND, status, said: api.one_line(&said) }
        }
        fault => api.refusal(SEND, fault),
    })?;
    meter.end();
    Ok(answer)
}

/// Ends a request without progress.
async fn watched(
    request: impl Future<Output = reqwest::Result<Response>>,
    meter: Meter,
) -> Result<Response, Fault> {
    let quiet = async {
        loop {
            let before = meter.moves();
            tokio::time::sleep(QUIET).await;
            if meter.moves() == before {
                return;
            }
        }
    };
    tokio::select! {
        answer = request => answer.map_err(|error| lost(&error)),
        () = quiet => Err(Fault::Lost(format!("nothing moved for {} s", QUIET.as_secs()))),
    }
}

/// The bytes of a part, read while they are sent.
fn body(file: &Outgoing, part: UploadRange, meter: Meter) -> Result<Body, Refusal> {
    let path = match &file.content {
        Content::File(path) => path,
        Content::Memory(content) => {
            let end = (part.start + part.bytes) as usize;
            meter.add(part.bytes);
            return Ok(Body::from(content[part.start as usize..end].to_vec()));
        }
    };
    let fault = |source| Refusal::File { path: path.clone(), source };
    let mut open = std::fs::File::open(path).map_err(fault)?;
    if open.metadata().map_err(fault)?.len() != file.bytes {
        return Err(Refusal::Changed(path.clone()));
    }
    open.seek(SeekFrom::Start(part.start)).map_err(fault)?;
    let pieces = stream::unfold((open, part.bytes), move |(mut open, left)| {
        let meter = meter.clone();
        async move {
            if left == 0 {
                return None;
            }
            let piece = next_piece(&mut open, left);
            let read = piece.as_ref().map_or(left, |piece| piece.len() as u64);
            meter.add(read);
            Some((piece, (open, left - read)))
        }
    });
    Ok(Body::wrap_stream(pieces))
}

fn next_piece(open: &mut std::fs::File, left: u64) -> std::io::Result<Bytes> {
    let mut piece = vec![0; left.min(PIECE) as usize];
    open.read_exact(&mut piece)?;
    Ok(piece.into())
}

/// Posts to an address that the Hub gave, whose answer has no content.
async fn answered(
    api: &Api<'_>,
    request: RequestBuilder,
    kind: &'static str,
    body: Value,
) -> Result<(), Refusal> {
    let request = request.header(CONTENT_TYPE, kind).timeout(QUIET).body(body.to_string());
    let repeated = || {
        let sent = request.try_clone().expect("a body in memory").send();
        Ok(async { sent.await.map_err(|error| lost(&error)) })
    };
    let answer = api.send(repeated).await;
    answer.map(drop).map_err(|fault| api.refusal(CHECK, fault))
}

/// An address as it is reachable from here: a mirror passes on the Hub's own.
fn address(api: &Api<'_>, href: &str) -> Result<Url, Refusal> {
    let ours = api.address().trim_end_matches('/');
    let href = match href.strip_prefix(HUB) {
        Some(path) if path.starts_with('/') => format!("{ours}{path}"),
        _ => href.to_owned(),
    };
    let url = Url::parse(&href).map_err(|error| protocol(BATCH, error.to_string()))?;
    let is_web = matches!(url.scheme(), "http" | "https");
    if is_web { Ok(url) } else { Err(protocol(BATCH, format!("an address by {}", url.scheme()))) }
}

fn protocol(doing: &'static str, what: String) -> Refusal {
    Refusal::Protocol { doing, what }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::push::token::Token;

    #[test]
    fn a_mirror_s_addresses_are_reached_through_it_and_the_token_stays_with_the_hub() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "hf_secret").unwrap();
        let token = Token::from_file(&path).unwrap();
        let api = Api::open("http://mirror:8080/hub/", &token).unwrap();
        let check = |href: &str, expect: &str, bearer: bool| {
            let url = address(&api, href).unwrap();
            assert_eq!(url.as_str(), expect);
            let request = api.request(Method::POST, url).build().unwrap();
            assert_eq!(request.headers().contains_key("authorization"), bearer, "{href}");
        };
        check("https://huggingface.co/api/x?y=1", "http://mirror:8080/hub/api/x?y=1", true);
        check("http://mirror:8080/z", "http://mirror:8080/z", true);
        check("https://storage.example/a?sig=1", "https://storage.example/a?sig=1", false);
        check(
            "https://huggingface.co.evil.example/",
            "https://huggingface.co.evil.example/",
            false,
        );
        assert!(address(&api, "file:///etc/passwd").is_err());
        let api = Api::open("https://huggingface.co", &token).unwrap();
        let url = address(&api, "https://huggingface.co/verify").unwrap();
        assert_eq!(url.as_str(), "https://huggingface.co/verify");
    }
}
