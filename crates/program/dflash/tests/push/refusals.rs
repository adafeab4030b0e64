//! What the Hub refuses gives one line each, and nothing is published.

use crate::hub_server::{TOKEN, What};
use crate::world::{MODEL, REPO, World};

fn check_nothing_published(world: &World) {
    if let Some(repository) = world.hub.repository(MODEL) {
        assert!(repository.files("main").is_empty());
    }
}

#[test]
fn a_token_that_the_hub_does_not_know() {
    let world = World::new();
    let line = format!("run --repo {REPO}");
    let wrong = [("HF_TOKEN", "hf_wrongToken"), ("DFLASH_LOG", "trace")];
    world.fails_with(&line, &wrong, "the Hub does not accept the token of HF_TOKEN");
    let none = world.fails_with(&line, &[], "a push needs a token with write access");
    assert!(none.contains("hf auth login"), "{none}");
    std::fs::write(world.path("token"), "hf_wrongToken").unwrap();
    let named = format!("{line} --token-file token");
    world.fails(&named, "the Hub does not accept the token of token");
    std::fs::write(world.path("token"), "not a token").unwrap();
    world.fails(&named, "token has no valid Hub token");
    world.fails(&format!("{line} --token-file gone"), "cannot read the token in gone");
    check_nothing_published(&world);
    // A login stores the token in the Hub's own folder.
    std::fs::create_dir(world.path("hf-home")).unwrap();
    std::fs::write(world.path("hf-home/token"), format!("{TOKEN}\n")).unwrap();
    let pushed = world.run_without_token(&line);
    assert_eq!(pushed.code, Some(0), "{}", pushed.stderr);
}

#[test]
fn a_server_that_says_the_token_again() {
    let world = World::new();
    let said: &'static str = String::leak(format!("no rights for {TOKEN} here"));
    world.hub.mishap("POST /api/repos/create", 1, What::Status(403, said));
    let failed = world.fails(&format!("run --repo {REPO}"), "no rights for *** here");
    assert!(failed.contains("the token of HF_TOKEN is not allowed to do that"), "{failed}");
}

#[test]
fn an_owner_without_room() {
    let limit = "Private repository storage limit reached, please upgrade your plan";
    let places = ["POST /me/drafter.git", "PUT /storage", "POST /api/models/me/drafter/commit"];
    for place in places {
        for (status, said) in [(413, "Payload Too Large"), (403, limit), (507, "")] {
            // The storage does not know the plan, but its 403 refers to the address.
            if place.starts_with("PUT") && status == 403 {
                continue;
            }
            let world = World::new();
            world.hub.mishap(place, 99, What::Status(status, said));
            let failed = world.fails(&format!("run --repo {REPO}"), "storage on the Hub is full");
            assert!(failed.contains(said) && failed.contains("nothing was published"), "{failed}");
            check_nothing_published(&world);
        }
    }
}

#[test]
fn names_and_repositories_that_do_not_do() {
    let world = World::new();
    let fails = |more: &str, words: &str| world.fails(&format!("run --repo {more}"), words);
    fails("drafter", "--repo is drafter, but it must be OWNER/NAME");
    fails("me/forbidden", "the name cannot be used: Invalid repo name");
    fails("others/drafter", "is not allowed to do that; it needs write access");
    world.hub.add("datasets/me/drafter", false);
    fails(REPO, "the name is taken by a repository that is not a model");
    world.hub.add("models/me/open", false);
    fails("me/open --private", "it exists and is public, but --private was given");
    assert!(world.hub.repository("models/me/open").unwrap().files("main").is_empty());
    world.hub.add("models/me/closed", true);
    world.push("run --repo me/closed");
    assert_eq!(world.hub.repository("models/me/closed").unwrap().files("main").len(), 3);
}

#[test]
fn an_address_where_no_hub_is() {
    let world = World::new();
    let line = format!("run --repo {REPO}");
    let at = |endpoint: &str, words: &str| {
        let variables = [("HF_TOKEN", TOKEN), ("HF_ENDPOINT", endpoint)];
        world.fails_with(&line, &variables, words)
    };
    at("http://127.0.0.1:9", "the same command continues from here");
    at("nonsense", "HF_ENDPOINT is not a valid address");
    // A password in the address is used and not shown, even one that most parsers would cut short.
    let failed =
        at("http://user:pass/word@127.0.0.1:9", "cannot push to me/drafter at http://***@");
    assert!(!failed.contains("pass/word") && !failed.contains("word@"), "{failed}");
    let failed = at("http://user:password@127.0.0.1:9", "cannot push to me/drafter at http://***@");
    assert!(!failed.contains("password"), "{failed}");
}

#[test]
fn files_that_must_not_go() {
    let world = World::new();
    let config = world.path("run/step-000010/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let with_path = text.replacen('{', "{\"_name_or_path\": \"/home/secretuser/x\",", 1);
    std::fs::write(&config, with_path).unwrap();
    let line = format!("run --repo {REPO}");
    world.fails(&line, "_name_or_path is /home/secretuser/x, a path of this machine");
    std::fs::write(&config, text).unwrap();
    let weights = world.path("run/step-000010/model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &whole[..whole.len() - 1]).unwrap();
    world.fails(&line, "model.safetensors is not a readable safetensors file: it has ");
    std::fs::remove_file(&weights).unwrap();
    world.fails(&line, "is not a drafter: it has no model.safetensors");
    assert_eq!(world.hub.requests(), Vec::<String>::new());
}

#[test]
fn a_run_whose_record_is_broken() {
    let world = World::new();
    std::fs::write(world.path("run/run.json"), "{torn").unwrap();
    let failed =
        world.fails(&format!("run --repo {REPO}"), "run.json was not written by a training run");
    assert!(failed.contains("remove it to publish without"), "{failed}");
    check_nothing_published(&world);
    std::fs::remove_file(world.path("run/run.json")).unwrap();
    world.push(&format!("run --repo {REPO}"));
    assert!(world.pushed_card().contains("The files say nothing of how it was trained."));
}
