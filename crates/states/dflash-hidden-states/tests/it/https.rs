//! Endpoints over https, with the certificate of an authority given by the user.

use std::process::Command;
use std::sync::Arc;
use std::thread;

use dflash_hidden_states::StreamConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::fake::{
    Server, assert_right, config, drain, full_text, good, own_server, single_rows, start,
};

/// The endpoint, for the test that runs in its own process.
const ENDPOINT: &str = "DFLASH_TEST_HTTPS_ENDPOINT";

fn file(name: &str) -> String {
    format!("{}/tests/it/tls/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Terminates TLS in front of `server`, like a gateway; returns its URL. Ends with the process.
fn gateway(server: &Server) -> String {
    let certificates = CertificateDer::pem_file_iter(file("cert.pem")).unwrap();
    let certificates = certificates.collect::<Result<Vec<_>, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_file(file("key.pem")).unwrap();
    let tls = ServerConfig::builder().with_no_client_auth().with_single_cert(certificates, key);
    let tls = TlsAcceptor::from(Arc::new(tls.unwrap()));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let target = server.url.strip_prefix("http://").unwrap().to_owned();
    let serve = async move {
        let listener = TcpListener::from_std(listener).unwrap();
        while let Ok((client, _)) = listener.accept().await {
            let (tls, target) = (tls.clone(), target.clone());
            tokio::spawn(async move {
                let Ok(mut client) = tls.accept(client).await else { return };
                let mut server = TcpStream::connect(target).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    };
    thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(serve);
    });
    url
}

/// Output of the test below in a process that trusts `authorities`.
fn client(url: &str, authorities: &str) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "https::samples_from_an_https_endpoint", "--nocapture"]);
    command.env(ENDPOINT, url).env("SSL_CERT_FILE", authorities);
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn https_endpoints_serve_those_who_trust_them() {
    let (server, _) = own_server(async |_, request| good(&request));
    let url = gateway(&server);
    let (succeeded, said) = client(&url, &file("ca.pem"));
    assert!(succeeded && said.contains("1 passed"), "{said}");
    // The server's own certificate is not an authority.
    let (succeeded, said) = client(&url, &file("cert.pem"));
    assert!(!succeeded && said.contains("certificate"), "{said}");
}

/// Run by the test above, because a process reads the authorities only once.
#[test]
fn samples_from_an_https_endpoint() {
    let Ok(endpoint) = std::env::var(ENDPOINT) else { return };
    let config: StreamConfig = config(&[&endpoint]);
    match start(config, single_rows(0..20)) {
        Ok(mut stream) => drain(&mut stream).iter().flatten().for_each(assert_right),
        Err(error) => panic!("{}", full_text(&error)),
    }
}
