//! The repository that a push goes to, and the collection that it may join.

use serde_json::json;

use crate::name::Name;
use crate::push::Publication;
use crate::push::api::{Api, Fault, JSON};
use crate::push::refusal::Refusal;

const FIND: &str = "looking for the repository";
const CREATE: &str = "creating the repository";
const COLLECT: &str = "adding it to the collection";

/// Sees to it that there is a model's repository of that name, as private as it is wanted.
pub(crate) async fn ensure(api: &Api<'_>, publication: &Publication) -> Result<(), Refusal> {
    let name = publication.name()?;
    let url = api.url(["api", "models", name.owner, name.name]);
    match api.try_get(FIND, url).await? {
        Ok(facts) if publication.private && facts["private"] == false => Err(Refusal::Public),
        Ok(_) => Ok(()),
        Err(fault) if is_absent(&fault) => create(api, publication).await,
        Err(fault) => Err(api.refusal(FIND, fault)),
    }
}

async fn create(api: &Api<'_>, publication: &Publication) -> Result<(), Refusal> {
    let Name { owner, name, .. } = publication.name()?;
    let private = publication.private;
    let body = json!({"type": "model", "organization": owner, "name": name, "private": private});
    let url = api.url(["api", "repos", "create"]);
    match api.try_post(CREATE, url, (JSON, body.to_string().into())).await? {
        Ok(_) => Ok(()),
        Err(Fault::Status { status: 409, .. }) => Err(Refusal::OtherKind),
        Err(Fault::Status { status: 400 | 404 | 422, said, .. }) => {
            Err(Refusal::Name(api.one_line(&said)))
        }
        Err(fault) => Err(api.refusal(CREATE, fault)),
    }
}

/// Puts the repository into a collection, which is made where `collection` is a title; returns its slug.
pub(crate) async fn collect(
    api: &Api<'_>,
    publication: &Publication,
    collection: &str,
) -> Result<String, Refusal> {
    let slug = match collection.split_once('/') {
        Some(_) => collection.to_owned(),
        None => new_collection(api, publication, collection).await?,
    };
    let body = json!({"item": {"id": publication.repository, "type": "model"}});
    let parts = ["api", "collections"].into_iter().chain(slug.split('/')).chain(["items"]);
    let answer = api.try_post(COLLECT, api.url(parts), (JSON, body.to_string().into())).await?;
    match answer {
        // It is in there already.
        Ok(_) | Err(Fault::Status { status: 409, .. }) => Ok(slug),
        Err(fault) => Err(api.refusal(COLLECT, fault)),
    }
}

/// Makes a collection of the repository's owner, if there is none of that title.
async fn new_collection(
    api: &Api<'_>,
    publication: &Publication,
    title: &str,
) -> Result<String, Refusal> {
    let namespace = publication.name()?.owner;
    let private = publication.private;
    let body = json!({"title": title, "namespace": namespace, "private": private}).to_string();
    let url = api.url(["api", "collections"]);
    let answer = match api.try_post(COLLECT, url, (JSON, body.into())).await? {
        Err(Fault::Status { status: 409, body, .. }) => {
            serde_json::from_str(&body).unwrap_or_default()
        }
        answer => answer.map_err(|fault| api.refusal(COLLECT, fault))?,
    };
    let what = || "the collection has no slug".to_owned();
    let slug = answer["slug"].as_str();
    slug.map(str::to_owned).ok_or_else(|| Refusal::Protocol { doing: COLLECT, what: what() })
}

/// 404; for some tokens the Hub says 401 of what is not there.
fn is_absent(fault: &Fault) -> bool {
    match fault {
        Fault::Status { status: 404, .. } => true,
        Fault::Status { status: 401, code, .. } => code.as_deref() == Some("RepoNotFound"),
        _ => false,
    }
}
