//! A Hub on a port of this machine that accepts pushes and serves what was pushed: repositories
//! with commits and branches, large-file storage whole and in parts, collections. Its routes,
//! bodies and headers are those that `huggingface_hub` sends and reads; that client is run against
//! it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::Digest;

use crate::http::{Answer, Next, Request, Service, serve};

#[path = "hub_answers.rs"]
mod hub_answers;
use hub_answers::{no_revision, ok, quoted, refused};

/// The user that the valid token belongs to, and the token.
pub(crate) const USER: &str = "me";
pub(crate) const TOKEN: &str = "hf_rightTokenOfTheTest";

/// A file's contents, and whether it is in large-file storage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Blob {
    pub(crate) content: Vec<u8>,
    pub(crate) large: bool,
}

pub(crate) type Tree = BTreeMap<String, Blob>;

#[derive(Debug, Clone)]
struct Commit {
    id: String,
    summary: String,
    tree: Tree,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Repository {
    pub(crate) private: bool,
    commits: Vec<Commit>,
    /// Branch or pull request, and the number of its commit.
    refs: BTreeMap<String, usize>,
}

/// What goes wrong with the next request that starts with these words.
#[derive(Debug, Clone)]
pub(crate) struct Mishap {
    pub(crate) request: &'static str,
    pub(crate) times: usize,
    pub(crate) what: What,
}

#[derive(Debug, Clone)]
pub(crate) enum What {
    /// The connection breaks after this many bytes of the body.
    Break(usize),
    /// The request is executed, and the connection breaks before the answer.
    Lose,
    /// The connection stalls.
    Stall,
    /// Nothing is done, and this answer is sent.
    Status(u16, &'static str),
}

#[derive(Debug, Default)]
struct World {
    /// By kind and name, such as `models/me/drafter`.
    repositories: BTreeMap<String, Repository>,
    storage: HashMap<String, Vec<u8>>,
    parts: HashMap<String, BTreeMap<usize, Vec<u8>>>,
    verified: Vec<String>,
    collections: BTreeMap<String, Value>,
    mishaps: Vec<Mishap>,
    requests: Vec<String>,
    leaks: Vec<String>,
    /// Larger files are sent in parts of this size, bytes.
    part: Option<usize>,
}

#[derive(Clone)]
pub(crate) struct HubServer {
    pub(crate) endpoint: Arc<Mutex<String>>,
    world: Arc<Mutex<World>>,
}

impl HubServer {
    pub(crate) fn start() -> Self {
        let server = Self { endpoint: Arc::default(), world: Arc::default() };
        let endpoint = serve(Arc::new(server.clone()));
        *server.endpoint.lock().unwrap() = endpoint;
        server
    }

    pub(crate) fn address(&self) -> String {
        self.endpoint.lock().unwrap().clone()
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    pub(crate) fn mishap(&self, request: &'static str, times: usize, what: What) {
        self.world().mishaps.push(Mishap { request, times, what });
    }

    /// Clears all mishaps.
    pub(crate) fn heal(&self) {
        self.world().mishaps.clear();
    }

    pub(crate) fn send_in_parts(&self, bytes: usize) {
        self.world().part = Some(bytes);
    }

    pub(crate) fn add(&self, name: &str, private: bool) {
        self.world().repositories.insert(name.to_owned(), Repository::new(private));
    }

    pub(crate) fn repository(&self, name: &str) -> Option<Repository> {
        self.world().repositories.get(name).cloned()
    }

    /// `METHOD path` of every request since the last call.
    pub(crate) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.world().requests)
    }

    /// Requests that carried the token to places where it does not belong.
    pub(crate) fn leaks(&self) -> Vec<String> {
        self.world().leaks.clone()
    }

    pub(crate) fn collection(&self, slug: &str) -> Value {
        self.world().collections.get(slug).cloned().unwrap_or_default()
    }
}

impl Repository {
    fn new(private: bool) -> Self {
        let content = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n".to_vec();
        let tree = Tree::from([(".gitattributes".to_owned(), Blob { content, large: false })]);
        let mut repository = Self { private, ..Self::default() };
        repository.commit("main", "initial commit", tree);
        repository
    }

    fn commit(&mut self, reference: &str, summary: &str, tree: Tree) -> String {
        let id = format!("{:040x}", self.commits.len() + 1);
        self.refs.insert(reference.to_owned(), self.commits.len());
        self.commits.push(Commit { id: id.clone(), summary: summary.to_owned(), tree });
        id
    }

    fn at(&self, revision: &str) -> Option<&Commit> {
        let named = self.refs.get(revision).map(|&place| &self.commits[place]);
        named.or_else(|| self.commits.iter().find(|commit| commit.id == revision))
    }

    /// The files of a branch, without Git's own.
    pub(crate) fn files(&self, branch: &str) -> Tree {
        let mut tree = self.at(branch).map(|commit| commit.tree.clone()).unwrap_or_default();
        tree.remove(".gitattributes");
        tree
    }

    pub(crate) fn branch(&mut self, name: &str) {
        self.refs.insert(name.to_owned(), 0);
    }

    /// Its pull requests, in the Hub's list format.
    pub(crate) fn proposals(&self) -> Vec<Value> {
        let numbered = self.refs.iter().filter_map(|(name, &at)| {
            let number: usize = name.strip_prefix("refs/pr/")?.parse().ok()?;
            Some(json!({"num": number, "title": self.commits[at].summary, "status": "open",
                "isPullRequest": true}))
        });
        numbered.collect()
    }

    pub(crate) fn summaries(&self) -> Vec<&str> {
        self.commits.iter().map(|commit| commit.summary.as_str()).collect()
    }
}

impl HubServer {
    /// Creates a branch of a model at its first commit.
    pub(crate) fn add_branch(&self, name: &str, branch: &str) {
        self.world().repositories.get_mut(name).unwrap().branch(branch);
    }
}

impl Service for HubServer {
    fn begin(&self, request: &Request) -> Next {
        let mut world = self.world();
        let line = format!("{} {}", request.method, request.path);
        world.requests.push(line.clone());
        let storage = request.path.starts_with("/storage") || request.path.starts_with("/cdn");
        if storage && request.headers.contains_key("authorization") {
            world.leaks.push(line.clone());
        }
        let at = world.mishaps.iter().position(|it| line.starts_with(it.request) && it.times > 0);
        let Some(at) = at else { return Next::Go };
        world.mishaps[at].times -= 1;
        match world.mishaps[at].what.clone() {
            What::Break(bytes) => Next::Break(bytes),
            What::Lose => Next::Lose,
            What::Stall => Next::Stall,
            What::Status(status, said) => Next::Say(refused(status, said)),
        }
    }

    fn answer(&self, request: &Request) -> Answer {
        let endpoint = self.address();
        let path = request.path.replace("%2F", "/");
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let call = Call { request, endpoint: &endpoint, user: user(request) };
        let mut world = self.world();
        match (request.method.as_str(), parts.as_slice()) {
            ("PUT", ["storage", oid]) => call.store(&mut world, oid),
            ("POST", ["storage", oid, "complete"]) => call.complete(&mut world, oid),
            ("GET" | "HEAD", ["cdn", oid]) => match world.storage.get(*oid) {
                Some(content) => Answer::new(200, content.clone()).with("etag", quoted(oid)),
                None => refused(404, "no such object"),
            },
            (_, _) if call.user == User::Unknown => refused(401, "Invalid username or password."),
            ("GET", ["api", "whoami-v2"]) => {
                ok(json!({"type": "user", "name": USER, "fullname": "Me", "orgs": []}))
            }
            ("POST", ["api", "validate-yaml"]) => ok(json!({"errors": [], "warnings": []})),
            ("POST", ["api", "repos", "create"]) => call.create(&mut world),
            ("POST", ["api", "collections"]) => call.new_collection(&mut world),
            ("POST", ["api", "collections", owner, slug, "items"]) => {
                call.add_item(&mut world, &format!("{owner}/{slug}"))
            }
            ("GET", ["api", "collections", owner, slug]) => world
                .collections
                .get(&format!("{owner}/{slug}"))
                .cloned()
                .map_or_else(|| refused(404, "no such collection"), ok),
            ("POST", [owner, git, "info", "lfs", "objects", "batch"]) => {
                let name = git.trim_end_matches(".git");
                call.batch(&mut world, &format!("models/{owner}/{name}"))
            }
            (_, ["api", kind @ ("models" | "datasets"), owner, name, rest @ ..]) => {
                call.of_repository(&mut world, &format!("{kind}/{owner}/{name}"), rest)
            }
            ("GET" | "HEAD", [owner, name, "resolve", rest @ ..]) => {
                call.resolve(&world, &format!("models/{owner}/{name}"), rest)
            }
            _ => refused(404, "Not Found"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum User {
    Nobody,
    Me,
    Unknown,
}

fn user(request: &Request) -> User {
    match request.headers.get("authorization") {
        None => User::Nobody,
        Some(bearer) if *bearer == format!("Bearer {TOKEN}") => User::Me,
        Some(_) => User::Unknown,
    }
}

struct Call<'a> {
    request: &'a Request,
    endpoint: &'a str,
    user: User,
}

impl Call<'_> {
    /// The storage has another host, to which the Hub's credentials must not be sent.
    fn elsewhere(&self) -> String {
        self.endpoint.replace("127.0.0.1", "localhost")
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.request.body).unwrap_or_default()
    }

    fn create(&self, world: &mut World) -> Answer {
        let body = self.json();
        if self.user != User::Me {
            return refused(401, "Invalid username or password.");
        }
        let owner = body["organization"].as_str().unwrap_or(USER);
        let name = body["name"].as_str().unwrap_or_default();
        if owner != USER {
            return refused(
                403,
                &format!(
                    "You don't have the rights to create a model under the namespace \"{owner}\""
                ),
            );
        }
        if name.is_empty() || name.contains("forbidden") {
            return refused(400, "Invalid repo name");
        }
        let kind = body["type"].as_str().unwrap_or("model");
        let is_taken =
            |kind: &str| world.repositories.contains_key(&format!("{kind}s/{owner}/{name}"));
        // Stricter than the Hub, where models and datasets have separate names, but like mirrors.
        if ["model", "dataset"].into_iter().any(is_taken) {
            return refused(409, &format!("You already created this {kind} repo"));
        }
        let private = body["private"] == json!(true) || body["visibility"] == json!("private");
        world.repositories.insert(format!("{kind}s/{owner}/{name}"), Repository::new(private));
        ok(
            json!({"url": format!("{}/{owner}/{name}", self.endpoint), "id": format!("{owner}/{name}")}),
        )
    }

    /// `/api/KIND/OWNER/NAME...`
    fn of_repository(&self, world: &mut World, name: &str, rest: &[&str]) -> Answer {
        let Some(repository) = world.repositories.get(name) else { return self.absent() };
        if repository.private && self.user != User::Me {
            return self.absent();
        }
        let revision = |rest: &[&str]| if rest.is_empty() { "main".into() } else { rest.join("/") };
        let writes = matches!(rest.first(), Some(&("preupload" | "commit")));
        if writes && self.user != User::Me {
            return refused(401, "Invalid username or password.");
        }
        match (self.request.method.as_str(), rest) {
            ("GET", []) => self.info(name, repository, "main"),
            ("GET", ["revision", rest @ ..]) => self.info(name, repository, &revision(rest)),
            ("GET", ["tree", rest @ ..]) => match repository.at(&revision(rest)) {
                Some(commit) => ok(commit.tree.iter().map(described).collect()),
                None => no_revision(),
            },
            ("POST", ["preupload", rest @ ..]) => match repository.at(&revision(rest)) {
                Some(commit) => self.preupload(&commit.tree),
                None => no_revision(),
            },
            ("GET", ["discussions"]) => ok(json!({"discussions": repository.proposals()})),
            ("POST", ["commit", rest @ ..]) => self.commit(world, name, &revision(rest)),
            ("POST", ["verify", oid]) => {
                let size = world.storage.get(*oid).map(Vec::len);
                if size.is_none() || self.json()["size"] != json!(size) {
                    return refused(404, "the object is not there");
                }
                world.verified.push((*oid).to_owned());
                ok(json!({}))
            }
            _ => refused(404, "Not Found"),
        }
    }

    fn info(&self, name: &str, repository: &Repository, revision: &str) -> Answer {
        let Some(commit) = repository.at(revision) else { return no_revision() };
        let id = name.split_once('/').unwrap().1;
        let siblings: Vec<Value> =
            commit.tree.keys().map(|path| json!({"rfilename": path})).collect();
        ok(json!({"_id": "1", "id": id, "modelId": id, "author": USER, "sha": commit.id,
            "private": repository.private, "disabled": false, "gated": false, "tags": [],
            "downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z", "siblings": siblings}))
    }

    fn preupload(&self, tree: &Tree) -> Answer {
        let body = self.json();
        let files = body["files"].as_array().into_iter().flatten();
        let verdicts = files.map(|file| {
            let path = file["path"].as_str().unwrap();
            STANDARD.decode(file["sample"].as_str().unwrap()).unwrap();
            let large = [".safetensors", ".gguf"].iter().any(|ending| path.ends_with(ending))
                || file["size"].as_u64().unwrap() > 10_000_000;
            let mut verdict = json!({"path": path, "shouldIgnore": false,
                "uploadMode": if large { "lfs" } else { "regular" }});
            if let Some(blob) = tree.get(path) {
                verdict["oid"] = json!(blob.id());
            }
            verdict
        });
        ok(json!({"files": verdicts.collect::<Vec<_>>(), "commitOid": "0"}))
    }

    fn batch(&self, world: &mut World, name: &str) -> Answer {
        let body = self.json();
        if self.user != User::Me || !world.repositories.contains_key(name) {
            return self.absent();
        }
        let transfers = body["transfers"].as_array().unwrap();
        assert!(transfers.contains(&json!("basic")), "{body}");
        let mut transfer = "basic";
        let objects = body["objects"].as_array().unwrap().iter().map(|object| {
            let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap());
            if world.storage.contains_key(oid) {
                return json!({"oid": oid, "size": size});
            }
            let storage = format!("{}/storage/{oid}", self.elsewhere());
            let upload = match world.part.filter(|&part| size > part as u64) {
                Some(part) => {
                    transfer = "multipart";
                    let mut header = json!({"chunk_size": part.to_string()});
                    for number in 1..=size.div_ceil(part as u64) {
                        let url = format!("{storage}?part={number}&signature=s");
                        header[format!("{number:05}")] = json!(url);
                    }
                    let complete = format!("{}/storage/{oid}/complete", self.endpoint);
                    json!({"href": complete, "header": header})
                }
                None => json!({"href": format!("{storage}?signature=s")}),
            };
            let verify = format!("{}/api/{name}/verify/{oid}", self.endpoint);
            json!({"oid": oid, "size": size, "authenticated": true, "actions":
                {"upload": upload, "verify": {"href": verify, "header": {}}}})
        });
        let objects: Vec<Value> = objects.collect();
        ok(json!({"transfer": transfer, "objects": objects}))
    }

    /// A whole object, or one part of it.
    fn store(&self, world: &mut World, oid: &str) -> Answer {
        let content = self.request.body.clone();
        // As S3, which rejects bodies of unknown length.
        if !self.request.headers.contains_key("content-length") {
            return refused(411, "MissingContentLength");
        }
        if !self.request.query.contains("signature=s") {
            return refused(403, "SignatureDoesNotMatch");
        }
        let number =
            self.request.query.strip_prefix("part=").and_then(|rest| rest.split('&').next());
        if let Some(number) = number {
            let number = number.parse().unwrap();
            world.parts.entry(oid.to_owned()).or_default().insert(number, content.clone());
            return Answer::new(200, "").with("etag", quoted(&sha256(&content)));
        }
        if sha256(&content) != oid {
            return refused(400, "BadDigest");
        }
        world.storage.insert(oid.to_owned(), content);
        Answer::new(200, "").with("etag", quoted(oid))
    }

    fn complete(&self, world: &mut World, oid: &str) -> Answer {
        let Some(parts) = world.parts.remove(oid) else { return refused(404, "NoSuchUpload") };
        let named: Vec<(usize, String)> = self.json()["parts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|part| {
                let number = part["partNumber"].as_u64().unwrap() as usize;
                (number, part["etag"].as_str().unwrap().to_owned())
            })
            .collect();
        let stored: Vec<(usize, String)> =
            parts.iter().map(|(number, part)| (*number, quoted(&sha256(part)))).collect();
        let content: Vec<u8> = parts.into_values().flatten().collect();
        if named != stored || sha256(&content) != oid {
            return refused(400, "InvalidPart");
        }
        world.storage.insert(oid.to_owned(), content);
        ok(json!({}))
    }

    fn commit(&self, world: &mut World, name: &str, revision: &str) -> Answer {
        let text = String::from_utf8(self.request.body.clone()).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let Some(head) = world.repositories[name].at(revision) else { return no_revision() };
        let (mut tree, mut summary) = (head.tree.clone(), String::new());
        for line in &lines {
            let value = &line["value"];
            let path = value["path"].as_str().unwrap_or_default().to_owned();
            match line["key"].as_str().unwrap() {
                "header" => summary = value["summary"].as_str().unwrap().to_owned(),
                "file" => {
                    assert_eq!(value["encoding"], json!("base64"));
                    let content = STANDARD.decode(value["content"].as_str().unwrap()).unwrap();
                    tree.insert(path, Blob { content, large: false });
                }
                "lfsFile" => {
                    let oid = value["oid"].as_str().unwrap();
                    assert_eq!(value["algo"], json!("sha256"));
                    let Some(content) = world.storage.get(oid) else {
                        return refused(400, &format!("LFS pointer {oid} points to nothing"));
                    };
                    assert_eq!(value["size"], json!(content.len()));
                    tree.insert(path, Blob { content: content.clone(), large: true });
                }
                "deletedFile" => _ = tree.remove(&path),
                other => return refused(400, &format!("unknown line {other}")),
            }
        }
        let repository = world.repositories.get_mut(name).unwrap();
        let proposal = self.request.query.contains("create_pr=1");
        let number = repository.proposals().len() + 1;
        let reference = if proposal { format!("refs/pr/{number}") } else { revision.to_owned() };
        let id = repository.commit(&reference, &summary, tree);
        let model = name.trim_start_matches("models/");
        let mut answer = json!({"success": true, "commitOid": id, "hookOutput": "",
            "commitUrl": format!("{}/{model}/commit/{id}", self.endpoint)});
        if proposal {
            answer["pullRequestUrl"] =
                json!(format!("{}/{model}/discussions/{number}", self.endpoint));
        }
        ok(answer)
    }

    /// `/OWNER/NAME/resolve/REVISION/PATH`
    fn resolve(&self, world: &World, name: &str, rest: &[&str]) -> Answer {
        let Some(repository) = world.repositories.get(name) else { return self.absent() };
        if repository.private && self.user != User::Me {
            return self.absent();
        }
        let split = (1..rest.len())
            .find_map(|at| Some((repository.at(&rest[..at].join("/"))?, rest[at..].join("/"))));
        let Some((commit, path)) = split else { return no_revision() };
        let Some(blob) = commit.tree.get(&path) else {
            return refused(404, "Entry not found")
                .with("x-error-code", "EntryNotFound")
                .with("x-repo-commit", &commit.id);
        };
        let id = blob.id();
        if blob.large {
            return Answer::new(302, "")
                .with("location", format!("{}/cdn/{id}", self.elsewhere()))
                .with("x-linked-etag", quoted(&id))
                .with("x-linked-size", blob.content.len())
                .with("x-repo-commit", &commit.id);
        }
        Answer::new(200, blob.content.clone())
            .with("etag", quoted(&id))
            .with("x-repo-commit", &commit.id)
    }

    fn new_collection(&self, world: &mut World) -> Answer {
        let body = self.json();
        let (owner, title) = (body["namespace"].as_str().unwrap(), body["title"].as_str().unwrap());
        let slug = format!("{owner}/{}-64f9", title.to_lowercase().replace(' ', "-"));
        if world.collections.contains_key(&slug) {
            let body = json!({"error": "This collection already exists", "slug": slug});
            return Answer::new(409, body.to_string()).with("content-type", "application/json");
        }
        let collection = json!({"slug": slug, "title": title, "owner": {"name": owner},
            "private": body["private"], "items": []});
        world.collections.insert(slug, collection.clone());
        ok(collection)
    }

    fn add_item(&self, world: &mut World, slug: &str) -> Answer {
        let item = self.json()["item"].clone();
        let Some(collection) = world.collections.get_mut(slug) else {
            return refused(404, "Collection not found");
        };
        let items = collection["items"].as_array_mut().unwrap();
        if items.contains(&item) {
            return refused(409, "Item already in collection");
        }
        items.push(item);
        ok(collection.clone())
    }

    fn absent(&self) -> Answer {
        let status = if self.user == User::Me { 404 } else { 401 };
        refused(status, "Repository not found").with("x-error-code", "RepoNotFound")
    }
}

impl Blob {
    /// Its Git object id, or its SHA-256 if it is large.
    fn id(&self) -> String {
        if self.large {
            return sha256(&self.content);
        }
        use sha1::Digest as _;
        let header = format!("blob {}\0", self.content.len());
        let digest = sha1::Sha1::new().chain_update(header).chain_update(&self.content);
        hex(&digest.finalize())
    }
}

fn described((path, blob): (&String, &Blob)) -> Value {
    let (size, oid) = (blob.content.len(), blob.id());
    let mut entry = json!({"type": "file", "path": path, "size": size, "oid": oid});
    if blob.large {
        entry["lfs"] = json!({"oid": oid, "size": size, "pointerSize": 130});
    }
    entry
}

pub(crate) fn sha256(content: &[u8]) -> String {
    hex(&sha2::Sha256::digest(content))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
