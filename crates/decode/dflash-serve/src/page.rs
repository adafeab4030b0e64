//! The chat page: one file that loads nothing, and may talk to this server only.

use std::sync::LazyLock;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("page.html");

const REFERRER_POLICY: HeaderName = HeaderName::from_static("referrer-policy");

/// The script and the styles run because of their digests, and nothing else does.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let (script, style) = (digest_of("script"), digest_of("style"));
    let policy = format!(
        "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    HeaderValue::from_str(&policy).expect("ASCII")
});

/// The page with its headers.
pub(crate) fn response() -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, POLICY.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        // After an update of the program the page is a new one.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (headers, PAGE).into_response()
}

/// The digest of the page's only element of a kind, as policies write it.
fn digest_of(element: &str) -> String {
    let (_, rest) = PAGE.split_once(&format!("<{element}>")).expect("the page has one");
    let (content, _) = rest.split_once(&format!("</{element}>")).expect("it ends");
    format!("sha256-{}", STANDARD.encode(Sha256::digest(content)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_what_its_policy_allows_and_nothing_else() {
        for element in ["script", "style"] {
            assert_eq!(PAGE.matches(&format!("<{element}")).count(), 1, "{element}");
            // Of the empty text it would be this one.
            let empty = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=";
            assert_ne!(digest_of(element), empty);
        }
        // Where text comes in as markup, or something is loaded from elsewhere.
        for unsafe_word in [
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            " style=",
            "src=",
            " onclick=",
        ] {
            assert!(!PAGE.contains(unsafe_word), "{unsafe_word}");
        }
        let addresses: Vec<&str> =
            PAGE.match_indices("://").map(|(at, _)| &PAGE[at..at + 20]).collect();
        assert!(
            addresses.iter().all(|address| address.starts_with("://www.w3.org/2000")),
            "{addresses:?}"
        );
    }
}
