//! The frame of every HTML page: its style, its script, and a policy that lets nothing else in.
//!
//! A page needs no other file and no network. It carries a Content-Security-Policy that names style
//! and script by their digests, so text from a file that escaped its escaping could still not run.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

/// The style of every page: light and dark, wide and narrow.
pub const PAGE_STYLE: &str = include_str!("page.css");

/// A page whose parts are HTML already, except for the title.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// The title, as text.
    pub title: &'a str,
    /// The contents of `<body>`.
    pub body: &'a str,
    /// The script at the end of it; empty for none.
    pub script: &'a str,
    /// Whether the script may ask the server that the page came from.
    pub asks_its_server: bool,
}

impl Page<'_> {
    /// The whole document.
    pub fn html(&self) -> String {
        let Self { body, script, .. } = self;
        let title = escape(self.title);
        let script = match script.is_empty() {
            true => String::new(),
            false => format!("<script>{script}</script>\n"),
        };
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"{}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <link rel=\"icon\" href=\"data:,\">\n\
             <title>{title}</title>\n<style>{PAGE_STYLE}</style>\n</head>\n<body>\n{body}\n{script}\
             </body>\n</html>\n",
            self.policy()
        )
    }

    /// The Content-Security-Policy of the document, for its header too.
    pub fn policy(&self) -> String {
        let mut policy = format!(
            "default-src 'none'; style-src {}; img-src data:; base-uri 'none'; form-action 'none'",
            source(PAGE_STYLE)
        );
        if !self.script.is_empty() {
            policy += &format!("; script-src {}", source(self.script));
        }
        if self.asks_its_server {
            policy += "; connect-src 'self'";
        }
        policy
    }
}

/// The policy's name for an inline style or script.
pub fn source(text: &str) -> String {
    format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)))
}

/// Text as HTML shows it, in elements and in quoted attributes.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_names_style_and_script_by_what_they_are() {
        let page = Page { title: "a<b", body: "<p>x</p>", script: "", asks_its_server: false };
        assert!(page.html().contains("<title>a&lt;b</title>"));
        assert!(page.html().contains(&format!("content=\"{}\"", page.policy())));
        assert!(!page.policy().contains("script-src") && !page.policy().contains("connect-src"));
        // printf '' | openssl dgst -sha256 -binary | base64
        assert_eq!(source(""), "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='");
        let live = Page { script: "1", asks_its_server: true, ..page };
        assert!(
            live.policy().ends_with(&format!("script-src {}; connect-src 'self'", source("1")))
        );
    }

    #[test]
    fn the_style_fetches_nothing_and_ends_no_element() {
        for reference in ["url(", "@import", "http", "</"] {
            assert!(!PAGE_STYLE.contains(reference), "{reference}");
        }
        for part in ["prefers-color-scheme: dark", "max-width: 560px", ":focus-visible"] {
            assert!(PAGE_STYLE.contains(part), "{part}");
        }
    }
}
