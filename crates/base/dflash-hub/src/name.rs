//! Names of repositories: `OWNER/NAME`, and `OWNER/NAME@REVISION` for a branch, tag or commit.

/// A repository and an optional revision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name<'a> {
    pub(crate) owner: &'a str,
    pub(crate) name: &'a str,
    pub(crate) revision: Option<&'a str>,
}

impl<'a> Name<'a> {
    pub(crate) fn parse(text: &'a str) -> Option<Self> {
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (text, None),
        };
        let (owner, name) = id.split_once('/')?;
        let is_valid = is_word(owner) && is_word(name) && revision.is_none_or(is_revision);
        is_valid.then_some(Self { owner, name, revision })
    }
}

/// Whether `name` has the form of a repository on the Hub, with or without a revision.
pub fn is_repository(name: &str) -> bool {
    Name::parse(name).is_some()
}

fn is_word(word: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !word.is_empty() && !word.starts_with(['.', '-']) && word.chars().all(is_plain)
}

/// A revision becomes a path in the cache, which it must not leave.
fn is_revision(revision: &str) -> bool {
    revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_owner_and_perhaps_a_revision() {
        let check = |text, owner, name, revision| {
            assert_eq!(Name::parse(text), Some(Name { owner, name, revision }), "{text}");
        };
        check("Qwen/Qwen3-0.6B", "Qwen", "Qwen3-0.6B", None);
        check("a/b@main", "a", "b", Some("main"));
        check("a/b@refs/pr/1", "a", "b", Some("refs/pr/1"));
        let paths = ["gpt2", "./a", "../a", "/a/b", "a/b/c", "a/", "a/b c", "~/a", "output/.x"];
        let revisions = ["a/b@", "a/b@/main", "a/b@../../x", "a@b/c"];
        for text in paths.iter().chain(&revisions) {
            assert!(!is_repository(text), "{text}");
        }
    }
}
