//! Start, readiness, stop.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use dflash_hidden_server::{Error, Loader, serve};
use dflash_settings::HiddenServerSettings;
use dflash_test_support::eventually;

use crate::double::{Desk, Double, LAYERS, Running, config, expected, facts, refusal, states};

fn double() -> Loader {
    Box::new(|| Ok(Box::new(Double { facts: facts(), desk: Arc::new(Desk::default()) })))
}

fn start_error(config: &HiddenServerSettings, load: Loader) -> Error {
    let stop = Arc::new(AtomicBool::new(false));
    serve(config, load, &stop, |_| panic!("it is not ready")).unwrap_err()
}

#[test]
fn a_taken_port_is_named_with_the_way_out() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let text = start_error(&HiddenServerSettings { port, ..config() }, double()).to_string();
    assert!(text.contains(&format!("port {port} is in use")), "{text}");
    assert!(text.contains("--port"), "{text}");
}

#[test]
fn a_host_that_is_not_ours_is_named() {
    for host in ["203.0.113.7", "no such host"] {
        let error = start_error(&HiddenServerSettings { host: host.into(), ..config() }, double());
        assert!(matches!(error, Error::Http(dflash_http::Error::BadHost { .. })), "{error:?}");
        assert!(error.to_string().contains(host), "{error}");
    }
}

#[test]
fn a_model_that_does_not_load_ends_the_server_with_its_reason() {
    let load: Loader = Box::new(|| Err(Error::TooLongContext { asked: 9, limit: 8 }));
    let dir = tempfile::tempdir().unwrap();
    let port_file = Some(dir.path().join("port"));
    let error = start_error(&HiddenServerSettings { port_file, ..config() }, load);
    assert!(matches!(error, Error::TooLongContext { asked: 9, limit: 8 }), "{error:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "no port file");
}

#[test]
fn the_port_file_holds_the_port() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("port");
    let server = Running::start(HiddenServerSettings { port_file: Some(path.clone()), ..config() });
    let port: u16 = std::fs::read_to_string(path).unwrap().trim().parse().unwrap();
    assert_eq!(port, server.address.port());
    let unwritable =
        HiddenServerSettings { port_file: Some("/no/such/dir/port".into()), ..config() };
    let load: Loader = Box::new(|| panic!("it is refused before it loads"));
    assert!(start_error(&unwritable, load).to_string().contains("/no/such/dir/port"));
}

#[tokio::test(flavor = "multi_thread")]
async fn while_it_loads_it_says_so() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (release, wait) = mpsc::channel::<()>();
    let load: Loader = Box::new(move || {
        wait.recv().unwrap();
        double()()
    });
    let starting =
        std::thread::spawn(move || Running::load(HiddenServerSettings { port, ..config() }, load));
    eventually("the server listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
    for path in ["/health", "/v1/models"] {
        let url = format!("http://127.0.0.1:{port}{path}");
        let response = client.get(&url).send().await.unwrap();
        assert_eq!(response.headers()["retry-after"], "1");
        let (status, error) = refusal(response).await;
        assert_eq!(status, 503);
        assert!(error["message"].as_str().unwrap().contains("loading"), "{error}");
    }
    release.send(()).unwrap();
    let server = starting.join().unwrap();
    assert_eq!(server.health().await["status"], "ok");
}

#[test]
fn a_stop_while_loading_ends_it() {
    let load: Loader = Box::new(|| {
        loop {
            std::thread::park();
        }
    });
    let stop = Arc::new(AtomicBool::new(true));
    let began = Instant::now();
    serve(&config(), load, &stop, |_| panic!("it is not ready")).unwrap();
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[test]
fn an_idle_server_stops_at_once_even_with_a_client_connected() {
    let server = Running::start(config());
    let mut idle = TcpStream::connect(server.address).unwrap();
    write!(idle, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert!(idle.read(&mut [0; 64]).unwrap() > 0);
    let address = server.address;
    let (outcome, took) = server.end();
    outcome.unwrap();
    // Pending replies have two seconds.
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(TcpStream::connect(address).is_err(), "it still listens");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_finishes_the_batch_and_sends_the_rest_away() {
    let server = Arc::new(Running::start(config()));
    server.desk.close();
    let ask = |ids: Vec<i64>| {
        let server = Arc::clone(&server);
        tokio::spawn(async move { server.prompt(&ids).await })
    };
    let running = ask(vec![1]);
    server.desk.await_batch();
    let waiting = ask(vec![2]);
    server.until("waiting", 1).await;
    server.stop.store(true, Ordering::SeqCst);
    let (status, error) = refusal(waiting.await.unwrap()).await;
    assert_eq!((status, error["message"].as_str()), (503, Some("the server is shutting down")));
    server.desk.open();
    assert_eq!(states(running.await.unwrap()).await, expected(&[1], &LAYERS));
}

#[test]
fn a_batch_that_takes_forever_does_not_hold_up_the_stop() {
    let server = Running::start(config());
    let desk = Arc::clone(&server.desk);
    desk.close();
    let mut client = TcpStream::connect(server.address).unwrap();
    let body = r#"{"input_ids":[1]}"#;
    write!(
        client,
        "POST /v1/hidden_states HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    desk.await_batch();
    let (outcome, took) = server.end();
    outcome.unwrap();
    assert!(took < Duration::from_secs(4), "{took:?}");
    desk.open();
}

#[test]
fn a_model_thread_that_dies_ends_the_server() {
    let load: Loader = Box::new(|| panic!("a bug (this message is part of a test)"));
    assert!(matches!(start_error(&config(), load), Error::Http(dflash_http::Error::ModelGone)));
}
