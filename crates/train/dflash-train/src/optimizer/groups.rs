//! Groups the parts of a share of the flat buffer: matrices, and all other parameters.

use std::ops::Range;

use dflash_draft::{Parameter, Role};
use tch::Tensor;

/// Decoupled weight decay by group, as a share of the group's learning rate.
#[derive(Clone, Copy, Debug, Default)]
pub struct WeightDecay {
    /// Weight decay of matrices.
    pub matrices: f64,
    /// Weight decay of norm weights, which start at 1 and have no reason to shrink to 0.
    pub norms: f64,
}

/// A parameter, or the part of it inside a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First element within the share.
    pub offset: i64,
    /// Elements within the share.
    pub elements: i64,
    /// Shape of the whole parameter in the checkpoint.
    pub shape: Vec<i64>,
    /// Whether weight decay applies: not to embeddings, whose unused rows would decay to 0.
    pub decays: bool,
}

impl Piece {
    /// Whether the share contains the whole parameter.
    pub fn is_whole(&self) -> bool {
        self.elements == self.shape.iter().product::<i64>()
    }

    /// A view of its elements in a buffer laid out like the share.
    pub(super) fn of(&self, share: &Tensor) -> Tensor {
        share.narrow(0, self.offset, self.elements)
    }
}

/// The parameters of a share by treatment. Padding is in neither group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// Weights of matmuls, each checkpoint matrix separately: q, k and v are three.
    pub matrices: Vec<Piece>,
    /// Norm weights, biases and embeddings, which always use AdamW.
    pub norms: Vec<Piece>,
}

impl Groups {
    /// Groups the parts of `parameters` inside `share`, a range of the flat buffer.
    pub fn of(parameters: &[Parameter], share: &Range<i64>) -> Self {
        let mut groups = Self::default();
        for parameter in parameters {
            let start = parameter.offset.max(share.start);
            let end = (parameter.offset + parameter.elements()).min(share.end);
            if start >= end {
                continue;
            }
            let piece = Piece {
                offset: start - share.start,
                elements: end - start,
                shape: parameter.shape.clone(),
                decays: parameter.role != Role::Embedding,
            };
            match parameter.role {
                Role::Matrix => groups.matrices.push(piece),
                Role::Vector | Role::Embedding => groups.norms.push(piece),
            }
        }
        groups
    }

    /// Number of elements outside matrices.
    pub fn norm_elements(&self) -> i64 {
        self.norms.iter().map(|piece| piece.elements).sum()
    }
}

/// The element ranges of `pieces`, with adjacent ones merged.
pub(super) fn spans<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> Vec<Range<i64>> {
    let mut spans: Vec<Range<i64>> = Vec::new();
    for piece in pieces {
        let end = piece.offset + piece.elements;
        match spans.last_mut() {
            Some(last) if last.end == piece.offset => last.end = end,
            _ => spans.push(piece.offset..end),
        }
    }
    spans
}

/// A learning rate with its weight decay.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecayedRate {
    /// Learning rate of this step.
    pub(super) rate: f64,
    /// Weight decay per unit of learning rate.
    pub(super) decay: f64,
}

/// Applies weight decay: shrinks `pieces` of `share` by `decay` times `rate`.
pub(super) fn shrink(share: &Tensor, pieces: &[Piece], DecayedRate { rate, decay }: DecayedRate) {
    if decay == 0.0 {
        return;
    }
    for piece in pieces.iter().filter(|piece| piece.decays) {
        let _ = piece.of(share).g_mul_scalar_(1.0 - rate * decay);
    }
}

#[cfg(test)]
mod tests {
    use dflash_draft::{Fresh, ParameterSpec};

    use super::*;

    fn parameter(shape: &[i64], offset: i64) -> Parameter {
        let role = if shape.len() > 1 { Role::Matrix } else { Role::Vector };
        Parameter { spec: ParameterSpec::new("", shape, role, Fresh::Zeros), offset }
    }

    #[test]
    fn a_share_may_cut_through_a_parameter() {
        let parameters = [parameter(&[2, 3], 0), parameter(&[4], 16), parameter(&[3, 2], 32)];
        let whole = Groups::of(&parameters, &(0..48));
        assert_eq!((whole.matrices.len(), whole.norm_elements()), (2, 4));
        assert!(whole.matrices.iter().all(Piece::is_whole));
        let part = Groups::of(&parameters, &(4..34));
        let piece = |offset, elements, shape: &[i64]| Piece {
            offset,
            elements,
            shape: shape.to_vec(),
            decays: true,
        };
        assert_eq!(part.matrices, [piece(0, 2, &[2, 3]), piece(28, 2, &[3, 2])]);
        assert_eq!(part.norms, [piece(12, 4, &[4])]);
        assert!(!part.matrices[0].is_whole());
        assert_eq!(spans(&part.matrices), [0..2, 28..30]);
        let neighbours = [piece(0, 6, &[2, 3]), piece(6, 4, &[2, 2]), piece(12, 4, &[2, 2])];
        assert_eq!(spans(&neighbours), [0..10, 12..16]);
        assert_eq!(Groups::of(&parameters, &(6..16)), Groups::default());
    }

    #[test]
    fn embeddings_are_no_matrices_and_do_not_decay() {
        let spec = ParameterSpec::embedding("w1", [5, 2], Fresh::Zeros);
        let groups = Groups::of(&[Parameter { spec, offset: 0 }], &(0..10));
        assert!(groups.matrices.is_empty());
        assert_eq!((groups.norm_elements(), groups.norms[0].decays), (10, false));
    }
}
