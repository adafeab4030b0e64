//! Files of one commit, from the Hub into the cache.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use reqwest::Url;

use crate::cache::{Cache, fault, is_commit};
use crate::error::Reason;
use crate::progress::Meter;
use crate::web::{Head, Web, unreachable};

/// Files on their way at the same time.
const AT_ONCE: usize = 8;
/// How often it is looked whether another process has fetched a content.
const LOCK_POLL: Duration = Duration::from_millis(100);
/// Before anybody hears that another process fetches it.
const PATIENCE: Duration = Duration::from_secs(10);

/// A repository of the Hub, and its part of the cache.
#[derive(Debug)]
pub(crate) struct Repository<'a> {
    pub(crate) web: &'a Web,
    pub(crate) cache: Cache,
    /// `models` or `datasets`.
    pub(crate) kind: &'static str,
    pub(crate) owner: &'a str,
    pub(crate) name: &'a str,
}

/// A content that the cache lacks.
#[derive(Debug)]
struct Content<'a> {
    file: &'a str,
    head: Head,
}

impl Repository<'_> {
    /// `OWNER/NAME`.
    pub(crate) fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// What the Hub says of the repository, or of something in it.
    pub(crate) fn api<'p>(&'p self, rest: impl IntoIterator<Item = &'p str>) -> Url {
        self.web.url(["api", self.kind, self.owner, self.name].into_iter().chain(rest))
    }

    /// The directory of `revision`, which may lack files.
    pub(crate) fn cached(&self, revision: &str) -> Result<PathBuf, Reason> {
        let dir = self.cache.commit_of(revision).map(|commit| self.cache.snapshot(&commit));
        dir.filter(|dir| dir.is_dir()).ok_or(Reason::NotCached)
    }

    /// The directory of `revision`, with what the repository has of `files`.
    pub(crate) async fn fetch(
        &self,
        revision: &str,
        files: &[String],
        meter: &Meter,
    ) -> Result<PathBuf, Reason> {
        let unknown = |reason| match reason {
            Reason::NotThere => Reason::UnknownRevision(revision.to_owned()),
            reason => reason,
        };
        let commit = self.commit(revision).await.map_err(unknown)?;
        let listed = self.listing(&commit).await.map_err(unknown)?;
        let dir = self.cache.snapshot(&commit);
        let wanted = listed.iter().filter(|file| files.iter().any(|name| is_named(name, file)));
        let absent = wanted.filter(|file| !dir.join(file).exists());
        let heads = stream::iter(absent.map(|file| self.content(&commit, file)));
        let contents: Vec<Content<'_>> = heads.buffer_unordered(AT_ONCE).try_collect().await?;
        // Files with the same content share it.
        let missing: BTreeMap<&str, &Content<'_>> = contents
            .iter()
            .filter(|content| !self.cache.blob(&content.head.etag).exists())
            .map(|content| (content.head.etag.as_str(), content))
            .collect();
        meter.expect(missing.len(), missing.values().map(|content| content.head.bytes).sum());
        let fetched = missing.into_values().map(|content| self.download(&commit, content, meter));
        stream::iter(fetched).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        for Content { file, head } in &contents {
            self.cache.link(&commit, file, &head.etag)?;
        }
        if !is_commit(revision) {
            self.cache.note(revision, &commit)?;
        }
        Ok(dir)
    }

    async fn commit(&self, revision: &str) -> Result<String, Reason> {
        if is_commit(revision) {
            return Ok(revision.to_owned());
        }
        let facts = self.web.json(self.api(["revision", revision])).await?;
        let commit = facts["sha"].as_str().filter(|commit| is_commit(commit));
        let none = || Reason::Client(format!("the Hub names no commit of revision {revision}"));
        commit.map(str::to_owned).ok_or_else(none)
    }

    /// The paths of all files.
    async fn listing(&self, commit: &str) -> Result<Vec<String>, Reason> {
        let mut url = self.api(["tree", commit]);
        url.set_query(Some("recursive=true"));
        let entries = self.web.list(url).await?;
        let files = entries.iter().filter(|entry| entry["type"] == "file");
        Ok(files.filter_map(|entry| entry["path"].as_str().map(str::to_owned)).collect())
    }

    fn url(&self, commit: &str, file: &str) -> Url {
        // Models are what an address without a kind means.
        let kind = (self.kind != "models").then_some(self.kind);
        let parts = [self.owner, self.name, "resolve", commit];
        self.web.url(kind.into_iter().chain(parts).chain(file.split('/')))
    }

    async fn content<'a>(&self, commit: &str, file: &'a str) -> Result<Content<'a>, Reason> {
        let head = self.web.head(self.url(commit, file)).await?;
        Ok(Content { file, head })
    }

    /// Fetches one content, unless another process did it meanwhile.
    async fn download(
        &self,
        commit: &str,
        Content { file, head }: &Content<'_>,
        meter: &Meter,
    ) -> Result<(), Reason> {
        let _right = self.right_to(&head.etag, meter).await?;
        let blob = self.cache.blob(&head.etag);
        if !blob.exists() {
            let (mut aside, path) = self.cache.begin(&head.etag)?;
            let found = self.stream(&self.url(commit, file), (&mut aside, &path), meter).await;
            let found = found.map_err(|reason| match reason {
                // It was announced: what is refused is this file.
                Reason::NoLogin | Reason::Refused | Reason::NotThere => {
                    Reason::Client(format!("of {file}, {reason}"))
                }
                reason => reason,
            })?;
            // A proxy's page in its place would be used from then on.
            if found != head.bytes {
                let _ = fs::remove_file(&path);
                let (file, expected) = (file.to_string(), head.bytes);
                return Err(Reason::WrongSize { file, expected, found });
            }
            let kept = aside.sync_all().and_then(|()| fs::rename(&path, &blob));
            kept.map_err(|error| fault(&blob, &error))?;
        }
        meter.whole();
        Ok(())
    }

    /// Returns the bytes that came.
    async fn stream(
        &self,
        url: &Url,
        (aside, path): (&mut File, &PathBuf),
        meter: &Meter,
    ) -> Result<u64, Reason> {
        let mut chunks = self.web.get(url).await?.bytes_stream();
        let mut bytes = 0;
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| unreachable(&error))?;
            aside.write_all(&chunk).map_err(|error| fault(path, &error))?;
            bytes += chunk.len() as u64;
            meter.add(chunk.len() as u64);
        }
        Ok(bytes)
    }

    /// Waits until no other process fetches the content.
    async fn right_to(&self, etag: &str, meter: &Meter) -> Result<File, Reason> {
        let start = Instant::now();
        loop {
            if let Some(right) = self.cache.try_lock(etag)? {
                return Ok(right);
            }
            if start.elapsed() > PATIENCE {
                meter.wait_for_another();
            }
            tokio::time::sleep(LOCK_POLL).await;
        }
    }
}

/// Whether `name`, in which one `*` stands for a part without slashes, names `file`.
fn is_named(name: &str, file: &str) -> bool {
    let Some((head, tail)) = name.split_once('*') else { return name == file };
    let part = file.strip_prefix(head).and_then(|rest| rest.strip_suffix(tail));
    part.is_some_and(|part| !part.starts_with('.') && !part.contains(['/', '\\']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_one_part_of_a_path() {
        let check = |name, file, expect| assert_eq!(is_named(name, file), expect, "{name} {file}");
        check("config.json", "config.json", true);
        check("config.json", "sub/config.json", false);
        check("default/train/*.parquet", "default/train/0000.parquet", true);
        check("default/train/*.parquet", "default/test/0000.parquet", false);
        check("default/train/*.parquet", "default/train/../x.parquet", false);
        check("default/train/*.parquet", "default/train/..parquet", false);
    }
}
