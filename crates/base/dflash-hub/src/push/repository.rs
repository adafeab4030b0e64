//! The repository of a push, and the collection that it joins.

use hf_hub::repository::RepoTypeModel;
use hf_hub::{HFClient, HFError};
use serde_json::json;

use crate::client::innermost;
use crate::push::Publication;
use crate::push::api::{Api, Fault, JSON};
use crate::push::refusal::Refusal;

const FIND: &str = "looking for the repository";
const CREATE: &str = "creating the repository";
const COLLECT: &str = "adding it to the collection";

/// Makes sure that a model repository of that name exists, with the requested visibility.
pub(crate) async fn ensure(api: &Api<'_>, publication: &Publication) -> Result<(), Refusal> {
    let name = publication.name()?;
    let client = HFClient::builder().endpoint(api.address()).token(api.token.secret());
    let client = client.build().map_err(|error| Refusal::Endpoint(innermost(&error)))?;
    match client.model(name.owner, name.name).info().send().await {
        Ok(info) if publication.private && info.private == Some(false) => Err(Refusal::Public),
        Ok(_) => Ok(()),
        Err(error) => match fault(error) {
            fault if is_absent(&fault) => create(api, &client, publication).await,
            fault => Err(api.refusal(FIND, fault)),
        },
    }
}

async fn create(
    api: &Api<'_>,
    client: &HFClient,
    publication: &Publication,
) -> Result<(), Refusal> {
    let request = client.create_repository().repo_id(&publication.repository);
    let request = request.repo_type(RepoTypeModel).private(publication.private);
    match request.send().await.map_err(fault) {
        Ok(_) => Ok(()),
        Err(Fault::Status { status: 409, .. }) => Err(Refusal::OtherKind),
        Err(Fault::Status { status: 400 | 404 | 422, said, .. }) => {
            Err(Refusal::Name(api.one_line(&said)))
        }
        Err(fault) => Err(api.refusal(CREATE, fault)),
    }
}

/// Adds the repository to a collection, which is created if `collection` is a title; returns its
/// slug.
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
    let answer = api.try_post(COLLECT, api.url(parts), JSON, body.to_string().into()).await?;
    match answer {
        // It is already in the collection.
        Ok(_) | Err(Fault::Status { status: 409, .. }) => Ok(slug),
        Err(fault) => Err(api.refusal(COLLECT, fault)),
    }
}

/// Creates a collection of the repository's owner, if there is none with that title.
async fn new_collection(
    api: &Api<'_>,
    publication: &Publication,
    title: &str,
) -> Result<String, Refusal> {
    let namespace = publication.name()?.owner;
    let private = publication.private;
    let body = json!({"title": title, "namespace": namespace, "private": private}).to_string();
    let url = api.url(["api", "collections"]);
    let answer = match api.try_post(COLLECT, url, JSON, body.into()).await? {
        Err(Fault::Status { status: 409, body, .. }) => {
            serde_json::from_str(&body).unwrap_or_default()
        }
        answer => answer.map_err(|fault| api.refusal(COLLECT, fault))?,
    };
    let what = || "the collection has no slug".to_owned();
    let slug = answer["slug"].as_str();
    slug.map(str::to_owned).ok_or_else(|| Refusal::Protocol { doing: COLLECT, what: what() })
}

/// The client's error as a status with the server's words, or as no answer.
fn fault(error: HFError) -> Fault {
    let context = match &error {
        HFError::Http { context }
        | HFError::AuthRequired { context }
        | HFError::Forbidden { context }
        | HFError::Conflict { context }
        | HFError::RateLimited { context, .. } => Some(context),
        HFError::RepoNotFound { context, .. } => context.as_ref(),
        _ => None,
    };
    match context {
        Some(context) => Fault::Status {
            status: context.status.as_u16(),
            code: context.error_code.clone(),
            said: context.server_message.clone().unwrap_or_default(),
            body: context.body.clone(),
        },
        None => Fault::Lost(innermost(&error)),
    }
}

/// 404; for some tokens the Hub answers 401 for missing repositories.
fn is_absent(fault: &Fault) -> bool {
    match fault {
        Fault::Status { status: 404, .. } => true,
        Fault::Status { status: 401, code, .. } => code.as_deref() == Some("RepoNotFound"),
        _ => false,
    }
}
