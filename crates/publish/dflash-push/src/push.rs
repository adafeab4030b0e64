//! The push: its plan, and sending it.

use std::fmt::{self, Display, Formatter};
use std::sync::atomic::AtomicBool;

use dflash_hub::{Hub, Outgoing, Publication, Published, Token};
use dflash_io::say;
use dflash_settings::PushSettings;
use indicatif::DecimalBytes;

use crate::Error;
use crate::card::Card;
use crate::drafter::Drafter;
use crate::evidence::{choose, gather};

/// The card's name in a repository.
const CARD: &str = "README.md";

/// What a push would upload.
#[derive(Debug)]
pub struct Plan {
    publication: Publication,
    files: Vec<Outgoing>,
    card: String,
}

/// The result of a push.
#[derive(Debug)]
pub enum Outcome {
    /// Nothing was sent; this would be uploaded.
    DryRun(Plan),
    /// It is on the Hub.
    Published(Published),
}

/// Publishes the drafter that `settings` names, or shows what would be published.
///
/// # Errors
/// A drafter that cannot or must not be published, and refusals of the Hub; see [`Error`].
pub fn push(settings: &PushSettings, hub: &Hub, stop: &AtomicBool) -> Result<Outcome, Error> {
    let plan = Plan::make(settings, stop)?;
    if settings.dry_run {
        return Ok(Outcome::DryRun(plan));
    }
    let token = match &settings.token_file {
        Some(path) => Token::from_file(path)?,
        None => Token::find()?,
    };
    Ok(Outcome::Published(hub.publish(&token, &plan.publication, &plan.files, stop)?))
}

impl Plan {
    /// Reads all local files; does not contact the Hub.
    fn make(settings: &PushSettings, stop: &AtomicBool) -> Result<Self, Error> {
        let drafter = Drafter::find(&settings.draft, &settings.gguf)?;
        let evidence = gather(&drafter, &settings.evaluation, !settings.allow_unevaluated)?;
        let evidence = choose(evidence, settings.results.as_deref())?;
        let card = Card { settings, drafter: &drafter, evidence: &evidence };
        if card.base_model().is_none() {
            say(
                "the card names no base model, since the drafter's target is not from the Hub; pass \
                 --base-model OWNER/NAME",
            );
        }
        if settings.license.is_none() {
            say("the card names no licence; pass --license ID, such as apache-2.0");
        }
        let card = card.text();
        let mut files = vec![Outgoing::text(CARD, &card)];
        for (name, path) in &drafter.files {
            files.push(Outgoing::file(name, path, stop)?);
        }
        let publication = Publication {
            repository: settings.repo.clone(),
            private: settings.private,
            revision: settings.revision.clone(),
            create_pr: settings.create_pr,
            message: settings.message.clone().unwrap_or_else(|| message(&drafter)),
            collection: settings.collection.clone(),
        };
        Ok(Self { publication, files, card })
    }
}

/// The default commit message.
fn message(drafter: &Drafter) -> String {
    match &drafter.origin {
        Some(origin) => format!("Upload the drafter of step {}", origin.step),
        None => "Upload the drafter".to_owned(),
    }
}

impl Display for Outcome {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::DryRun(plan) => write!(f, "{plan}"),
            Self::Published(published) => {
                writeln!(f, "{}", published.url)?;
                published.collection.iter().try_for_each(|page| writeln!(f, "{page}"))
            }
        }
    }
}

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Publication { repository, private, revision, create_pr, message, collection } =
            &self.publication;
        let kind = if *private { "private" } else { "public" };
        writeln!(f, "repository  {repository}, {kind} where it is new")?;
        let place = revision.as_deref().unwrap_or("main");
        let way = if *create_pr { "a pull request to" } else { "a commit to" };
        writeln!(f, "commit      {way} {place}: {message}")?;
        if let Some(collection) = collection {
            writeln!(f, "collection  {collection}")?;
        }
        writeln!(f, "\n{:>14}  {:64}  {:24}  path", "bytes", "sha256", "goes")?;
        for file in &self.files {
            let way = if file.is_large() { "to large-file storage" } else { "in the commit" };
            writeln!(f, "{:>14}  {}  {way:24}  {}", file.bytes, file.sha256, file.path)?;
        }
        let total: u64 = self.files.iter().map(|file| file.bytes).sum();
        writeln!(f, "{total:>14}  in all ({}); nothing was sent\n", DecimalBytes(total))?;
        write!(f, "README.md:\n\n{}", self.card)
    }
}
