//! The trainer's stream against the server.

use dflash_hidden_states::{Error, Request, Stream, StreamConfig, WantedRow};

use crate::double::{HIDDEN, Running, config, expected};

fn stream_config(server: &Running, layer_ids: &[u32], hidden_size: usize) -> StreamConfig {
    let endpoints = vec![format!("http://{}/v1", server.address)];
    StreamConfig::new(endpoints, layer_ids.to_vec(), hidden_size)
}

fn request(sample: u64) -> Request {
    let tokens = 1 + sample as i64 * 5 % 40;
    Request { sample, input_ids: (0..tokens).map(|token| (token + sample as i64) % 98).collect() }
}

fn wanted(requests: Vec<Request>) -> Result<WantedRow<()>, Error> {
    Ok(WantedRow { row: (), requests })
}

#[test]
fn rows_arrive_in_order_through_a_queue_that_is_too_small() {
    let server = Running::start(dflash_settings::HiddenServerSettings { max_queue: 4, ..config() });
    let rows: Vec<Vec<Request>> =
        (0..10).map(|row| (row * 3..row * 3 + 3).map(request).collect()).collect();
    let mut config = stream_config(&server, &[2, 5, 8], HIDDEN);
    config.max_in_flight = 6;
    config.vocab_size = Some(100);
    config.num_hidden_layers = Some(8);
    let mut stream = Stream::start(config, rows.clone().into_iter().map(wanted)).unwrap();
    for row in rows {
        let fetched = stream.next_row().unwrap().unwrap().samples;
        for (fetched, request) in fetched.iter().zip(&row) {
            assert_eq!(fetched.sample, request.sample);
            assert_eq!(fetched.states, Some(expected(&request.input_ids, &[2, 5, 8])));
        }
    }
    assert!(stream.next_row().is_none());
    assert_eq!(stream.counters().generated, 30);
}

#[test]
fn the_wrong_server_is_refused_at_the_start() {
    let server = Running::start(config());
    let start = |layer_ids: &[u32], hidden| {
        let rows = std::iter::empty().map(wanted);
        Stream::start(stream_config(&server, layer_ids, hidden), rows).unwrap_err()
    };
    assert!(matches!(start(&[2, 3], HIDDEN), Error::LayerMismatch { .. }));
    assert!(matches!(start(&[2], 5), Error::ModelMismatch { key: "hidden_size", .. }));
}

#[test]
fn a_server_that_stops_in_the_middle_is_named() {
    let server = Running::start(config());
    let mut config = stream_config(&server, &[2], HIDDEN);
    config.retry.deadline = std::time::Duration::from_millis(300);
    config.max_in_flight = 1;
    config.window_bytes = 1;
    let mut stream =
        Stream::start(config, (0..).map(|sample| wanted(vec![request(sample)]))).unwrap();
    stream.next_row().unwrap().unwrap();
    let address = server.address;
    server.end().0.unwrap();
    let error = std::iter::from_fn(|| stream.next_row()).find_map(Result::err).unwrap();
    assert!(matches!(&error, Error::GaveUp { .. }), "{error:?}");
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains(&address.to_string()), "{cause}");
}
