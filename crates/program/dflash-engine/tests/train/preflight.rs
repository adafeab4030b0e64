//! Runs against a simulated stock vLLM, correct or with one defect: what a run detects before its
//! first step, what it adapts to, and what it refuses.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use dflash_hidden_states::{Dtype, HiddenStates, OfflineFiles};
use dflash_target::{Target, TargetIo, TargetOptions};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::world::{Run, World, losses, sorted_checkpoints};

/// The server's defect.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    /// Its last states are after the final norm.
    Normed,
    /// Its layer ids are one lower.
    LayersOneLower,
    /// The second-to-last layer is in the last one's place.
    LastOneLower,
    /// Its norm multiplies by 1 + w.
    NormWeight,
    /// Its logits have another scale.
    LogitScale,
    /// It prepends a token to its input, and reports it.
    AddsAToken,
    /// The same, unreported.
    AddsATokenInSecret,
    /// Another model, with another tokenizer.
    OtherTokenizer,
    /// Another model with the same tokenizer.
    OtherModel,
    /// A model with a larger vocabulary.
    OtherVocabulary,
    /// It refuses to send log-probabilities.
    NoLogProbabilities,
}

/// A server on a thread; it ends with the test's process.
struct Vllm {
    endpoint: String,
    storage: PathBuf,
    requests: Arc<AtomicUsize>,
}

/// What the server runs.
struct Served {
    target: Target,
    head: TargetIo,
    wrong: Wrong,
    storage: PathBuf,
    requests: Arc<AtomicUsize>,
}

impl Vllm {
    fn start(world: &World, wrong: Wrong) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}/v1", listener.local_addr().unwrap());
        let storage = world.path(&format!("storage-{wrong:?}"));
        fs::create_dir(&storage).unwrap();
        let requests = Arc::new(AtomicUsize::new(0));
        let is_other = matches!(wrong, Wrong::OtherTokenizer | Wrong::OtherModel);
        if is_other && !world.path("other").exists() {
            world.write_other_target("other");
        }
        let dir = world.path(if is_other { "other" } else { "target" });
        let (kept, count) = (storage.clone(), Arc::clone(&requests));
        thread::spawn(move || {
            let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
            let target = Target::load(&dir, &options).unwrap();
            let head = TargetIo::load(&dir, Device::Cpu, Kind::Float).unwrap();
            let mut served = Served { target, head, wrong, storage: kept, requests: count };
            for client in listener.incoming().flatten() {
                // A disconnected client needs no answer.
                let _ = served.answer(&client);
            }
        });
        Self { endpoint, storage, requests }
    }

    fn flags(&self) -> Vec<&str> {
        let storage = self.storage.to_str().unwrap();
        let own = ["--vllm-endpoint", &self.endpoint, "--shared-storage-path", storage];
        [&own[..], &["--on-missing", "generate"]].concat()
    }
}

impl Served {
    fn answer(&mut self, mut client: &TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(client);
        let (mut first, mut length) = (String::new(), 0);
        reader.read_line(&mut first)?;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            match line.trim().to_ascii_lowercase().split_once(": ") {
                Some(("content-length", value)) => length = value.parse().unwrap(),
                Some(_) => {}
                None => break,
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let (status, reply) = match first.contains("/v1/models") {
            true => (
                200,
                json!({"object": "list", "data": [
                {"id": "tiny", "object": "model", "owned_by": "vllm", "max_model_len": 64}]}),
            ),
            false => self.complete(&serde_json::from_slice(&body).unwrap()),
        };
        let reply = reply.to_string();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
             connection: close\r\n\r\n{reply}",
            reply.len()
        );
        client.write_all(head.as_bytes())
    }

    /// Writes the states before it replies, without a lock.
    fn complete(&mut self, request: &Value) -> (u16, Value) {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        let asks = request.get("logprobs").is_some();
        if asks && self.wrong == Wrong::NoLogProbabilities {
            return (400, json!({"error": {"message": "logprobs are not supported"}}));
        }
        let prompt: Vec<i64> = serde_json::from_value(request["prompt"].clone()).unwrap();
        let ran = match self.wrong {
            Wrong::AddsAToken | Wrong::AddsATokenInSecret => [&[5], &prompt[..]].concat(),
            _ => prompt.clone(),
        };
        let says = if self.wrong == Wrong::AddsAToken { &ran } else { &prompt };
        let mut states = self.states(&ran);
        states
            .iter_mut()
            .for_each(|state_th| *state_th = state_th.narrow(0, 0, prompt.len() as i64));
        let all_tv = self.logits(&prompt).log_softmax(-1, Kind::Float);
        let path = self.storage.join(format!("req-{number}.safetensors"));
        write_states(&path, &prompt, &self.slots(&states));
        let mut reply = json!({"choices": [{"prompt_token_ids": says}],
            "kv_transfer_params": {"hidden_states_path": path}});
        if asks {
            let after = self.top(&all_tv, prompt.len() as i64 - 1);
            let after: serde_json::Map<String, Value> = after
                .iter()
                .map(|(token, value)| (format!("token_id:{token}"), json!(value)))
                .collect();
            reply["choices"][0]["logprobs"] = json!({"top_logprobs": [after]});
        }
        if request.get("prompt_logprobs").is_some() {
            let places =
                (1..prompt.len()).map(|place| self.of_prompt(&all_tv, place, prompt[place]));
            let places: Vec<Value> = [Value::Null].into_iter().chain(places).collect();
            reply["choices"][0]["prompt_logprobs"] = places.into();
        }
        (200, reply)
    }

    /// States after 0, 1 and 2 layers.
    fn states(&self, ids: &[i64]) -> Vec<Tensor> {
        let (ids_t, bounds) = (Tensor::from_slice(ids), [0, ids.len() as i64]);
        tch::no_grad(|| self.target.forward_packed(&ids_t, &bounds, &[0, 1, 2]))
    }

    /// The states that it returns as layers 1 and 2.
    fn slots(&self, states: &[Tensor]) -> [Tensor; 2] {
        let [first, middle, last] = [0, 1, 2].map(|layer| states[layer].shallow_clone());
        match self.wrong {
            Wrong::Normed => [middle, self.head.normed(&last)],
            Wrong::LayersOneLower => [first, middle],
            Wrong::LastOneLower => [middle.shallow_clone(), middle],
            _ => [middle, last],
        }
    }

    /// The logits of its own model, [T, V].
    fn logits(&self, prompt: &[i64]) -> Tensor {
        let ran = match self.wrong {
            Wrong::AddsATokenInSecret => [&[5], prompt].concat(),
            _ => prompt.to_vec(),
        };
        let last_th = &self.states(&ran)[2];
        let head = self.head.shared();
        let own_tv = match self.wrong {
            Wrong::NormWeight => head.with_norm_offset(1.0).logits(last_th),
            Wrong::LogitScale => head.logits(last_th) * 3.0,
            _ => head.logits(last_th),
        };
        own_tv.narrow(0, (ran.len() - prompt.len()) as i64, prompt.len() as i64)
    }

    fn top(&self, all_tv: &Tensor, row: i64) -> Vec<(i64, f64)> {
        let more = if self.wrong == Wrong::OtherVocabulary { 500 } else { 0 };
        let (values, tokens) = all_tv.get(row).topk(3, -1, true, true);
        let tokens = Vec::<i64>::try_from(tokens).unwrap();
        let values = Vec::<f64>::try_from(values.to_kind(Kind::Double)).unwrap();
        tokens.into_iter().map(|token| token + more).zip(values).collect()
    }

    fn of_prompt(&self, all_tv: &Tensor, place: usize, own: i64) -> Value {
        let row = place as i64 - 1;
        let mut of = self.top(all_tv, row);
        of.truncate(1);
        of.push((own, all_tv.double_value(&[row, own])));
        let letter = if self.wrong == Wrong::OtherTokenizer { "x" } else { "w" };
        let entry = |(token, value): (i64, f64)| {
            (
                token.to_string(),
                json!({"logprob": value, "decoded_token": format!("{letter}{token}")}),
            )
        };
        Value::Object(of.into_iter().map(entry).collect())
    }
}

/// In vLLM's format: no metadata, slots in the middle dimension.
fn write_states(path: &Path, ids: &[i64], slots: &[Tensor; 2]) {
    let rows_tkh = Tensor::stack(slots, 1).contiguous();
    let ids_t = Tensor::from_slice(ids);
    Tensor::write_safetensors(&[("hidden_states", rows_tkh), ("token_ids", ids_t)], path).unwrap();
}

fn train(world: &World, save: &str, vllm: &Vllm, more: &[&str]) -> Run {
    let nowhere = world.path("nowhere").to_string_lossy().into_owned();
    let own = ["--hidden-states-path", nowhere.as_str(), "--epochs", "1"];
    world.train(save, &[&vllm.flags()[..], &own[..], more].concat())
}

const TRUST: [&str; 1] = ["--trust-layer-ids"];

/// Makes the target's final norm weights differ from one, so that a second norm has an effect.
fn weigh_final_norm(world: &World) {
    let path = world.path("target/model.safetensors");
    let mut tensors = Tensor::read_safetensors(&path).unwrap();
    let norm = tensors.iter_mut().find(|(name, _)| name == "model.norm.weight").unwrap();
    let weights: Vec<f32> = (0..32).map(|h| 0.5 + 0.05 * h as f32).collect();
    norm.1 = Tensor::from_slice(&weights);
    Tensor::write_safetensors(&tensors, &path).unwrap();
}

fn provenance(world: &World, save: &str) -> Value {
    serde_json::from_slice(&fs::read(world.path(save).join("run.json")).unwrap()).unwrap()
}

#[test]
fn an_honest_server_is_proved_and_the_user_s_word_is_asked_for_once() {
    let world = World::new();
    let vllm = Vllm::start(&world, Wrong::Nothing);
    let run = train(&world, "out", &vllm, &[]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    for expected in ["2 verified", "1 not", "--trust-layer-ids", "1 2 in this order"] {
        assert!(run.stderr.contains(expected), "no {expected:?} in {}", run.stderr);
    }
    assert!(sorted_checkpoints(&world.path("out")).is_empty());
    assert_eq!(vllm.requests.load(Ordering::SeqCst), 1, "one request tells");
    let run = train(&world, "out", &vllm, &TRUST);
    assert!(run.success(), "{}", run.stderr);
    // 11 positions of the prompt with the most likely tokens, some identical, and 3 after it.
    assert!(run.stderr.contains("log-probabilities of 12 tokens from"), "{}", run.stderr);
    assert!(run.stderr.contains("nats apart at most"), "{}", run.stderr);
    assert!(run.stderr.contains("2 verified, 1 trusted"), "{}", run.stderr);
    let check = &provenance(&world, "out")["source_checks"][0];
    assert_eq!(check["trusted_layer_ids"], json!([1]));
    assert_eq!(check["proved_layer_ids"], json!([2]));
    assert_eq!((&check["requests"], &check["states_are_normed"]), (&json!(1), &json!(false)));
    let agreement = &check["log_probabilities"];
    assert!(agreement["largest"].as_f64().unwrap() < 1e-4, "{check}");
    assert!(agreement["compared"].as_u64().unwrap() > 12, "{check}");
    // The run records the user's confirmation.
    let more = ["--resume", "--epochs", "2", "--allow-changed", "epochs"];
    let resumed = train(&world, "out", &vllm, &more);
    assert!(resumed.success(), "{}", resumed.stderr);
    assert!(resumed.stderr.contains("1 trusted"), "{}", resumed.stderr);
}

#[test]
fn states_behind_the_final_norm_are_taken_so_and_recorded() {
    let world = World::new();
    weigh_final_norm(&world);
    let (plain, normed) = (Vllm::start(&world, Wrong::Nothing), Vllm::start(&world, Wrong::Normed));
    // The target's distribution comes from the last states.
    let target_distribution = ["--trust-layer-ids", "--loss", "kl"];
    let train = |save: &str, vllm: &Vllm| {
        let run = train(
            &world,
            save,
            vllm,
            &[&target_distribution[..], &["--target-layer-ids", "1"]].concat(),
        );
        assert!(run.success(), "{}", run.stderr);
        run
    };
    let (_, run) = (train("plain", &plain), train("normed", &normed));
    assert!(run.stderr.contains("after the final norm: they are used as such"), "{}", run.stderr);
    assert_eq!(provenance(&world, "normed")["source_checks"][0]["states_are_normed"], json!(true));
    let (plain, normed) = (losses(&world.path("plain")), losses(&world.path("normed")));
    super::assert_same_losses(&plain, &normed);
}

#[test]
fn what_is_wrong_stops_the_run_with_its_cause() {
    let world = World::new();
    let checks: [(Wrong, &[&str]); 9] = [
        (Wrong::LayersOneLower, &["assumed to be layer 1 is the embedding's output", "eagle_aux"]),
        (Wrong::LastOneLower, &["of an earlier layer", "eagle_aux_hidden_state_layer_ids"]),
        (Wrong::NormWeight, &["multiplies by 1 + w", "--target-spec"]),
        (Wrong::LogitScale, &["logits are 3.0", "logit scale", "--target-spec"]),
        (Wrong::AddsAToken, &["put token 5 before the prompt", "add_special_tokens"]),
        (Wrong::AddsATokenInSecret, &["of the position before", "add_special_tokens"]),
        (Wrong::OtherTokenizer, &["as \"x", "as \"w", "another tokenizer"]),
        (Wrong::OtherModel, &["serves another model", "nats apart"]),
        (Wrong::OtherVocabulary, &["embedding has 64 rows", "another vocabulary"]),
    ];
    for (wrong, expected) in checks {
        let vllm = Vllm::start(&world, wrong);
        let run = train(&world, "out", &vllm, &TRUST);
        assert_eq!(run.code, Some(1), "{wrong:?}: {}", run.stderr);
        let url = vllm.endpoint.trim_end_matches("/v1");
        for expected in expected.iter().copied().chain([url]) {
            assert!(run.stderr.contains(expected), "{wrong:?}: no {expected:?} in {}", run.stderr);
        }
        assert!(sorted_checkpoints(&world.path("out")).is_empty(), "{wrong:?}");
    }
}

#[test]
fn a_server_without_log_probabilities_is_judged_by_the_loss() {
    let world = World::new();
    let vllm = Vllm::start(&world, Wrong::NoLogProbabilities);
    let run = train(&world, "out", &vllm, &[]);
    assert!(run.stderr.contains("none verified") && run.code == Some(1), "{}", run.stderr);
    let run = train(&world, "out", &vllm, &TRUST);
    assert!(run.success(), "{}", run.stderr);
    for expected in
        ["loss on 12 tokens", "guessing has 4.159", "3 requests", "no better than guessing"]
    {
        assert!(run.stderr.contains(expected), "no {expected:?} in {}", run.stderr);
    }
    assert!(provenance(&world, "out")["source_checks"][0]["loss"].as_f64().unwrap() > 3.0);
}

#[test]
fn stored_states_of_other_software_need_the_user_s_word_and_ours_do_not() {
    let world = World::new();
    let run = world.train("own", &["--epochs", "1"]);
    assert!(run.success(), "{}", run.stderr);
    assert!(
        run.stderr.contains("hs_0.safetensors the target's loss on 12 tokens"),
        "{}",
        run.stderr
    );
    let check = &provenance(&world, "own")["source_checks"][0];
    assert_eq!((&check["says_layers"], &check["requests"]), (&json!(true), &json!(0)));
    let foreign = world.path("foreign");
    fs::create_dir(&foreign).unwrap();
    for sample in 0..24 {
        let stored = Tensor::read_safetensors(world.stored(sample)).unwrap();
        let path = OfflineFiles::new(foreign.clone()).path(sample);
        Tensor::write_safetensors(&stored, path).unwrap();
    }
    let flags = ["--hidden-states-path", foreign.to_str().unwrap(), "--epochs", "1"];
    let run = world.train("foreign-run", &flags);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("--trust-layer-ids"), "{}", run.stderr);
    let run = world.train("foreign-run", &[&flags[..], &TRUST].concat());
    assert!(run.success(), "{}", run.stderr);
    // One of them has the other's layers.
    let ids: Vec<i64> = (0..12).collect();
    let states = HiddenStates::new(vec![1, 2], 12, 32, Dtype::F32, {
        let target = TargetIo::load(&world.path("target"), Device::Cpu, Kind::Float).unwrap();
        let bytes = |tensor: Tensor| {
            let values = Vec::<f32>::try_from(tensor.reshape([-1])).unwrap();
            values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
        };
        let embedded = || target.embed(&Tensor::from_slice(&ids));
        vec![bytes(embedded()), bytes(embedded())]
    })
    .unwrap();
    let written = world.path("written");
    OfflineFiles::new(written.clone()).write(0, &ids, &states).unwrap();
    let stored = Tensor::read_safetensors(written.join("hs_0.safetensors")).unwrap();
    Tensor::write_safetensors(&stored, foreign.join("hs_0.safetensors")).unwrap();
    let run = world.train("refused", &[&flags[..], &TRUST].concat());
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("is the embedding's output, layer 0"), "{}", run.stderr);
}
