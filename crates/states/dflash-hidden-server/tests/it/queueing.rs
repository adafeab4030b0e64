//! Queueing: limits, batching, and clients that disconnect.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dflash_settings::HiddenServerSettings;
use dflash_test_support::eventually;
use futures::future::join_all;
use serde_json::json;

use crate::double::{LAYERS, Running, config, expected, refusal, states};

/// A server whose model has started a prompt and will not finish it until opened.
async fn occupied(max_queue: usize) -> Arc<Running> {
    let server = Running::start(HiddenServerSettings { max_queue, ..config() });
    server.desk.close();
    let server = Arc::new(server);
    send(&server, vec![1]);
    server.desk.await_batch();
    server
}

/// Sends a prompt in the background and checks its rows.
fn send(server: &Arc<Running>, input_ids: Vec<i64>) -> tokio::task::JoinHandle<()> {
    let server = Arc::clone(server);
    tokio::spawn(async move {
        let response = server.prompt(&input_ids).await;
        assert_eq!(states(response).await, expected(&input_ids, &LAYERS));
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_the_queue_clients_are_told_to_come_back() {
    let server = occupied(3).await;
    let waiting = [send(&server, vec![2]), send(&server, vec![3])];
    server.until("in_use", 3).await;
    let response = server.prompt(&[4]).await;
    assert_eq!(response.headers()["retry-after"], "1");
    let wait: u64 = response.headers()["retry-after-ms"].to_str().unwrap().parse().unwrap();
    assert!((50..=1000).contains(&wait), "{wait} ms");
    let (status, error) = refusal(response).await;
    assert_eq!(status, 429);
    assert!(error["message"].as_str().unwrap().contains("3 requests"), "{error}");
    server.desk.open();
    for answered in join_all(waiting).await {
        answered.unwrap();
    }
    server.until("in_use", 0).await;
    assert_eq!(server.health().await["put_off"], 1);
    assert_eq!(states(server.prompt(&[4]).await).await, expected(&[4], &LAYERS));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_is_run_together_up_to_the_token_budget() {
    let server = occupied(16).await;
    let mut waiting = Vec::new();
    for (index, tokens) in [60, 40, 30, 64].into_iter().enumerate() {
        waiting.push(send(&server, vec![index as i64; tokens]));
        server.until("waiting", index as u64 + 1).await;
    }
    server.desk.open();
    for answered in join_all(waiting).await {
        answered.unwrap();
    }
    assert_eq!(server.desk.batches(), [vec![1], vec![60, 40], vec![30, 64]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_runs_the_layers_that_its_prompts_want() {
    let server = occupied(16).await;
    let ask = |layers: Vec<u32>| {
        let server = Arc::clone(&server);
        tokio::spawn(async move {
            let body = json!({"input_ids": [7, 8], "layer_ids": layers}).to_string();
            assert_eq!(states(server.post(body).await).await, expected(&[7, 8], &layers));
        })
    };
    let waiting = [ask(vec![2]), ask(vec![0, 2])];
    server.until("waiting", 2).await;
    server.desk.open();
    for answered in join_all(waiting).await {
        answered.unwrap();
    }
    assert_eq!(server.desk.layers.lock().unwrap()[1], [0, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_the_queue_is_not_served() {
    let server = occupied(16).await;
    let leaving = send(&server, vec![2; 20]);
    server.until("waiting", 1).await;
    let staying = send(&server, vec![3; 30]);
    server.until("waiting", 2).await;
    leaving.abort();
    server.until("in_use", 2).await;
    server.desk.open();
    staying.await.unwrap();
    assert_eq!(server.desk.batches(), [vec![1], vec![30]]);
    assert_eq!(server.health().await["cancelled"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_during_its_batch_harms_nobody() {
    let server = occupied(16).await;
    let leaving = send(&server, vec![2; 20]);
    let staying = send(&server, vec![3; 30]);
    server.until("waiting", 2).await;
    server.desk.open();
    leaving.abort();
    staying.await.unwrap();
    server.until("in_use", 0).await;
    assert_eq!(states(server.prompt(&[4]).await).await, expected(&[4], &LAYERS));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_batch_is_run_in_halves() {
    let server = occupied(16).await;
    // Token 99 fails in a batch, token 98 always.
    let fine = [send(&server, vec![99, 5]), send(&server, vec![6])];
    server.until("waiting", 2).await;
    let failing = {
        let server = Arc::clone(&server);
        tokio::spawn(async move { refusal(server.prompt(&[98]).await).await })
    };
    server.until("waiting", 3).await;
    server.desk.open();
    for answered in join_all(fine).await {
        answered.unwrap();
    }
    let (status, error) = failing.await.unwrap();
    assert_eq!((status, &error["type"]), (500, &json!("server_error")));
    assert!(error["message"].as_str().unwrap().contains("made-up fault"), "{error}");
    assert_eq!(server.health().await["failed"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_reply_that_the_socket_takes_gives_its_slot_back() {
    let server = Running::start(HiddenServerSettings { max_queue: 1, ..config() });
    let unread = server.prompt(&[1; 64]).await;
    server.until("in_use", 0).await;
    assert_eq!(states(server.prompt(&[2]).await).await, expected(&[2], &LAYERS));
    assert_eq!(states(unread).await, expected(&[1; 64], &LAYERS));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_batch_begins_while_rows_come_and_no_more_than_that() {
    let server =
        Arc::new(Running::start(HiddenServerSettings { max_batch_tokens: 20, ..config() }));
    server.desk.rows_come_later.store(true, Ordering::SeqCst);
    server.desk.close();
    server.desk.rows_door.close();
    let prompts: Vec<Vec<i64>> = (1..=4).map(|seed| vec![seed; 15]).collect();
    let mut asked = Vec::new();
    for (waiting, prompt) in prompts.iter().enumerate() {
        let (asking, prompt) = (Arc::clone(&server), prompt.clone());
        asked.push(tokio::spawn(async move { asking.prompt(&prompt).await }));
        if waiting == 0 {
            server.desk.await_batch();
        } else {
            server.until("waiting", waiting as u64).await;
        }
    }
    server.desk.open();
    // The second batch computes while the first one's rows are transferred; the third waits.
    eventually("two batches are under way", || server.desk.under_way.load(Ordering::SeqCst) == 2);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(server.desk.batches().len(), 2);
    assert!(asked.iter().all(|answer| !answer.is_finished()));
    server.desk.rows_door.open();
    for (answer, prompt) in asked.into_iter().zip(&prompts) {
        assert_eq!(states(answer.await.unwrap()).await, expected(prompt, &LAYERS));
    }
    assert_eq!(
        (server.desk.batches().len(), server.health().await["prompts"].as_u64()),
        (4, Some(4))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_gets_no_memory_beside_another_runs_again_alone() {
    let server =
        Arc::new(Running::start(HiddenServerSettings { max_batch_tokens: 40, ..config() }));
    server.desk.rows_come_later.store(true, Ordering::SeqCst);
    server.desk.fits_beside.store(25, Ordering::SeqCst);
    server.desk.close();
    let ask = |ids: Vec<i64>| {
        let server = Arc::clone(&server);
        tokio::spawn(async move { server.prompt(&ids).await })
    };
    let mut asked = vec![ask(vec![1; 30])];
    server.desk.await_batch();
    for seed in 2..=3 {
        asked.push(ask(vec![seed; 18]));
        server.until("waiting", seed as u64 - 1).await;
    }
    server.desk.open();
    for (answer, seed) in asked.into_iter().zip(1..) {
        let tokens = if seed == 1 { 30 } else { 18 };
        assert_eq!(states(answer.await.unwrap()).await, expected(&vec![seed; tokens], &LAYERS));
    }
    // Not halved: there was memory once the first was done.
    assert_eq!(server.desk.batches(), [vec![30], vec![18, 18], vec![18, 18]]);
    assert_eq!(server.health().await["out_of_memory"], 0);
    // A batch that does not fit alone either is halved.
    server.desk.fits.store(20, Ordering::SeqCst);
    server.desk.close();
    let first = ask(vec![1; 10]);
    eventually("it has begun", || server.desk.batches().len() == 4);
    let both = [ask(vec![2; 18]), ask(vec![3; 18])];
    server.until("waiting", 2).await;
    server.desk.open();
    states(first.await.unwrap()).await;
    for (answer, seed) in both.into_iter().zip(2..) {
        assert_eq!(states(answer.await.unwrap()).await, expected(&[seed; 18], &LAYERS));
    }
    let last = server.desk.batches().split_off(4);
    assert_eq!(last, [vec![18, 18], vec![18, 18], vec![18], vec![18]]);
    assert_eq!(server.health().await["out_of_memory"], 1);
}
