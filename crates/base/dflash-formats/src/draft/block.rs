//! How the rows of a block are used: which of them predict, and which token.

/// The rows that a draft runs for one block: the anchor's, and one for each mask token behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockShape {
    /// Rows, the anchor's included.
    pub rows: usize,
    /// First row that predicts a token. With 1 a row predicts the token at its own position and the
    /// anchor's row is not used; with 0 each row predicts the token behind its position.
    pub first_predicting: usize,
}

impl BlockShape {
    /// `rows` of which all but the anchor's predict the token at their own position: DFlash's.
    pub const fn fill_in(rows: usize) -> Self {
        Self { rows, first_predicting: 1 }
    }

    /// Tokens that a block proposes.
    pub const fn proposals(&self) -> usize {
        self.rows - self.first_predicting
    }

    /// Mask tokens of a block.
    pub const fn masks(&self) -> usize {
        self.rows - 1
    }

    /// How far behind the anchor the token lies that the first row would predict: 0 is the anchor itself.
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
