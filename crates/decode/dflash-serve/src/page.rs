//! The chat page: one file that loads nothing, and may talk to this server only.

use std::sync::LazyLock;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use dflash_http::{PAGE_STYLE, source};

const REFERRER_POLICY: HeaderName = HeaderName::from_static("referrer-policy");

static PAGE: LazyLock<String> =
    LazyLock::new(|| include_str!("page.html").replacen("/*STYLE*/", PAGE_STYLE, 1));

/// The script and the style are let in by their digests, and nothing else is.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        source(content_of("script")),
        source(content_of("style"))
    );
    HeaderValue::from_str(&policy).expect("ASCII")
});

/// The page with its headers.
pub(crate) fn response() -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, POLICY.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        // Another version of the program has another page.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (headers, PAGE.as_str()).into_response()
}

/// The text of the page's only element of a kind.
fn content_of(element: &str) -> &'static str {
    let (_, rest) = PAGE.split_once(&format!("<{element}>")).expect("the page has one");
    rest.split_once(&format!("</{element}>")).expect("it ends").0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_takes_no_text_as_markup() {
        for element in ["script", "style"] {
            assert_eq!(PAGE.matches(&format!("<{element}")).count(), 1, "{element}");
        }
        assert!(content_of("style").contains(PAGE_STYLE));
        let unsafe_words = [
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            " style=",
            " src=",
            " onclick=",
            "@import",
            "localStorage",
            "document.cookie",
        ];
        for word in unsafe_words {
            assert!(!PAGE.contains(word), "{word}");
        }
        // Names of markup languages are no addresses to load from.
        let addresses: Vec<&str> = PAGE.split("http://").skip(1).collect();
        assert!(!PAGE.contains("https://"));
        assert!(addresses.iter().all(|address| address.starts_with("www.w3.org/2000/svg")));
    }
}
