//! Shape of a block: which of its rows predict, and which tokens.

/// The rows that a draft runs per block: the anchor's, and one per mask token after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockShape {
    /// Number of rows, including the anchor's.
    pub rows: usize,
    /// First row that predicts a token. With 1, a row predicts the token at its own position and
    /// the anchor's row is not used; with 0, each row predicts the next token.
    pub first_predicting: usize,
}

impl BlockShape {
    /// DFlash's shape: all of `rows` rows except the anchor's predict the token at their own
    /// position.
    pub const fn fill_in(rows: usize) -> Self {
        Self { rows, first_predicting: 1 }
    }

    /// Number of tokens that a block proposes.
    pub const fn proposals(&self) -> usize {
        self.rows - self.first_predicting
    }

    /// Number of mask tokens in a block.
    pub const fn masks(&self) -> usize {
        self.rows - 1
    }

    /// Distance from the anchor of the token predicted by the first row; 0 is the anchor itself.
    pub const fn shift(&self) -> usize {
        1 - self.first_predicting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_anchors_row_predicts_or_not() {
        let check = |first_predicting, proposals, shift| {
            let block = BlockShape { rows: 4, first_predicting };
            assert_eq!((block.proposals(), block.shift(), block.masks()), (proposals, shift, 3));
        };
        check(1, 3, 0);
        check(0, 4, 1);
        assert_eq!(BlockShape::fill_in(4), BlockShape { rows: 4, first_predicting: 1 });
    }
}
