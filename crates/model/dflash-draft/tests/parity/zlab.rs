//! z-lab's reference draft: context features and a block as input, normed states as output.

use std::path::Path;

use dflash_draft::attention::WindowRule;
use dflash_draft::{Draft, DraftConfig, DraftLayout, Keep, plan_blocks};
use dflash_tensor::Kernels;
use dflash_test_place::{assert_close, place};
use tch::{Tensor, no_grad};

use super::vectors::Vectors;

/// Both the decoding pass and the training pass reproduce the reference.
pub(crate) fn check(path: &Path, kernels: Kernels) {
    let vectors = Vectors::open(path);
    let config = DraftConfig::parse(path, vectors.note("config")).unwrap();
    let draft = load(&vectors, config).with_kernels(kernels);
    let (features, block) = (vectors.row("in.target_hidden"), vectors.row("in.noise_embedding"));
    let expected = vectors.row("out.hidden");
    let context = features.size()[0] as usize;
    let positions = vectors.integers("in.position_ids");
    assert!(positions.iter().enumerate().all(|(i, &p)| p == i as i64), "positions from 0");

    let decoded = no_grad(|| {
        let mut cache = draft.new_cache(context as i64);
        let half = context as i64 / 2;
        draft.extend_context(&mut cache, &features.narrow(0, 0, half), 0);
        let rest = features.narrow(0, half, context as i64 - half);
        draft.extend_context(&mut cache, &rest, half);
        draft.forward_block(&cache, &block, context as i64)
    });
    assert_close("decoding pass", &decoded, &expected, 1e-5);

    let trained = no_grad(|| {
        let starts = [0, context + draft.config().block_size];
        let plan = plan_blocks(draft.config(), &starts, &[context], WindowRule::Serving);
        let input = draft.prepare(&plan, WindowRule::Serving, features, block);
        draft.forward_keeping(&input, Keep::Inputs).0
    });
    assert_close("training pass", &trained, &expected, 1e-5);
}

/// A draft with the vectors' `w.*` weights.
pub(crate) fn load(vectors: &Vectors, config: DraftConfig) -> Draft {
    let layout = DraftLayout::new(&config);
    let flat = Tensor::zeros([layout.elements()], (place().kind, place().device));
    for parameter in layout.parameters() {
        let weight = vectors.tensor(&format!("w.{}", parameter.name));
        assert_eq!(weight.size(), parameter.shape, "{}", parameter.name);
        parameter.view(&flat).copy_(&weight);
    }
    Draft::new(config, flat)
}
