//! Where two texts part, and whether the target prefers one of them by more than rounding.

use dflash_eval::Difference;
use dflash_target::Target;
use tch::{Kind, Tensor, no_grad};

/// Where the `[plain, speculative]` answers to `prompt` part; `None` where they do not. It is a tie
/// when the target's logits of the two tokens, computed over the common text, are at most
/// `tolerance` apart; without one, as far as rounding in the target's precision reaches.
pub fn compare(
    target: &Target,
    prompt: &[i64],
    [plain, speculative]: [&[i64]; 2],
    tolerance: Option<f64>,
) -> Option<Difference> {
    if plain == speculative {
        return None;
    }
    let position = plain.iter().zip(speculative).take_while(|(a, b)| a == b).count();
    let (plain_token, speculative_token) = (plain.get(position), speculative.get(position));
    let preference = plain_token
        .zip(speculative_token)
        .map(|(&a, &b)| Preference::of(target, &[prompt, &plain[..position]].concat(), [a, b]));
    Some(Difference {
        response: 0,
        position,
        plain: plain_token.copied(),
        speculative: speculative_token.copied(),
        logit_gap: preference.as_ref().map(|preference| preference.gap),
        tie_tolerance: preference.map(|preference| tolerance.unwrap_or(preference.rounding)),
    })
}

/// How clearly a target prefers one of two tokens.
struct Preference {
    /// Distance of their logits.
    gap: f64,
    /// Distance that rounding can make.
    rounding: f64,
}

impl Preference {
    /// The preference after `text`. The gap is taken in float32 from the target's last state, since
    /// logits in bf16 would be rounded to steps as large as what is measured.
    fn of(target: &Target, text: &[i64], tokens: [i64; 2]) -> Self {
        let to_device = |ids: &[i64]| Tensor::from_slice(ids).to_device(target.device());
        let length = text.len() as i64;
        no_grad(|| {
            let last = [target.num_layers() as u32];
            let hidden_td = &target.forward_packed(&to_device(text), &[0, length], &last)[0];
            let state_1d = hidden_td.narrow(0, length - 1, 1);
            let pair_12 = target.logits_f32(&state_1d, &to_device(&tokens));
            let gap = (pair_12.double_value(&[0, 0]) - pair_12.double_value(&[0, 1])).abs();
            let largest = target.logits(&state_1d).abs().max().double_value(&[]);
            Self { gap, rounding: rounding(largest, target.dtype()) }
        })
    }
}

/// How far rounding can move two logits of a target in `kind` against each other, where the largest
/// logit has this `magnitude`: what was measured, with room to spare, in units in the last place.
///
/// Measured is how far the gap of the two best moves when tokens come in blocks of 16 instead of one
/// by one. Float32, whose sums round at every term: up to 104 units in 762 tokens of a trained target
/// of eight layers. Bf16, whose sums are kept in float32: up to 1.6 there and 4.4 in a random target
/// of 36 layers, and rounding the logits adds one.
fn rounding(magnitude: f64, kind: Kind) -> f64 {
    let (fraction_bits, units) = match kind {
        Kind::BFloat16 => (7, 8.0),
        Kind::Half => (10, 8.0),
        Kind::Double => (52, 512.0),
        _ => (23, 512.0),
    };
    let exponent = magnitude.max(f64::MIN_POSITIVE).log2().floor() as i32;
    units * 2f64.powi(exponent - fraction_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_follows_precision_and_magnitude() {
        assert_eq!(rounding(16.0, Kind::BFloat16), 1.0);
        assert_eq!(rounding(31.9, Kind::BFloat16), 1.0);
        assert_eq!(rounding(15.9, Kind::BFloat16), 0.5);
        assert_eq!(rounding(16.0, Kind::Float), 2f64.powi(-10));
        assert_eq!(rounding(0.3, Kind::Float), 2f64.powi(-16));
        assert!(rounding(0.0, Kind::Float) >= 0.0);
    }
}
