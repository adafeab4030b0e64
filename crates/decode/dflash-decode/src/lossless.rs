//! Finds where two texts diverge, and whether that is a tie.

use dflash_eval::Difference;
use dflash_target::Target;
use tch::{Kind, Tensor, no_grad};

/// Where the `[plain, speculative]` answers to `prompt` diverge; `None` if they do not. It is a tie
/// if the target's logits of the two tokens after the common text differ by at most `tolerance`,
/// or, without a tolerance, by at most the rounding of the target's precision.
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
    /// Difference of their logits.
    gap: f64,
    /// Possible difference through rounding.
    rounding: f64,
}

impl Preference {
    /// The preference after `text`. The difference is computed in float32 from the target's last
    /// state, since bf16 logits have steps as large as the difference itself.
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

/// How far rounding can shift two logits of a target in `kind` against each other, if the largest
/// logit has this `magnitude`: measured values with a margin, in units in the last place.
///
/// Measured as the shift in the gap of the best two tokens between blocks of 16 and single tokens.
/// Float32, which rounds at every term of a sum: up to 104 units in 762 tokens of a trained target
/// of eight layers. Bf16, which sums in float32: up to 1.6 there and 4.4 in a random target of 36
/// layers, and rounding the logits adds one.
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
