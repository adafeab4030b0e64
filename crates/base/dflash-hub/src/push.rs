//! Uploads a model's files as one commit to a repository of the Hub.
//!
//! hf-hub creates and finds repositories. Its commits upload large files only by Xet; where a
//! server has no Xet it puts them into the commit itself, base64 in memory. So files and commit are
//! sent here by the older protocol, which every Hub and its mirrors support: the Hub says which
//! files are large (`preupload`); these go to its large-file storage by Git LFS's batch protocol,
//! whole or in parts; then a commit of JSON lines names them and contains the small ones. Nothing
//! of a push is visible before that commit, and files that the storage already has are not sent
//! again.

mod api;
mod commit;
mod lfs;
mod meter;
mod outgoing;
mod refusal;
mod repository;
mod token;

use std::sync::atomic::AtomicBool;

use dflash_io::say;
use dflash_settings::shown_endpoint;
use indicatif::DecimalBytes;

use crate::error::Error;
use crate::hub::{Hub, until_stopped};
use crate::name::Name;
use api::Api;
use commit::Draft;
use meter::Meter;

pub use outgoing::Outgoing;
pub use refusal::Refusal;
pub use token::Token;

/// The default branch.
const MAIN: &str = "main";

/// Where and how files are published.
#[derive(Debug, Clone)]
pub struct Publication {
    /// `OWNER/NAME`.
    pub repository: String,
    /// Whether a new repository, or collection, is private.
    pub private: bool,
    /// The branch; `None` for `main`.
    pub revision: Option<String>,
    /// Whether to open a pull request instead.
    pub create_pr: bool,
    /// First line of the commit's message.
    pub message: String,
    /// A collection for the repository: its slug `OWNER/TITLE-ID`, or the title of a new one.
    pub collection: Option<String>,
}

/// The result of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The page of the commit or pull request, or of the repository if nothing had changed.
    pub url: String,
    /// Bytes sent to the large-file storage.
    pub sent: u64,
    /// Whether the repository had everything already, so that no commit was made.
    pub unchanged: bool,
    /// The page of the collection.
    pub collection: Option<String>,
}

impl Publication {
    fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    fn name(&self) -> Result<Name<'_>, Refusal> {
        let name = Name::parse(&self.repository).filter(|name| name.revision.is_none());
        name.ok_or_else(|| Refusal::Name("it is not of the form OWNER/NAME".to_owned()))
    }
}

impl Hub {
    /// Makes `files` a commit of the repository, which is created if it does not exist.
    ///
    /// Nothing is visible until the commit, which makes everything visible at once. If the push
    /// fails, a repository that it created stays, empty, and so do large files that arrived: the
    /// next push continues from there.
    ///
    /// # Errors
    /// [`Error::Publish`], if nothing was published; [`Error::Collection`], if everything was
    /// published but the collection failed; [`Error::Interrupted`] if `stop` is set before the
    /// commit.
    pub fn publish(
        &self,
        token: &Token,
        publication: &Publication,
        files: &[Outgoing],
        stop: &AtomicBool,
    ) -> Result<Published, Error> {
        let refused = |reason| self.not_published(publication, reason);
        let uploaded = until_stopped(stop, async {
            let api = Api::open(self.address(), token)?;
            repository::ensure(&api, publication).await?;
            upload(&api, publication, files).await
        })?;
        let (draft, sent) = uploaded.map_err(refused)?;
        // The rest is short, and if it were interrupted nobody would know what the Hub had done.
        let never = AtomicBool::new(false);
        let committed = until_stopped(&never, async {
            let api = Api::open(self.address(), token)?;
            draft.commit(&api, publication, files).await
        })?;
        let url = committed.map_err(refused)?;
        let unchanged = url.is_none();
        if unchanged {
            say(format!("{} already has all of it; nothing was committed", publication.repository));
        }
        let url = url.unwrap_or_else(|| self.page(&publication.repository));
        let mut published = Published { url, sent, unchanged, collection: None };
        if let Some(collection) = &publication.collection {
            let added = until_stopped(&never, async {
                let api = Api::open(self.address(), token)?;
                repository::collect(&api, publication, collection).await
            })?;
            let slug = added.map_err(|reason| Error::Collection {
                repository: publication.repository.clone(),
                url: published.url.clone(),
                collection: collection.clone(),
                reason: Box::new(reason),
            })?;
            published.collection = Some(self.page(&format!("collections/{slug}")));
        }
        Ok(published)
    }

    /// The address of a page, for people.
    fn page(&self, path: &str) -> String {
        format!("{}/{path}", shown_endpoint(self.address().trim_end_matches('/')))
    }

    fn not_published(&self, publication: &Publication, reason: Refusal) -> Error {
        let repository = publication.repository.clone();
        let from = shown_endpoint(self.address());
        Error::Publish { repository, from, reason: Box::new(reason) }
    }
}

/// Sends the large files that the Hub lacks; returns the rest to commit, and the bytes sent.
async fn upload<'a>(
    api: &Api<'_>,
    publication: &Publication,
    files: &'a [Outgoing],
) -> Result<(Draft<'a>, u64), Refusal> {
    let draft = Draft::plan(api, publication, files).await?;
    let total = draft.large().map(|file| file.bytes).sum();
    let meter = Meter::start(&publication.repository, total);
    for file in draft.large() {
        if !lfs::upload(api, publication, file, &meter).await? {
            meter.skip(file.bytes);
        }
    }
    let sent = meter.finish();
    if total > 0 {
        let there = DecimalBytes(total - sent);
        say(format!("uploaded {}; {there} were already there", DecimalBytes(sent)));
    }
    Ok((draft, sent))
}
