//! Which web pages may use a server.
//!
//! A browser lets any page send requests to any address, including loopback, and only hides the
//! replies from it. A page can even read replies if its own host name is made to resolve to
//! 127.0.0.1 while it is open (DNS rebinding). So a server that listens on loopback only answers
//! only to loopback's own names, and a request with an `Origin`, which browsers send and other
//! clients do not, is answered only for origins that the server's owner has listed.
//!
//! A server's own page has the origin that the request's `Host` names. That alone proves nothing: a
//! page whose name was made to resolve to this machine has such an origin too. So the host must be
//! one that cannot be made to resolve elsewhere: a loopback name, an IP address, the name that the
//! server was told to listen on, or the host of a listed origin.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::refusal::Refusal;

/// How long a browser may cache a permission, in seconds.
const REMEMBERED: &str = "600";
/// Chrome sends it before a public page may access a private address.
const ASKS_PRIVATE: HeaderName = HeaderName::from_static("access-control-request-private-network");
const ALLOWS_PRIVATE: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// What a server allows.
#[derive(Debug, Default)]
pub struct Guard {
    /// Origins whose pages may use it; `*` for all.
    pub allowed_origins: Vec<String>,
    /// Whether requests need a key: then a page cannot make them, whatever its name.
    pub has_key: bool,
    /// Whether it answers to its own names only on other addresses than loopback too: for pages
    /// without a key.
    pub only_own_names: bool,
    /// The host name that it was told to listen on.
    pub host: String,
    /// Whether it has a page of its own, which may use it.
    pub has_page: bool,
    /// Set once the address is known.
    pub listens_on: OnceLock<SocketAddr>,
}

impl Guard {
    /// Whether `host`, the value of a `Host` header, is a loopback name, or beyond loopback an
    /// address: a page can make a name its own, but no address.
    fn is_own(&self, host: &str, on_loopback: bool) -> bool {
        let name = name_in(host).trim_end_matches('.').to_ascii_lowercase();
        name == "localhost"
            || name == self.host.to_ascii_lowercase()
            || name.parse::<IpAddr>().is_ok_and(|it| it.is_loopback() || !on_loopback)
    }

    /// Whether `host` cannot be a foreign page's name that resolves to this machine.
    fn is_trusted(&self, host: &str) -> bool {
        let of_origin = |origin: &str| origin.split_once("://").map(|(_, host)| host.to_owned());
        let is_listed = |allowed: &String| {
            allowed == "*"
                || of_origin(allowed.trim_end_matches('/'))
                    .is_some_and(|listed| listed.eq_ignore_ascii_case(host))
        };
        self.is_own(host, false) || self.allowed_origins.iter().any(is_listed)
    }

    /// Whether `origin` is that of the server's own page, by the request's only host.
    fn is_own_page(&self, origin: &str, headers: &HeaderMap) -> bool {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
        let host = host.to_str().unwrap_or_default();
        self.has_page
            && self.is_trusted(host)
            && origin.strip_prefix("http://").is_some_and(|own| own.eq_ignore_ascii_case(host))
    }

    /// Whether the server's own page may be shown under the request's host.
    ///
    /// # Errors
    /// 403 for a name that another page's owner may have made to resolve to this machine.
    pub fn check_page(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        for host in headers.get_all(header::HOST) {
            let host = host.to_str().unwrap_or("of no readable name");
            if !self.is_trusted(host) {
                let host: String = host.chars().take(100).collect();
                let message = format!(
                    "this page is not shown under the host {host:?}; open it by localhost or an IP address, or start the server with --allowed-origins http://{host}"
                );
                return Err(Refusal::new(StatusCode::FORBIDDEN, message));
            }
        }
        Ok(())
    }

    fn check_host(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let on_loopback = self.listens_on.get().is_none_or(|address| address.ip().is_loopback());
        if self.has_key || !(on_loopback || self.only_own_names) {
            return Ok(());
        }
        for host in headers.get_all(header::HOST) {
            let host = host.to_str().unwrap_or("of no readable name");
            if !self.is_own(host, on_loopback) {
                let host: String = host.chars().take(100).collect();
                return Err(Refusal::new(StatusCode::FORBIDDEN, self.foreign(&host, on_loopback)));
            }
        }
        Ok(())
    }

    /// The message for a host that is not its own.
    fn foreign(&self, host: &str, on_loopback: bool) -> String {
        match (on_loopback, self.only_own_names) {
            (true, false) => format!(
                "this server listens on loopback and does not answer to the host {host:?}; use localhost or 127.0.0.1, or start it with an --api-key or another --host"
            ),
            (true, true) => format!(
                "this server listens on loopback and does not answer to the host {host:?}; use localhost or 127.0.0.1, or start it with another --host"
            ),
            (false, _) => format!(
                "this server does not answer to the host {host:?}; use its address, or start it with that name as --host"
            ),
        }
    }

    /// The origin of another page that may use the server; `None` if the request has no origin, or
    /// comes from the server's own page.
    fn check_origin(&self, headers: &HeaderMap) -> Result<Option<HeaderValue>, Refusal> {
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(None) };
        let text = origin.to_str().unwrap_or_default();
        let is_allowed = |allowed: &String| {
            allowed == "*" || allowed.trim_end_matches('/').eq_ignore_ascii_case(text)
        };
        if self.allowed_origins.iter().any(is_allowed) {
            return Ok(Some(origin.clone()));
        }
        if self.is_own_page(text, headers) {
            return Ok(None);
        }
        let text: String = text.chars().take(100).collect();
        let message = format!("pages of the origin {text:?} may not use this server");
        Err(Refusal::new(StatusCode::FORBIDDEN, message))
    }
}

/// The name or address in the value of a `Host` header.
fn name_in(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    }
}

/// Wraps every request: refuses requests of other pages, answers CORS preflight requests, and lets
/// an allowed page read the reply.
pub async fn guard(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    if let Err(refusal) = guard.check_host(request.headers()) {
        return refusal.into_response();
    }
    let origin = match guard.check_origin(request.headers()) {
        Ok(Some(origin)) => origin,
        Ok(None) => return next.run(request).await,
        Err(refusal) => return refusal.into_response(),
    };
    let asks_first = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response =
        if asks_first { allowance(request.headers()) } else { next.run(request).await };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    let exposed = HeaderValue::from_static("retry-after, retry-after-ms");
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    response
}

/// The answer to a CORS preflight request.
fn allowance(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST, OPTIONS");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(REMEMBERED));
    // Clients send headers of their own, such as x-stainless-lang; none of them has an effect here.
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let plain = HeaderValue::from_static("authorization, content-type");
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or(plain));
    if asked.contains_key(ASKS_PRIVATE) {
        headers.insert(ALLOWS_PRIVATE, HeaderValue::from_static("true"));
    }
    response
}

/// Whether a request declares a JSON body. A form does not, nor does a page without a preflight
/// request.
pub fn says_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, value.parse().unwrap())])
    }

    #[test]
    fn loopback_answers_to_its_own_names() {
        let guard = |address: &str, has_key| Guard {
            has_key,
            host: "my-laptop".into(),
            listens_on: OnceLock::from(address.parse::<SocketAddr>().unwrap()),
            ..Guard::default()
        };
        let check = |guard: &Guard, host: &str, expect: bool| {
            assert_eq!(guard.check_host(&headers(header::HOST, host)).is_ok(), expect, "{host}");
        };
        let local = guard("127.0.0.1:8000", false);
        for own in [
            "localhost",
            "LocalHost:8000",
            "127.0.0.1:8000",
            "127.1.2.3",
            "[::1]:8000",
            "my-laptop",
        ] {
            check(&local, own, true);
        }
        for other in [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "",
            "[::2]",
        ] {
            check(&local, other, false);
        }
        check(&guard("0.0.0.0:8000", false), "evil.example", true);
        check(&guard("127.0.0.1:8000", true), "evil.example", true);
        assert!(local.check_host(&HeaderMap::new()).is_ok());
        let strict = Guard { only_own_names: true, ..guard("0.0.0.0:8000", false) };
        check(&strict, "evil.example", false);
        for own in ["10.0.0.1:8000", "localhost", "my-laptop:8000", "[fe80::1]:8000"] {
            check(&strict, own, true);
        }
        let strict = Guard { only_own_names: true, ..guard("127.0.0.1:8000", false) };
        check(&strict, "10.0.0.1", false);
    }

    #[test]
    fn pages_are_let_in_by_their_origin() {
        let check = |allowed: &[&str], origin: &str, expect: bool| {
            let allowed_origins = allowed.iter().map(|origin| (*origin).to_owned()).collect();
            let guard = Guard { allowed_origins, ..Guard::default() };
            assert_eq!(
                guard.check_origin(&headers(header::ORIGIN, origin)).is_ok(),
                expect,
                "{origin}"
            );
        };
        check(&["https://chat.example"], "https://chat.example", true);
        check(&["https://chat.example/"], "https://chat.example", true);
        check(&["https://chat.example"], "http://chat.example", false);
        check(&["https://chat.example"], "https://chat.example.evil", false);
        check(&["*"], "null", true);
        check(&[], "null", false);
        check(&[], "http://localhost:3000", false);
    }

    #[test]
    fn a_servers_own_page_may_use_it_under_hosts_that_are_nobody_elses() {
        let guard = |allowed: &[&str]| Guard {
            allowed_origins: allowed.iter().map(|origin| (*origin).to_owned()).collect(),
            host: "0.0.0.0".into(),
            has_page: true,
            listens_on: OnceLock::from("0.0.0.0:8000".parse::<SocketAddr>().unwrap()),
            ..Guard::default()
        };
        let check = |guard: &Guard, host: &str, origin: &str, expect: bool| {
            let mut both = headers(header::HOST, host);
            both.insert(header::ORIGIN, origin.parse().unwrap());
            assert_eq!(guard.check_origin(&both).is_ok(), expect, "{host} {origin}");
        };
        let own = guard(&[]);
        // By another port where the connection is forwarded.
        check(&own, "localhost:9000", "http://localhost:9000", true);
        check(&own, "192.168.1.5:8000", "http://192.168.1.5:8000", true);
        check(&own, "[fd00::1]:8000", "http://[fd00::1]:8000", true);
        check(&own, "localhost:8000", "http://localhost:3000", false);
        check(&own, "localhost:8000", "http://127.0.0.1:8000", false);
        check(&own, "localhost:8000", "https://localhost:8000", false);
        check(&own, "localhost:8000", "null", false);
        check(&own, "evil.example:8000", "http://evil.example:8000", false);
        check(&own, "127.0.0.1.evil.example", "http://127.0.0.1.evil.example", false);
        let listed = guard(&["http://gpubox:8000"]);
        check(&listed, "gpubox:8000", "http://gpubox:8000", true);
        check(&listed, "gpubox:8000", "http://gpubox:9000", false);
        let without_page = Guard { has_page: false, ..guard(&[]) };
        check(&without_page, "localhost:8000", "http://localhost:8000", false);
        let mut two = headers(header::HOST, "evil.example:8000");
        two.append(header::HOST, "localhost:8000".parse().unwrap());
        two.insert(header::ORIGIN, "http://localhost:8000".parse().unwrap());
        assert!(own.check_origin(&two).is_err());
    }

    #[test]
    fn a_page_is_not_shown_under_a_foreign_host() {
        let check = |allowed: &[&str], host: &str, expect: bool| {
            let allowed_origins = allowed.iter().map(|origin| (*origin).to_owned()).collect();
            // With a key the requests of other hosts are answered; the page is not.
            let own = "127.0.0.1".into();
            let guard = Guard { allowed_origins, has_key: true, host: own, ..Guard::default() };
            assert_eq!(guard.check_page(&headers(header::HOST, host)).is_ok(), expect, "{host}");
        };
        check(&[], "localhost:8000", true);
        check(&[], "10.0.0.7:8000", true);
        check(&[], "evil.example:8000", false);
        check(&[], "", false);
        check(&["https://chat.example/"], "chat.example", true);
        check(&["https://chat.example"], "chat.example.evil", false);
        check(&["*"], "gpubox", true);
    }

    #[test]
    fn json_is_said() {
        let check = |kind: &str, expect: bool| {
            assert_eq!(says_json(&headers(header::CONTENT_TYPE, kind)), expect, "{kind}");
        };
        check("application/json", true);
        check("Application/JSON; charset=utf-8", true);
        check("application/problem+json", true);
        check("text/plain", false);
        check("application/x-www-form-urlencoded", false);
        assert!(!says_json(&HeaderMap::new()));
    }
}
