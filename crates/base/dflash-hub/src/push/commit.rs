//! The commit: which files it has, and the one request that makes it visible.

use std::collections::HashMap;
use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use dflash_settings::shown_endpoint;
use reqwest::Url;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::push::Publication;
use crate::push::api::{ATTEMPTS, Api, FIRST_PAUSE, Fault, JSON};
use crate::push::outgoing::Outgoing;
use crate::push::refusal::Refusal;

const ND_JSON: &str = "application/x-ndjson";
/// Largest total size of files inside the commit, which is built in memory, bytes. The Hub's own
/// limit is lower.
const MOST_INLINE: u64 = 64 << 20;
const PLAN: &str = "asking what to do with the files";
const COMMIT: &str = "committing";
const LOOK: &str = "looking for the commit";
/// Number of pull requests with the same title that are checked.
const MOST_PROPOSALS: usize = 10;

/// The Hub's answer about a file before it is sent.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Verdict {
    path: String,
    upload_mode: Mode,
    #[serde(default)]
    should_ignore: bool,
    /// The repository's version under that path: a SHA-256 of a large file, else Git's id.
    #[serde(default)]
    oid: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Lfs,
    Regular,
}

/// A commit that has not been made yet: the files that differ from the repository's.
#[derive(Debug)]
pub(crate) struct Draft<'a> {
    changed: Vec<(&'a Outgoing, Content)>,
}

#[derive(Debug)]
enum Content {
    Stored,
    Inline(Vec<u8>),
}

impl<'a> Draft<'a> {
    /// Asks the Hub how each file should be sent.
    pub(crate) async fn plan(
        api: &Api<'_>,
        publication: &Publication,
        files: &'a [Outgoing],
    ) -> Result<Self, Refusal> {
        let described = files.iter().map(|file| {
            let sample = STANDARD.encode(&file.sample);
            json!({"path": file.path, "size": file.bytes, "sample": sample})
        });
        let body = json!({"files": described.collect::<Vec<_>>()}).to_string().into_bytes();
        let url = endpoint(api, publication, "preupload")?;
        let answer = api.try_post(PLAN, url, JSON, body).await?;
        let mut answer = answer.map_err(|fault| of_revision(api, publication, PLAN, fault))?;
        let verdicts: Vec<Verdict> = serde_json::from_value(answer["files"].take())
            .map_err(|error| Refusal::Protocol { doing: PLAN, what: error.to_string() })?;
        let by_path: HashMap<&str, &Verdict> =
            verdicts.iter().map(|verdict| (verdict.path.as_str(), verdict)).collect();
        let mut changed = Vec::new();
        for file in files {
            let verdict = by_path.get(file.path.as_str()).ok_or_else(|| {
                let what = format!("it says nothing of {}", file.path);
                Refusal::Protocol { doing: PLAN, what }
            })?;
            if verdict.should_ignore {
                return Err(Refusal::Ignored(file.path.clone()));
            }
            changed.extend(content(file, verdict)?.map(|content| (file, content)));
        }
        Ok(Self { changed })
    }

    /// The files for the large-file storage.
    pub(crate) fn large(&self) -> impl Iterator<Item = &'a Outgoing> {
        let stored = self.changed.iter().filter(|(_, content)| matches!(content, Content::Stored));
        stored.map(|(file, _)| *file)
    }

    /// Makes the commit; returns its page, or `None` if nothing has changed. A commit must not be
    /// made twice: if no answer comes, the Hub is asked for its state before the request is
    /// repeated.
    pub(crate) async fn commit(
        &self,
        api: &Api<'_>,
        publication: &Publication,
        files: &[Outgoing],
    ) -> Result<Option<String>, Refusal> {
        if self.changed.is_empty() {
            return Ok(None);
        }
        // An earlier push may have lost its answer too.
        if publication.create_pr
            && let Ok(Some(page)) = proposal(api, publication, files).await
        {
            return Ok(Some(page));
        }
        let body = Bytes::from(self.lines(&publication.message));
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            let url = endpoint(api, publication, "commit")?;
            let fault = match api.post_once(COMMIT, url, ND_JSON, body.clone()).await? {
                Ok(answer) => return page_in(&answer).map(Some),
                Err(fault) => fault,
            };
            if !fault.may_pass() {
                return Err(of_revision(api, publication, COMMIT, fault));
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
            match found(api, publication, files).await {
                Ok(Some(page)) => return Ok(Some(page)),
                Ok(None) if attempt < ATTEMPTS => {}
                Err(_) if attempt < ATTEMPTS && !matches!(fault, Fault::Lost(_)) => {}
                _ => {
                    return Err(match fault {
                        Fault::Lost(why) => Refusal::LostCommit(why),
                        fault => of_revision(api, publication, COMMIT, fault),
                    });
                }
            }
        }
        unreachable!("the last attempt returns")
    }

    /// The commit in the Hub's format: one line for its message, and one per file.
    fn lines(&self, message: &str) -> String {
        let header = json!({"key": "header", "value": {"summary": message, "description": ""}});
        let mut lines = format!("{header}\n");
        for (Outgoing { path, bytes, sha256, .. }, content) in &self.changed {
            let line: Value = match content {
                Content::Stored => json!({"key": "lfsFile", "value":
                    {"path": path, "algo": "sha256", "oid": sha256, "size": bytes}}),
                Content::Inline(content) => json!({"key": "file", "value":
                    {"path": path, "encoding": "base64", "content": STANDARD.encode(content)}}),
            };
            writeln!(lines, "{line}").expect("a string takes all");
        }
        lines
    }
}

/// The page that an answer to a commit names.
fn page_in(answer: &Value) -> Result<String, Refusal> {
    let page = ["pullRequestUrl", "commitUrl"].iter().find_map(|key| answer[*key].as_str());
    let what = || "the commit has no page".to_owned();
    Ok(page.ok_or_else(|| Refusal::Protocol { doing: COMMIT, what: what() })?.to_owned())
}

/// The page of the commit or pull request that has exactly `files`, if there is one.
async fn found(
    api: &Api<'_>,
    publication: &Publication,
    files: &[Outgoing],
) -> Result<Option<String>, Refusal> {
    if publication.create_pr {
        return proposal(api, publication, files).await;
    }
    if !Draft::plan(api, publication, files).await?.changed.is_empty() {
        return Ok(None);
    }
    let name = publication.name()?;
    let parts = ["api", "models", name.owner, name.name, "revision", publication.revision()];
    let head = api.get(LOOK, api.url(parts)).await?;
    let sha = head["sha"].as_str().unwrap_or_default();
    Ok(Some(page(api, [name.owner, name.name, "commit", sha])))
}

/// The page of an open pull request with this title that has exactly `files`.
async fn proposal(
    api: &Api<'_>,
    publication: &Publication,
    files: &[Outgoing],
) -> Result<Option<String>, Refusal> {
    let name = publication.name()?;
    let mut url = api.url(["api", "models", name.owner, name.name, "discussions"]);
    url.query_pairs_mut().append_pair("type", "pull_request").append_pair("status", "open");
    let listed = api.get(LOOK, url).await?;
    let is_alike = |one: &&Value| {
        let is_open = ["open", "draft"].iter().any(|status| one["status"] == *status);
        one["isPullRequest"] == true && is_open && one["title"] == publication.message.as_str()
    };
    let alike = listed["discussions"].as_array().into_iter().flatten().filter(is_alike);
    for number in alike.filter_map(|one| one["num"].as_u64()).take(MOST_PROPOSALS) {
        let revision = Some(format!("refs/pr/{number}"));
        let at = Publication { revision, create_pr: false, ..publication.clone() };
        if Draft::plan(api, &at, files).await?.changed.is_empty() {
            let parts = [name.owner, name.name, "discussions", &number.to_string()];
            return Ok(Some(page(api, parts)));
        }
    }
    Ok(None)
}

/// The address of a page for people, without a password.
fn page(api: &Api<'_>, parts: [&str; 4]) -> String {
    shown_endpoint(api.url(parts).as_str())
}

/// How a file is sent; `None` if the repository has this version already.
fn content(file: &Outgoing, verdict: &Verdict) -> Result<Option<Content>, Refusal> {
    let there = verdict.oid.as_deref();
    // The large-file storage cannot hold an empty file.
    if verdict.upload_mode == Mode::Lfs && file.bytes > 0 {
        return Ok((there != Some(&file.sha256)).then_some(Content::Stored));
    }
    if file.bytes > MOST_INLINE {
        let what = format!("it wants {} of {} bytes in the commit itself", file.path, file.bytes);
        return Err(Refusal::Protocol { doing: PLAN, what });
    }
    let content = file.read()?;
    Ok((there != Some(&Outgoing::git_id(&content))).then_some(Content::Inline(content)))
}

/// `/api/models/OWNER/NAME/VERB/REVISION`.
fn endpoint(api: &Api<'_>, publication: &Publication, verb: &str) -> Result<Url, Refusal> {
    let name = publication.name()?;
    let parts = ["api", "models", name.owner, name.name, verb, publication.revision()];
    let mut url = api.url(parts);
    if publication.create_pr {
        url.query_pairs_mut().append_pair("create_pr", "1");
    }
    Ok(url)
}

/// Names a missing branch; the repository itself has been found before.
fn of_revision(
    api: &Api<'_>,
    publication: &Publication,
    doing: &'static str,
    fault: Fault,
) -> Refusal {
    match fault {
        Fault::Status { status: 404, .. } => Refusal::NoRevision(publication.revision().to_owned()),
        fault => api.refusal(doing, fault),
    }
}
