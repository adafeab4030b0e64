//! What is to be committed, and the one request that makes it visible.

use std::collections::HashMap;
use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::Url;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::push::Publication;
use crate::push::api::{Api, Fault, JSON};
use crate::push::outgoing::Outgoing;
use crate::push::refusal::Refusal;

const ND_JSON: &str = "application/x-ndjson";
/// No more than this goes into the commit itself, which is made in memory, bytes. The Hub's own limit
/// is lower.
const MOST_INLINE: u64 = 64 << 20;
const PLAN: &str = "asking what to do with the files";
const COMMIT: &str = "committing";

/// What the Hub says of a file before it has it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Verdict {
    path: String,
    upload_mode: Mode,
    #[serde(default)]
    should_ignore: bool,
    /// What the repository has under that path: a SHA-256 of a large file, else Git's.
    #[serde(default)]
    oid: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Lfs,
    Regular,
}

/// A commit that is not yet made: the files that the repository does not have as they are.
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
    /// Asks the Hub how each file is to go.
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
        let answer = api.try_post(PLAN, url, (JSON, body)).await?;
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

    /// The files for the storage of large files.
    pub(crate) fn large(&self) -> impl Iterator<Item = &'a Outgoing> {
        let stored = self.changed.iter().filter(|(_, content)| matches!(content, Content::Stored));
        stored.map(|(file, _)| *file)
    }

    /// Makes the commit; returns its page, or `None` where nothing has changed.
    pub(crate) async fn commit(
        &self,
        api: &Api<'_>,
        publication: &Publication,
    ) -> Result<Option<String>, Refusal> {
        if self.changed.is_empty() {
            return Ok(None);
        }
        let url = endpoint(api, publication, "commit")?;
        let body = self.lines(&publication.message).into_bytes();
        let answer = match api.try_post(COMMIT, url, (ND_JSON, body)).await? {
            Err(Fault::Lost(why)) => return Err(Refusal::LostCommit(why)),
            answer => answer.map_err(|fault| of_revision(api, publication, COMMIT, fault))?,
        };
        let page = ["pullRequestUrl", "commitUrl"].iter().find_map(|key| answer[*key].as_str());
        let what = || "the commit has no page".to_owned();
        let page = page.ok_or_else(|| Refusal::Protocol { doing: COMMIT, what: what() })?;
        Ok(Some(page.to_owned()))
    }

    /// The commit as the Hub takes it: a line for its message, and one for each file.
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

/// How a file goes; `None` where the repository has it as it is.
fn content(file: &Outgoing, verdict: &Verdict) -> Result<Option<Content>, Refusal> {
    let there = verdict.oid.as_deref();
    // The storage of large files cannot hold nothing.
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

/// A missing branch is named; the repository itself has been found before.
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
