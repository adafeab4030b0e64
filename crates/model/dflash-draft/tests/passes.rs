//! The draft's passes compared with each other: keeping only the layers' inputs changes what is
//! stored but not one bit of a gradient, and a block decoded over a cache equals the block seen in
//! training.

use dflash_draft::attention::WindowRule;
use dflash_draft::{
    Draft, DraftConfig, Fresh, HeadFields, Keep, LayerKind, PackedInput, plan_blocks,
};
use dflash_tensor::Kernels;
use dflash_test_support::alone;
use tch::{Device, Kind, Tensor, no_grad};

const PATHS: [Kernels; 3] = [Kernels::Fast, Kernels::Portable, Kernels::Emulated];

const LAYERS: usize = 3;
const HIDDEN: i64 = 32;
const WIDE: i64 = 96;
/// Query heads, key/value heads, head dimension.
const HEADS: (i64, i64, i64) = (4, 2, 8);

fn config() -> DraftConfig {
    DraftConfig {
        hidden_size: HIDDEN,
        intermediate_size: WIDE,
        num_attention_heads: HEADS.0,
        num_key_value_heads: HEADS.1,
        head_dim: HEADS.2,
        attention_bias: false,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: None,
        layers: vec![LayerKind::Full, LayerKind::Sliding, LayerKind::Full],
        sliding_window: Some(9),
        block_size: 4,
        mask_token_id: 0,
        target_layer_ids: vec![1, 2],
        num_target_layers: Some(3),
        vocab_size: 50,
        max_position_embeddings: 256,
        initializer_range: 0.05,
        eos_token_id: None,
        head: HeadFields::default(),
    }
}

/// A draft with random weights and biases.
fn fresh(config: DraftConfig) -> Draft {
    tch::manual_seed(4);
    let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
    let draft = Draft::init(config, Device::Cpu, normal);
    for bias in
        draft.layout().parameters().iter().filter(|parameter| parameter.fresh == Fresh::Zeros)
    {
        let mut view = bias.view(draft.flat());
        assert_eq!(view.abs().max().double_value(&[]), 0.0, "a fresh bias is zero");
        view.copy_(&normal(&bias.shape));
    }
    draft
}

/// Without biases and with them.
fn configs() -> [DraftConfig; 2] {
    [false, true].map(|attention_bias| DraftConfig { attention_bias, ..config() })
}

/// A row of two documents, the draft's output gradient, and (context rows, slots).
fn row(draft: &Draft) -> (PackedInput, Tensor, (i64, i64)) {
    let (config, kind) = (draft.config(), draft.flat().kind());
    let anchors: Vec<usize> = (0..18).chain(21..38).collect();
    let plan = plan_blocks(config, &[0, 20, 40], &anchors, WindowRule::Serving);
    let (context, slots) = (plan.context_rows() as i64, plan.slots() as i64);
    let normal = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind);
    let features = normal([context, config.aux_layers() * HIDDEN]);
    let input = draft.prepare(&plan, WindowRule::Serving, features, normal([slots, HIDDEN]));
    (input, normal([slots, HIDDEN]), (context, slots))
}

/// Output, flat gradient, and bytes kept between the passes.
fn pass(
    draft: &Draft,
    (input, dout): (&PackedInput, &Tensor),
    keep: Keep,
) -> (Tensor, Tensor, i64) {
    let (hidden, saved) = draft.forward_keeping(input, keep);
    let bytes = saved.bytes() as i64;
    let (flat, views) = draft.zero_gradients();
    draft.backward(dout.copy(), input, saved, &views, &mut |_| ());
    (hidden, flat, bytes)
}

#[test]
fn gradients_are_the_same_and_far_less_is_kept() {
    let _draws = alone();
    no_grad(|| {
        let kinds = PATHS.map(|kernels| [Kind::Float, Kind::BFloat16].map(|kind| (kind, kernels)));
        let cases = kinds.into_iter().flatten().flat_map(|case| configs().map(|it| (it, case)));
        for (config, (kind, kernels)) in cases {
            let fresh = fresh(config.clone());
            let draft = Draft::new(config, fresh.flat().to_kind(kind)).with_kernels(kernels);
            let (input, dout, (context, slots)) = row(&draft);
            let (hidden, gradient, all) = pass(&draft, (&input, &dout), Keep::Activations);
            let (again, recomputed, inputs) = pass(&draft, (&input, &dout), Keep::Inputs);
            assert!(hidden.equal(&again) && gradient.equal(&recomputed), "{kind:?}, {kernels:?}");
            assert!(gradient.abs().max().double_value(&[]) > 0.0);

            let width = kind.elt_size_in_bytes() as i64;
            let shared = (2 * context + slots) * HIDDEN * width;
            assert_eq!(inputs, shared + LAYERS as i64 * slots * HIDDEN * width);
            let (heads, kv_heads, dim) = HEADS;
            let of_slot = 2 * HIDDEN + (heads + 2 * kv_heads) * dim + heads * dim + 2 * WIDE;
            // the log-sum-exp of each head is always float32
            let layer =
                slots * (of_slot * width + heads * 4) + context * 2 * kv_heads * dim * width;
            assert_eq!(all, shared + LAYERS as i64 * layer);
            assert!(inputs * 3 < all, "{inputs} of {all}");
        }
    });
}

/// With a window smaller than the block, which ends inside it in both passes.
#[test]
fn a_decoded_block_is_the_one_that_training_saw() {
    let _draws = alone();
    const TOKENS: i64 = 30;
    let windows = [1, 2, 3, 4, 5, 11, 40];
    for (window, config) in windows.into_iter().flat_map(|it| configs().map(|config| (it, config)))
    {
        let config = DraftConfig { sliding_window: Some(window), block_size: 5, ..config };
        let block = config.block_size as i64;
        for kernels in PATHS {
            let draft = fresh(config.clone()).with_kernels(kernels);
            let normal = |rows| Tensor::randn([rows, HIDDEN], (Kind::Float, Device::Cpu));
            let features_tk = normal(TOKENS * config.aux_layers()).view([TOKENS, -1]);
            for anchor in [0, 1, 3, 17] {
                let block_bh = normal(block);
                let (trained, decoded) = no_grad(|| {
                    let plan = plan_blocks(
                        &config,
                        &[0, TOKENS as usize],
                        &[anchor as usize],
                        WindowRule::Serving,
                    );
                    let sources = plan.context_sources().flatten().map(|row| row as i64);
                    let rows = Tensor::from_slice(&sources.collect::<Vec<_>>());
                    let features = features_tk.index_select(0, &rows);
                    let slots = block_bh.shallow_clone();
                    let input = draft.prepare(&plan, WindowRule::Serving, features, slots);
                    let mut cache = draft.new_cache(TOKENS);
                    draft.extend_context(&mut cache, &features_tk.narrow(0, 0, anchor), 0);
                    let decoded = draft.forward_block(&cache, &block_bh, anchor);
                    (draft.forward_keeping(&input, Keep::Inputs).0, decoded)
                });
                let difference = (trained - decoded).abs().max().double_value(&[]);
                let what = format!("window {window}, anchor {anchor}, {kernels:?}");
                assert!(difference < 1e-5, "{what}: {difference}");
            }
        }
    }
}

/// Context of many rows, then a few at a time; a CPU handles the two differently.
#[test]
fn a_block_over_context_of_many_rows_and_few_is_the_portable_one() {
    let _draws = alone();
    let kinds = [(Kind::Float, 1e-5), (Kind::BFloat16, 0.1)];
    for (config, (kind, tolerance)) in
        configs().into_iter().flat_map(|it| kinds.map(|kind| (it.clone(), kind)))
    {
        let flat = fresh(config.clone()).flat().to_kind(kind);
        let normal = |rows| Tensor::randn([rows, HIDDEN], (Kind::Float, Device::Cpu)).to_kind(kind);
        let features_tk = normal(60 * config.aux_layers()).view([60, -1]);
        let block_bh = normal(4);
        let run = |kernels: Kernels| {
            let draft = Draft::new(config.clone(), flat.shallow_clone()).with_kernels(kernels);
            let mut cache = draft.new_cache(60);
            let mut blocks = Vec::new();
            let mut start = 0;
            for rows in [40, 1, 8, 11] {
                draft.extend_context(&mut cache, &features_tk.narrow(0, start, rows), start);
                start += rows;
                blocks.push(draft.forward_block(&cache, &block_bh, start));
            }
            assert_eq!(cache.len(), 60);
            Tensor::cat(&blocks, 0).to_kind(Kind::Float)
        };
        let (fast, portable) = no_grad(|| (run(Kernels::Fast), run(Kernels::Portable)));
        let difference = (&fast - &portable).abs().max().double_value(&[]);
        assert!(difference < tolerance && (fast != portable), "{kind:?}: {difference}");
    }
}
