//! Samples of a synthetic head whose states or log-probabilities have one defect each.

use dflash_hidden_states::{Dtype, HiddenStates, LogProbability, Probe};
use dflash_target::TargetIo;
use tch::{Device, Kind, Tensor};

use super::cause::Cause;
use super::readings::{Found, Sample};

const HIDDEN: i64 = 24;
const ROWS: i64 = 40;
const TOKENS: i64 = 32;
const LAST: u32 = 4;

/// A source of three layers, including the embedding's output; tests change it.
struct Source {
    head: TargetIo,
    /// [T, H] for each of [`Self::layer_ids`].
    states: Vec<Tensor>,
    layer_ids: Vec<u32>,
    /// The logits [T, V] behind the reported log-probabilities; `None` if it reports none.
    logits_tv: Option<Tensor>,
    input_ids: Vec<i64>,
    says_layers: bool,
}

fn drawn(shape: &[i64], seed: i64) -> Tensor {
    let _alone = dflash_test_support::alone();
    tch::manual_seed(seed);
    Tensor::randn(shape, (Kind::Float, Device::Cpu))
}

impl Source {
    fn new() -> Self {
        let norm_h = drawn(&[HIDDEN], 2) * 0.2 + 1.0;
        let (embedding_vh, lm_head_vh) = (drawn(&[ROWS, HIDDEN], 1), drawn(&[ROWS, HIDDEN], 3));
        let head = TargetIo::plain(embedding_vh, lm_head_vh, &norm_h, 1e-6);
        let input_ids: Vec<i64> = (0..TOKENS).map(|t| (t * 7 + 3) % ROWS).collect();
        let first_th = head.embed(&Tensor::from_slice(&input_ids));
        let middle_th = &first_th + drawn(&[TOKENS, HIDDEN], 4);
        let last_th = &middle_th + drawn(&[TOKENS, HIDDEN], 5);
        let logits_tv = Some(head.logits(&last_th));
        let states = vec![first_th, middle_th, last_th];
        let layer_ids = vec![0, 3, LAST];
        Self { head, states, layer_ids, logits_tv, input_ids, says_layers: false }
    }

    /// A source whose target has learnt the sample: the most likely token is the next one.
    fn learnt() -> Self {
        let mut source = Self::new();
        let logits_tv = source.logits_tv.take().unwrap();
        let next = Vec::<i64>::try_from(logits_tv.argmax(-1, false)).unwrap();
        source.input_ids[1..].copy_from_slice(&next[..TOKENS as usize - 1]);
        source.states[0] = source.head.embed(&Tensor::from_slice(&source.input_ids));
        source
    }

    fn last(&self) -> Tensor {
        self.states[2].shallow_clone()
    }

    fn normed_last(&self) -> Tensor {
        self.head.normed(&self.last())
    }

    fn probe(&self) -> Probe {
        let bytes = |layer_th: &Tensor| {
            let values = Vec::<f32>::try_from(layer_th.reshape([-1])).unwrap();
            values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
        };
        let layers = self.states.iter().map(bytes).collect();
        let ids = self.layer_ids.clone();
        let states =
            HiddenStates::new(ids, TOKENS as usize, HIDDEN as usize, Dtype::F32, layers).unwrap();
        Probe {
            origin: "a source".into(),
            input_ids: self.input_ids.clone(),
            states,
            says_layers: self.says_layers,
            log_probabilities: self.reported(),
            requests: 1,
        }
    }

    /// In vLLM's form: of the actual token, and of the most likely one.
    fn reported(&self) -> Vec<LogProbability> {
        let Some(logits_tv) = &self.logits_tv else { return Vec::new() };
        let all_tv = logits_tv.log_softmax(-1, Kind::Float);
        let likeliest = Vec::<i64>::try_from(all_tv.argmax(-1, false)).unwrap();
        let of = |position: usize, token: i64| LogProbability {
            position,
            token,
            value: all_tv.double_value(&[position as i64 - 1, token]) as f32,
            text: None,
        };
        let places = 1..=TOKENS as usize;
        let tokens = |position: usize| {
            let own = self.input_ids.get(position).copied();
            own.into_iter().chain([likeliest[position - 1]])
        };
        places.flat_map(|position| tokens(position).map(move |token| of(position, token))).collect()
    }

    fn read(&self) -> Result<Found, Cause> {
        let probe = self.probe();
        let sample = Sample::new(&probe, Some(LAST), &self.head);
        sample.check_embedding().and_then(|()| sample.read())
    }
}

/// Fails unless the source, after `change`, is refused for `cause`.
fn check(cause: &str, change: impl FnOnce(&mut Source)) {
    let mut source = Source::new();
    change(&mut source);
    let found = source.read().unwrap_err();
    assert!(format!("{found:?}").starts_with(cause), "{found:?} instead of {cause}");
}

#[test]
fn the_target_s_own_states_agree_within_rounding() {
    let source = Source::new();
    match source.read().unwrap() {
        Found::Agrees { normed: false, agreement } => {
            assert_eq!(agreement.compared, 2 * TOKENS as usize - 1);
            assert!(agreement.largest < 1e-4 && agreement.bound > 1e-3, "{agreement:?}");
        }
        found => panic!("{found:?}"),
    }
    let probe = source.probe();
    let sample = Sample::new(&probe, Some(LAST), &source.head);
    assert_eq!(sample.proved(true), [0, LAST]);
    assert_eq!(sample.proved(false), [0]);
}

#[test]
fn states_behind_the_final_norm_are_known_and_taken_so() {
    let mut source = Source::new();
    source.states[2] = source.normed_last();
    assert!(matches!(source.read().unwrap(), Found::Agrees { normed: true, .. }));
}

#[test]
fn every_cause_is_named() {
    let logits_of = |source: &Source, head: TargetIo| Some(head.logits(&source.last()));
    for (cause, by) in [("NormWeight(1)", 1.0), ("NormWeight(-1)", -1.0)] {
        check(cause, |source| {
            source.logits_tv = logits_of(source, source.head.shared().with_norm_offset(by));
        });
    }
    check("Tied", |source| {
        let lm_head_vh = source.head.embedding_vh.shallow_clone();
        source.logits_tv = logits_of(source, source.head.shared().with_lm_head(lm_head_vh));
    });
    check("LogitScale(0.125", |source| {
        source.logits_tv = source.logits_tv.take().map(|logits_tv| logits_tv / 8.0);
    });
    check("Capped(Some(15", |source| {
        source.logits_tv =
            source.logits_tv.take().map(|logits_tv| (logits_tv / 15.0).tanh() * 15.0);
    });
    check("Capped(None", |source| {
        source.head = source.head.shared().with_softcap(Some(2.0));
    });
    check("LastIs(3)", |source| source.states.swap(1, 2));
    check("EmbeddingIs(3)", |source| {
        source.layer_ids = vec![3, LAST];
        let _ = source.states.remove(1);
    });
    check("EmbeddingScale(4.89", |source| {
        source.states[0] = &source.states[0] * (HIDDEN as f64).sqrt()
    });
    check("OtherEmbedding", |source| source.states[0] = drawn(&[TOKENS, HIDDEN], 9));
    // The last layer was not captured, and the one before it is in its place.
    check("EarlierLayer { last: 4", |source| {
        let noise_th = drawn(&[TOKENS, HIDDEN], 6) * 0.5;
        source.states[2] = source.last() + noise_th;
    });
    check("Unknown", |source| source.logits_tv = Some(drawn(&[TOKENS, ROWS], 7) * 4.0));
    check("Vocabulary { token: 55", |source| {
        let wide = Tensor::cat(&[source.logits_tv.take().unwrap(), drawn(&[TOKENS, 20], 8)], 1);
        let more_t = Tensor::zeros([ROWS + 20], (Kind::Float, Device::Cpu));
        let _ = more_t.get(55).fill_(99.0);
        source.logits_tv = Some(wide + more_t);
    });
}

#[test]
fn states_a_position_late_are_named() {
    // An extra token runs first, and its state is the first row.
    check("Shifted(1)", |source| {
        source.layer_ids = vec![3, LAST];
        let _ = source.states.remove(0);
        source.states.iter_mut().for_each(|state_th| *state_th = state_th.roll([1], [0]));
    });
}

#[test]
fn without_log_probabilities_the_loss_tells_what_a_target_has_learnt() {
    let source = Source::learnt();
    match source.read().unwrap() {
        Found::Loss(loss) => assert!(loss < 1.0, "{loss}"),
        found => panic!("{found:?}"),
    }
    let mut swapped = Source::learnt();
    swapped.states.swap(1, 2);
    assert_eq!(swapped.read().unwrap_err(), Cause::LastIs(3));
}

#[test]
fn an_untrained_target_is_never_refused_for_its_loss() {
    for seed in 0..20 {
        let mut source = Source::new();
        source.logits_tv = None;
        source.says_layers = true;
        source.states[2] = drawn(&[TOKENS, HIDDEN], 100 + seed) * 3.0;
        assert!(matches!(source.read().unwrap(), Found::Loss(_)), "{seed}");
    }
}

#[test]
fn a_sample_without_last_states_or_with_infinite_ones_says_nothing() {
    let mut source = Source::new();
    source.layer_ids.pop();
    source.states.pop();
    assert!(matches!(source.read().unwrap(), Found::Nothing));
    let mut source = Source::new();
    source.logits_tv = None;
    source.states[2] = Tensor::full([TOKENS, HIDDEN], f64::INFINITY, (Kind::Float, Device::Cpu));
    assert!(matches!(source.read().unwrap(), Found::Nothing));
}

/// The states labelled as layer 3 predict the sample, and the last ones do not: as with a text of
/// one repeated word, which earlier layers predict better.
fn guessed_by_an_earlier_layer(says_layers: bool) -> Result<Found, Cause> {
    let mut source = Source::learnt();
    source.states.swap(1, 2);
    source.says_layers = says_layers;
    source.read()
}

#[test]
fn a_source_that_says_its_layers_is_believed() {
    let found = guessed_by_an_earlier_layer(false).unwrap_err();
    assert_eq!(found, Cause::LastIs(3));
    let found = guessed_by_an_earlier_layer(true).unwrap();
    assert!(matches!(found, Found::Loss(_)), "{found:?}");
}

#[test]
fn a_loss_that_speaks_against_a_source_needs_a_second_sample() {
    use crate::Error;
    use dflash_run::SourceCheck;
    let refusal = |cause: &str| Error::OtherStates { origin: "s".into(), cause: cause.into() };
    let good = || SourceCheck { tokens: 7, ..SourceCheck::default() };
    let asked = std::cell::Cell::new(0);
    let second = |found: Result<Option<SourceCheck>, Error>| {
        asked.set(asked.get() + 1);
        found
    };
    assert_eq!(super::confirmed(Ok(good()), || second(Ok(None))).unwrap(), good());
    assert_eq!(asked.get(), 0, "a sample that is right needs no other");
    assert_eq!(super::confirmed(Err(refusal("a")), || second(Ok(Some(good())))).unwrap(), good());
    let refused = super::confirmed(Err(refusal("a")), || second(Err(refusal("b")))).unwrap_err();
    assert!(refused.to_string().ends_with(": a"), "{refused}");
    let refused = super::confirmed(Err(refusal("a")), || second(Ok(None))).unwrap_err();
    assert!(refused.to_string().ends_with(": a"), "{refused}");
    assert_eq!(asked.get(), 3);
}

/// Samples with the given numbers of different tokens.
struct Varied([i64; 4]);

impl crate::rows::Samples for Varied {
    fn sample(&self, index: u32) -> Result<dflash_data::Sample, crate::Error> {
        let different = self.0[index as usize];
        let input_ids = (0..9).map(|t| t % different).collect();
        Ok(dflash_data::Sample { input_ids, loss_mask: vec![true; 9] })
    }
}

#[test]
fn the_second_sample_is_the_most_varied_of_the_others() {
    let order = |samples, length| crate::rows::by_variety(&Varied(samples), 4, length).unwrap();
    assert_eq!(order([9, 2, 5, 5], 9), [2, 3, 1]);
    assert_eq!(order([9, 2, 5, 7], 3), [2, 3, 1], "as many as a probe takes");
    assert!(crate::rows::by_variety(&Varied([1; 4]), 1, 9).unwrap().is_empty());
}
