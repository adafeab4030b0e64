//! Random models for the tests: small, and with weights large enough that texts vary.

use std::sync::atomic::AtomicBool;

use dflash_decode::{
    Engine, EngineOptions, Error, Generation, Limits, Proposals, Request, Sampling, answer,
};
use dflash_draft::{Draft, DraftConfig, HeadFields, LayerKind, LoadedDraft};
use dflash_settings::Speculate;
use dflash_target::{Target, TargetConfig, TargetOptions};
use dflash_test_support::alone;
use tch::{Device, Kind, Tensor, no_grad};

/// A two-layer target of the given vocabulary, without gradients, in float32.
pub(crate) fn random_target(vocab: i64, seed: i64) -> Target {
    random_target_in(vocab, seed, Kind::Float)
}

/// The same in any precision.
pub(crate) fn random_target_in(vocab: i64, seed: i64, dtype: Kind) -> Target {
    let dir = tempfile::tempdir().unwrap();
    save_target(TargetConfig::qwen3(32, 2, vocab), seed, dir.path());
    Target::load(dir.path(), &TargetOptions { device: Device::Cpu, dtype }).unwrap()
}

/// Writes a random target to `dir`.
pub(crate) fn save_target(config: TargetConfig, seed: i64, dir: &std::path::Path) {
    // Tests run in parallel, and models this small gain nothing from a second thread.
    tch::set_num_threads(1);
    let target = {
        let _alone = alone();
        Target::random(config, seed, Device::Cpu)
    };
    no_grad(|| {
        for (name, mut parameter) in target.parameters() {
            if !name.contains("norm") {
                let _ = parameter.g_mul_scalar_(10.0);
            }
        }
    });
    target.save(dir, Kind::Float).unwrap();
}

/// A two-layer draft for `target`; its second layer slides.
pub(crate) fn draft_config(target: &Target, block_size: usize) -> DraftConfig {
    let config = target.config();
    DraftConfig {
        hidden_size: config.hidden_size,
        intermediate_size: config.dense().intermediate_size,
        num_attention_heads: config.dense().num_attention_heads,
        num_key_value_heads: config.dense().num_key_value_heads,
        head_dim: config.dense().head_dim,
        attention_bias: false,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.dense().rope.theta,
        rope_scaling: None,
        layers: vec![LayerKind::Full, LayerKind::Sliding],
        sliding_window: Some(6),
        block_size,
        mask_token_id: config.vocab_size - 1,
        target_layer_ids: vec![0, 2],
        num_target_layers: Some(target.num_layers()),
        vocab_size: config.vocab_size,
        max_position_embeddings: config.max_position_embeddings,
        initializer_range: 0.3,
        eos_token_id: None,
        head: HeadFields::default(),
    }
}

pub(crate) fn random_draft(config: DraftConfig, seed: i64) -> LoadedDraft {
    let _alone = alone();
    tch::manual_seed(seed);
    let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
    Draft::init(config, Device::Cpu, normal).into()
}

/// The same as it is loaded in `dtype`.
pub(crate) fn draft_in(config: DraftConfig, seed: i64, dtype: Kind) -> LoadedDraft {
    let dir = tempfile::tempdir().unwrap();
    random_draft(config, seed).draft.save(dir.path()).unwrap();
    LoadedDraft::load(dir.path(), Device::Cpu, dtype).unwrap()
}

/// Decodes one answer at a time, each with its own seed.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    engine: Engine<'a>,
    sampling: Sampling,
    seed: u64,
}

impl<'a> Decoder<'a> {
    fn new(
        target: &'a Target,
        proposals: Proposals<'a>,
        sampling: Sampling,
    ) -> Result<Self, Error> {
        let options = EngineOptions::one_by_one(target, Speculate::Tokens(1024));
        Ok(Self { engine: Engine::new(target, proposals, options)?, sampling, seed: 0 })
    }

    pub(crate) fn plain(target: &'a Target, sampling: Sampling) -> Self {
        Self::new(target, Proposals::None, sampling).unwrap()
    }

    pub(crate) fn speculative(
        target: &'a Target,
        draft: &'a LoadedDraft,
        sampling: Sampling,
    ) -> Result<Self, Error> {
        Self::new(target, Proposals::Draft(draft), sampling)
    }

    pub(crate) fn ngram(
        target: &'a Target,
        (size, tokens): (usize, usize),
        sampling: Sampling,
    ) -> Self {
        Self::new(target, Proposals::Ngram { size, tokens }, sampling).unwrap()
    }

    pub(crate) fn generate(
        &mut self,
        prompt: &[i64],
        limits: &Limits,
        stop: &AtomicBool,
    ) -> Result<Generation, Error> {
        self.seed += 1;
        let request = Request::new(prompt, limits, self.sampling, self.seed);
        answer(&mut self.engine, request, stop, |_| Ok(true))
    }
}
