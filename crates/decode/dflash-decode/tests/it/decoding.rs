//! Speculative decoding compared with plain decoding on random models: the text never changes.

use std::sync::atomic::AtomicBool;

use crate::models::{
    Decoder, draft_config, draft_in, random_draft, random_target, random_target_in,
};
use dflash_decode::{Difference, Error, Limits, Sampling, compare};
use dflash_draft::LoadedDraft;
use dflash_draft::objective::DraftVocabulary;
use dflash_target::Target;
use dflash_tensor::Kernels;
use tch::{Kind, Tensor};

static GO: AtomicBool = AtomicBool::new(false);

fn greedy() -> Sampling {
    Sampling::GREEDY
}

fn same_or_tied(difference: &Option<Difference>) -> bool {
    difference.as_ref().is_none_or(Difference::is_tie)
}

fn prompt(length: usize, seed: usize, vocab: i64) -> Vec<i64> {
    (0..length).map(|at| ((at * 7 + seed * 13 + at * at) as i64) % vocab).collect()
}

#[test]
fn speculative_text_is_plain_text() {
    let mut partly_accepted = 0;
    for case in 0..24 {
        // In so small a vocabulary, chance produces accepted prefixes of every length.
        let (vocab, block_size) = (3 + case as i64 % 4, 2 + case % 6);
        let target = random_target(vocab, case as i64);
        let draft = random_draft(draft_config(&target, block_size), case as i64);
        let mut plain = Decoder::plain(&target, greedy());
        let mut speculator = Decoder::speculative(&target, &draft, greedy()).unwrap();
        for (length, max_new_tokens, stop_ids) in [
            (1, 40, vec![]),
            (9, 1, vec![]),
            (30, 23, vec![1]),
            (4, 64, vec![0, 2]),
            (5, 2, vec![]),
        ] {
            let ids = prompt(length, case, vocab);
            let limits = Limits { max_new_tokens, stop_ids };
            let expected = plain.generate(&ids, &limits, &GO).unwrap();
            let made = speculator.generate(&ids, &limits, &GO).unwrap();
            let texts = [expected.tokens.as_slice(), &made.tokens];
            let difference = compare(&target, &ids, texts, None);
            assert!(same_or_tied(&difference), "case {case}: {difference:?}");
            check_steps(&made.accepted(), made.tokens.len(), block_size);
            if difference.is_none() {
                assert_eq!(expected.finished, made.finished);
            }
            let some = |&count: &usize| count > 0 && count < block_size - 1;
            partly_accepted += made.accepted().iter().filter(|count| some(count)).count();
        }
    }
    assert!(partly_accepted > 40, "only {partly_accepted} steps accepted a part of their block");
}

/// Texts are right whatever is proposed, so only the number of accepted tokens shows whether the
/// draft ran correctly. Compares the few-row path (buffers and packed layers) with libtorch's
/// operations.
#[test]
fn as_much_is_accepted_as_with_libtorchs_operations() {
    let (mut steps, mut some) = (0, 0);
    for seed in 0..6 {
        let selected = DraftVocabulary::new(vec![0, 2, 3], 4);
        for vocabulary in [None, Some(&selected)] {
            let run = |kernels: Kernels| {
                let target = random_target(4, seed).with_kernels(kernels);
                let draft = random_draft(draft_config(&target, 6), seed).draft;
                let vocabulary = vocabulary.cloned();
                let draft = LoadedDraft { draft: draft.with_kernels(kernels), vocabulary };
                let limits = Limits { max_new_tokens: 60, stop_ids: vec![] };
                let mut speculator = Decoder::speculative(&target, &draft, greedy()).unwrap();
                // The first prompt itself takes the few-row path, the second does not.
                let prompts = [prompt(9, seed as usize, 4), prompt(45, seed as usize, 4)];
                prompts.map(|ids| speculator.generate(&ids, &limits, &GO).unwrap())
            };
            let pairs = run(Kernels::Fast).into_iter().zip(run(Kernels::Portable));
            for (fast, portable) in pairs {
                assert_eq!(fast.tokens, portable.tokens, "seed {seed}");
                assert_eq!(fast.accepted(), portable.accepted(), "seed {seed}, {vocabulary:?}");
                steps += fast.accepted().len();
                some += fast.accepted().iter().filter(|&&count| count > 0).count();
            }
        }
    }
    assert!(some > 40 && some < steps, "{some} of {steps} steps accepted something");
}

/// If all rows predict, there is one proposal more; texts stay the target's.
#[test]
fn a_block_whose_anchor_predicts_proposes_a_token_more() {
    let mut longest = 0;
    for (case, kernels) in (0..16).zip([Kernels::Fast, Kernels::Portable].into_iter().cycle()) {
        let target = random_target(3, case).with_kernels(kernels);
        let mut config = draft_config(&target, 3);
        config.head.sample_from_anchor = true;
        let draft: LoadedDraft = random_draft(config, case).draft.with_kernels(kernels).into();
        let limits = Limits { max_new_tokens: 60, stop_ids: vec![] };
        let ids = prompt(9, case as usize, 3);
        let made = Decoder::speculative(&target, &draft, greedy())
            .unwrap()
            .generate(&ids, &limits, &GO)
            .unwrap();
        let plain = Decoder::plain(&target, greedy()).generate(&ids, &limits, &GO).unwrap();
        let difference = compare(&target, &ids, [plain.tokens.as_slice(), &made.tokens], None);
        assert!(same_or_tied(&difference), "case {case}: {difference:?}");
        check_steps(&made.accepted(), made.tokens.len(), 4);
        longest = longest.max(made.accepted().into_iter().max().unwrap_or(0));
    }
    assert_eq!(longest, 3, "a block of three rows proposes three tokens");
}

/// The steps yield the whole answer, and without the last one they would not.
fn check_steps(accepted: &[usize], tokens: usize, block_size: usize) {
    assert!(accepted.iter().all(|&count| count < block_size));
    let yielded = |steps: &[usize]| 1 + steps.iter().map(|count| count + 1).sum::<usize>();
    assert!(yielded(accepted) >= tokens);
    if let Some((_, before)) = accepted.split_last() {
        assert!(yielded(before) < tokens);
    }
}

#[test]
fn a_pruned_draft_proposes_only_what_it_can_say() {
    let (mut accepted, mut misses) = (0, 0);
    for case in 0..24 {
        let vocab = 4;
        let target = random_target(vocab, case);
        let selected = vec![1, 2];
        let vocabulary = Some(DraftVocabulary::new(selected.clone(), vocab as usize));
        let draft = LoadedDraft { vocabulary, ..random_draft(draft_config(&target, 5), case) };
        let mut pruned = Decoder::speculative(&target, &draft, greedy()).unwrap();
        let limits = Limits { max_new_tokens: 60, stop_ids: vec![] };
        let ids = prompt(7, case as usize, vocab);
        let made = pruned.generate(&ids, &limits, &GO).unwrap();
        let plain = Decoder::plain(&target, greedy()).generate(&ids, &limits, &GO).unwrap();
        let texts = [plain.tokens.as_slice(), &made.tokens];
        let difference = compare(&target, &ids, texts, None);
        assert!(same_or_tied(&difference), "case {case}: {difference:?}");
        let mut next = 1;
        for &count in &made.accepted() {
            let text = &made.tokens;
            let proposed = text.get(next..text.len().min(next + count)).unwrap_or_default();
            assert!(proposed.iter().all(|id| selected.contains(id)), "case {case}: {proposed:?}");
            accepted += proposed.len();
            next += count + 1;
        }
        misses += made.tokens.iter().filter(|id| !selected.contains(id)).count();
    }
    assert!(accepted > 40, "only {accepted} proposals were accepted");
    assert!(misses > 40, "the target said only {misses} tokens that the draft cannot");
}

#[test]
fn a_vocabulary_of_all_tokens_changes_nothing() {
    let target = random_target(6, 2);
    let draft =
        |vocabulary| LoadedDraft { vocabulary, ..random_draft(draft_config(&target, 4), 2) };
    let all = DraftVocabulary::new((0..6).collect(), 6);
    let drafts = [draft(None), draft(Some(all))];
    let limits = Limits { max_new_tokens: 50, stop_ids: vec![] };
    for temperature in [0.0, 0.9] {
        let generate = |draft: &LoadedDraft| {
            let sampler = Sampling::at(temperature);
            let mut speculator = Decoder::speculative(&target, draft, sampler).unwrap();
            speculator.generate(&[1, 5], &limits, &GO).unwrap()
        };
        let [plain, pruned] = drafts.each_ref().map(generate);
        assert_eq!(pruned.accepted(), plain.accepted());
        assert_eq!(pruned.tokens, plain.tokens);
    }
}

#[test]
fn a_text_with_another_token_is_told_from_a_tie() {
    for dtype in [Kind::Float, Kind::BFloat16] {
        let target = random_target_in(5, 3, dtype);
        let limits = Limits { max_new_tokens: 12, stop_ids: vec![] };
        let ids = prompt(6, 0, 5);
        let text = Decoder::plain(&target, greedy()).generate(&ids, &limits, &GO).unwrap().tokens;
        let mut other = text.clone();
        other[7] = (other[7] + 1) % 5;
        let differ = |tolerance| compare(&target, &ids, [&text, &other], tolerance).unwrap();
        let difference = differ(None);
        assert!(!difference.is_tie(), "a changed token is not a tie");
        assert_eq!((difference.position, difference.plain), (7, Some(text[7])));
        let (gap, tie) = (difference.logit_gap.unwrap(), difference.tie_tolerance.unwrap());
        assert!(gap > tie && tie > 0.0, "{dtype:?}: {gap} and {tie}");
        assert!(differ(Some(gap)).is_tie());
        assert!(!differ(Some(gap * 0.99)).is_tie());
        let cut = compare(&target, &ids, [&text, &text[..9]], Some(1e3)).unwrap();
        assert!(!cut.is_tie() && cut.logit_gap.is_none());
    }
}

#[test]
fn logits_of_a_state_in_bf16_are_computed_in_float32() {
    let ids_v = Tensor::from_slice(&[7i64, 2, 399]);
    for (dtype, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 2e-2)] {
        let target = random_target_in(400, 1, dtype);
        let state = target.forward_packed(&Tensor::from_slice(&[3i64, 1, 4]), &[0, 3], &[2]);
        let (exact, all) = (target.logits_f32(&state[0], &ids_v), target.logits(&state[0]));
        let rounded = all.index_select(1, &ids_v).to_kind(Kind::Float);
        assert_eq!((exact.kind(), exact.size()), (Kind::Float, vec![3, 3]));
        let apart = ((&exact - rounded).abs().max() / all.abs().max()).double_value(&[]);
        assert!(apart < tolerance, "{dtype:?}: {apart}");
        // Nothing was rounded to bf16.
        assert_ne!(exact, exact.to_kind(Kind::BFloat16).to_kind(Kind::Float));
    }
}

/// libtorch's operations round to bf16 where the CPU's few-row path keeps float32. Blocks and
/// single tokens both take that path.
#[test]
fn texts_in_bf16_part_at_ties_only_and_speculation_has_none() {
    let (mut ties, mut beyond) = (0, 0);
    for seed in 0..12 {
        // Many tokens compete, so that some tie in bf16's few digits.
        let target = random_target_in(400, seed, Kind::BFloat16);
        let draft = draft_in(draft_config(&target, 5), seed, Kind::BFloat16);
        let limits = Limits { max_new_tokens: 60, stop_ids: vec![] };
        let ids = prompt(9, seed as usize, 400);
        let plain = |target: &Target| {
            Decoder::plain(target, greedy()).generate(&ids, &limits, &GO).unwrap().tokens
        };
        let mut speculator = Decoder::speculative(&target, &draft, greedy()).unwrap();
        let made = speculator.generate(&ids, &limits, &GO).unwrap();
        let fast = plain(&target);
        assert_eq!(made.tokens, fast, "seed {seed}");
        drop(speculator);
        let target = target.with_kernels(Kernels::Portable);
        let texts = [plain(&target), fast];
        if let Some(difference) = compare(&target, &ids, texts.each_ref().map(Vec::as_slice), None)
        {
            assert!(difference.is_tie(), "seed {seed}: {difference}");
            ties += 1;
            // float32's tie threshold does not apply here.
            beyond += usize::from(difference.logit_gap.unwrap() > 1e-3);
        }
    }
    assert!(ties > 0 && beyond > 0, "{ties} ties, {beyond} of them beyond float32's tolerance");
}

#[test]
fn sampled_text_follows_the_targets_distribution() {
    check_distribution(None);
}

#[test]
fn a_pruned_draft_keeps_the_targets_distribution() {
    check_distribution(Some(DraftVocabulary::new(vec![0, 2], 4)));
}

/// Samples texts of three tokens and compares their frequencies with the target's probabilities.
fn check_distribution(vocabulary: Option<DraftVocabulary>) {
    let target = random_target(4, 21);
    let draft = LoadedDraft { vocabulary, ..random_draft(draft_config(&target, 4), 5) };
    let limits = Limits { max_new_tokens: 3, stop_ids: vec![] };
    let ids = prompt(5, 2, 4);
    let sampler = Sampling::at(1.3);
    let mut speculator = Decoder::speculative(&target, &draft, sampler).unwrap();
    let samples = 4000;
    let mut counts = [0.0; 64];
    let mut accepted = 0;
    for _ in 0..samples {
        let made = speculator.generate(&ids, &limits, &GO).unwrap();
        accepted += made.accepted().iter().sum::<usize>();
        let text = made.tokens;
        counts[(text[0] * 16 + text[1] * 4 + text[2]) as usize] += 1.0;
    }
    assert!(accepted > samples / 10, "the draft must be accepted now and then");
    let statistic: f64 = (0..64)
        .map(|text| {
            let expected = samples as f64 * probability(&target, &ids, text, 1.3);
            (counts[text as usize] - expected).powi(2) / expected
        })
        .sum();
    // 63 degrees of freedom: 63 on average, above 120 in one of 50,000 seeds.
    assert!(statistic < 120.0, "chi-square {statistic}");
}

/// The target's own probability of three tokens encoded in base 4.
fn probability(target: &Target, prompt: &[i64], text: i64, temperature: f64) -> f64 {
    let tokens = [text / 16, text / 4 % 4, text % 4];
    let mut ids = prompt.to_vec();
    let mut probability = 1.0;
    for token in tokens {
        let length = ids.len() as i64;
        let last = [target.num_layers() as u32];
        let hidden = &target.forward_packed(&tch::Tensor::from_slice(&ids), &[0, length], &last)[0];
        let logits = target.logits(&hidden.narrow(0, length - 1, 1)) / temperature;
        probability *= logits.softmax(-1, tch::Kind::Double).double_value(&[0, token]);
        ids.push(token);
    }
    probability
}

#[test]
fn models_that_do_not_fit_are_refused() {
    let target = random_target(6, 1);
    let refuse = |change: &dyn Fn(&mut dflash_draft::DraftConfig)| {
        let mut config = draft_config(&target, 4);
        change(&mut config);
        let draft = random_draft(config, 1);
        Decoder::speculative(&target, &draft, greedy()).unwrap_err().to_string()
    };
    assert!(refuse(&|config| config.vocab_size = 7).contains("vocab_size is 7 in the draft and 6"));
    assert!(refuse(&|config| config.hidden_size = 24).contains("hidden_size"));
    assert!(refuse(&|config| config.target_layer_ids = vec![1, 4]).contains("layer id 4"));
    assert!(refuse(&|config| config.mask_token_id = 6).contains("mask_token_id"));
    let vocabulary = Some(DraftVocabulary::new(vec![0, 3], 7));
    let foreign = LoadedDraft { vocabulary, ..random_draft(draft_config(&target, 4), 1) };
    let message = Decoder::speculative(&target, &foreign, greedy()).unwrap_err().to_string();
    assert!(message.contains("selected from is 7 in the draft and 6 in the target"), "{message}");
}

#[test]
fn a_set_stop_flag_ends_a_generation() {
    let target = random_target(6, 1);
    let draft = random_draft(draft_config(&target, 4), 1);
    let limits = Limits { max_new_tokens: 50, stop_ids: vec![] };
    let stop = AtomicBool::new(true);
    let plain = Decoder::plain(&target, greedy()).generate(&[1], &limits, &stop);
    let mut speculator = Decoder::speculative(&target, &draft, greedy()).unwrap();
    let speculative = speculator.generate(&[1], &limits, &stop);
    assert!(matches!(plain, Err(Error::Interrupted)));
    assert!(matches!(speculative, Err(Error::Interrupted)));
}
