//! A model's files as one commit in a repository of the Hub.
//!
//! The official client makes and finds repositories. Its commits send large files over Xet alone, and
//! put them into the commit itself, in memory and as base64, where a server has no Xet. So files and
//! commit go here by the older way, which every Hub and its mirrors know: the Hub says which files are
//! large (`preupload`); these go to its large-file storage by Git LFS's batch protocol, whole or in
//! parts; and a commit of JSON lines then names them and holds the small ones. Until that commit
//! nothing is seen of a push, and what the storage holds is not sent again.

mod api;
mod commit;
mod lfs;
mod meter;
mod outgoing;
mod refusal;
mod repository;
mod token;

use std::sync::atomic::AtomicBool;

use dflash_console::say;
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

/// The branch that everybody sees.
const MAIN: &str = "main";

/// Where files go, and how.
#[derive(Debug, Clone)]
pub struct Publication {
    /// `OWNER/NAME`.
    pub repository: String,
    /// Whether a new repository, or collection, is seen by its owner alone.
    pub private: bool,
    /// The branch; `None` for `main`.
    pub revision: Option<String>,
    /// Whether it is proposed as a pull request instead.
    pub create_pr: bool,
    /// First line of the commit's message.
    pub message: String,
    /// A collection for the repository: its slug `OWNER/TITLE-ID`, or the title of a new one.
    pub collection: Option<String>,
}

/// What became of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The commit's page, the pull request's, or the repository's where nothing had changed.
    pub url: String,
    /// Bytes that went to the storage of large files.
    pub sent: u64,
    /// Whether the repository held all of it already, so that no commit was made.
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
    /// Makes `files` a commit of the repository, which is created where there is none.
    ///
    /// Until the commit nothing is seen of them; it makes all of them visible at once. A repository
    /// that was created for a push that failed stays, empty, and so do large files that arrived:
    /// the next push goes on from there.
    ///
    /// # Errors
    /// [`Error::Publish`], before which nothing was published; [`Error::Collection`], before which all
    /// was; [`Error::Interrupted`] where `stop` is set before the commit.
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
        // From here on the work is short, and cut off nobody would know what the Hub has made of it.
        let never = AtomicBool::new(false);
        let committed = until_stopped(&never, async {
            let api = Api::open(self.address(), token)?;
            draft.commit(&api, publication, files).await
        })?;
        let url = committed.map_err(refused)?;
        let unchanged = url.is_none();
        if unchanged {
            say(format!(
                "{} holds all of it already; nothing was committed",
                publication.repository
            ));
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

/// Sends the large files that the Hub lacks; returns what is left to commit, and the bytes sent.
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
        say(format!("uploaded {}; {there} were there already", DecimalBytes(sent)));
    }
    Ok((draft, sent))
}
