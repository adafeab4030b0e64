//! The book and the other pages: links lead somewhere, every page has its place, no page is longer than
//! its readers have time for, and the pictures are those of their data.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::program::run;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the tree").to_owned()
}

/// The fenced blocks of a page that are meant to be run.
pub(crate) fn shell_blocks(text: &str) -> Vec<&str> {
    let blocks = text.split("\n```sh\n").skip(1);
    blocks.map(|block| block.split_once("\n```").expect("a block ends").0).collect()
}

/// Every Markdown page below `dir`.
fn pages(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            found.extend(pages(&path));
        } else if path.extension().is_some_and(|ending| ending == "md") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The text without fenced blocks.
fn prose(text: &str) -> String {
    let mut fenced = false;
    let keep = |line: &&str| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    };
    text.lines().filter(keep).map(|line| format!("{line}\n")).collect()
}

/// Where `[text](target)` and `![text](target)` lead.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let parts = prose.split("](").skip(1);
    parts.filter_map(|part| part.split_once(')')).map(|(link, _)| link.to_owned()).collect()
}

/// The anchors of a page's headings, as mdBook and GitHub make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let prose = prose(text);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// What is wrong with a link of `page`.
fn fault(page: &Path, link: &str) -> Option<String> {
    let external = ["http://", "https://", "mailto:"].iter().any(|scheme| link.starts_with(scheme));
    // A chapter of the book that is still to come has no link.
    if external || link.is_empty() {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let path = if file.is_empty() { page.to_owned() } else { page.parent()?.join(file) };
    if !path.exists() {
        return Some(format!("{}: {link} leads nowhere", page.display()));
    }
    if anchor.is_empty() {
        return None;
    }
    let text = fs::read_to_string(&path).ok()?;
    let known = anchors(&text).contains(anchor);
    (!known).then(|| format!("{}: {link} names no heading", page.display()))
}

#[test]
fn links_lead_somewhere() {
    let root = root();
    let mut all = pages(&root.join("docs"));
    let others = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LOG.md"];
    all.extend(others.iter().map(|name| root.join(name)));
    all.extend([root.join("data/README.md"), root.join("recipes/README.md")]);
    let mut seen = 0;
    let mut faults = Vec::new();
    for page in all {
        let found = links(&fs::read_to_string(&page).unwrap());
        seen += found.len();
        faults.extend(found.iter().filter_map(|link| fault(&page, link)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(seen > 50, "only {seen} links were found");
}

/// What lies outside docs/ is not in the book.
#[test]
fn pages_of_the_book_link_within_it() {
    let docs = root().join("docs").canonicalize().unwrap();
    for page in pages(&docs) {
        for link in links(&fs::read_to_string(&page).unwrap()) {
            let file = link.split('#').next().unwrap_or_default();
            if link.contains("://") || file.is_empty() {
                continue;
            }
            let Ok(path) = page.parent().unwrap().join(file).canonicalize() else { continue };
            assert!(path.starts_with(&docs), "{}: {link}", page.display());
        }
    }
}

#[test]
fn every_page_has_one_place_in_the_book() {
    let docs = root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: Vec<PathBuf> = links(&summary)
        .into_iter()
        .filter(|link| !link.is_empty())
        .map(|link| docs.join(link))
        .collect();
    let places: BTreeSet<&PathBuf> = listed.iter().collect();
    assert_eq!(places.len(), listed.len(), "a page is listed twice");
    let pages = pages(&docs);
    for page in pages.iter().filter(|page| !page.ends_with("SUMMARY.md")) {
        assert!(places.contains(page), "{} is not in docs/SUMMARY.md", page.display());
    }
    assert_eq!(listed.len() + 1, pages.len(), "docs/SUMMARY.md lists what is not there");
}

/// The words of a text: what has a letter or a digit.
fn words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
}

/// Commands are not counted: they are there to be copied.
#[test]
fn the_book_is_short_enough_to_be_read() {
    let docs = root().join("docs");
    // flags.md is made from the definitions of the flags, and the list of pages is not read.
    let written = |page: &PathBuf| !page.ends_with("flags.md") && !page.ends_with("SUMMARY.md");
    let read = |page: PathBuf| fs::read_to_string(page).expect("readable");
    let pages = pages(&docs).into_iter().filter(written);
    let total: usize = pages.map(|page| words(&prose(&read(page)))).sum();
    assert!(total <= 20_000, "the pages of docs/ have {total} words");
    for page in self::pages(&docs.join("roles")) {
        let count = words(&read(page.clone()));
        assert!(count < 600, "{} has {count} words", page.display());
    }
}

#[test]
fn the_readme_is_a_screen_and_a_half() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let (lines, words) = (readme.lines().count(), words(&readme));
    assert!(lines <= 90 && words <= 600, "{lines} lines, {words} words");
}

/// Every command of the program has a line under "Commands" in the book's list: its page, or a page that
/// is named after it.
#[test]
fn every_command_is_in_the_books_list() {
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let (_, commands) = summary.split_once("\n# Commands\n").expect("a part of its own");
    let commands = commands.split("\n# ").next().unwrap();
    for name in [
        "prepare",
        "regenerate",
        "hidden-server",
        "train",
        "plan",
        "report",
        "eval",
        "bench",
        "generate",
        "serve",
        "export",
        "push",
        "doctor",
        "demo",
    ] {
        assert!(commands.contains(&format!("- [{name}](")), "{name} is not listed");
    }
}

#[test]
fn pictures_are_those_of_their_data() {
    run(Command::new("python3").arg(root().join("scripts/figures.py")).arg("--check")).ok();
}

/// The values of an attribute in a page of HTML.
fn values<'a>(html: &'a str, attribute: &str) -> Vec<&'a str> {
    let parts = html.split(&format!(" {attribute}=\"")[..]).skip(1).collect::<Vec<_>>();
    parts.into_iter().filter_map(|part| part.split_once('"')).map(|(value, _)| value).collect()
}

/// What is wrong with a link of a page of the book below `root`.
fn html_fault(root: &Path, page: &Path, link: &str) -> Option<String> {
    if link.contains(':') {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let path = if file.is_empty() { page.to_owned() } else { page.parent()?.join(file) };
    let shown = page.strip_prefix(root).unwrap_or(page).display();
    let Ok(html) = fs::read(&path) else { return Some(format!("{shown}: {link} leads nowhere")) };
    let known =
        anchor.is_empty() || values(&String::from_utf8_lossy(&html), "id").contains(&anchor);
    (!known).then(|| format!("{shown}: {link} names nothing"))
}

/// mdBook itself, where it is installed: it has nothing to say, and what it made hangs together.
#[test]
fn mdbook_builds_the_book() {
    if Command::new("mdbook").arg("--version").output().is_err() {
        println!("skipped: mdbook is not installed");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut build = Command::new("mdbook");
    let built = run(build.arg("build").arg(root()).arg("--dest-dir").arg(dir.path())).ok();
    for word in ["WARN", "ERROR"] {
        assert!(!built.stderr.contains(word), "{}", built.stderr);
    }
    let docs = root().join("docs").canonicalize().unwrap();
    let (mut seen, mut faults) = (0, Vec::new());
    for source in pages(&docs).iter().filter(|page| !page.ends_with("SUMMARY.md")) {
        let place = source.strip_prefix(&docs).unwrap().with_extension("html");
        let place = if place.ends_with("README.html") { "index.html".into() } else { place };
        let page = dir.path().join(place);
        let html = fs::read_to_string(&page).unwrap();
        let links = [values(&html, "href"), values(&html, "src")].concat();
        seen += links.len();
        faults.extend(links.iter().filter_map(|link| html_fault(dir.path(), &page, link)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(seen > 500, "only {seen} links were found");
}

#[test]
fn links_and_anchors_are_read_as_they_are_written() {
    let text =
        "a [b](c.md#d-e) ![f](g.svg)\n```sh\n[not](this)\n# nor this\n```\n## `D`: e, \"f\"!\n";
    assert_eq!(links(text), ["c.md#d-e", "g.svg"]);
    assert_eq!(anchors(text), ["d-e-f".to_owned()].into());
}
