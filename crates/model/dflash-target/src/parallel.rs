//! A target over several processes: consecutive layers on each ([`Grid::pipeline`]), and within these
//! the heads and the inner width divided ([`Grid::tensor`]).
//!
//! Here is what one of them computes ([`TargetPart`]) and which has what ([`Grid`]). How they reach each other
//! is not the model's business: products of parallel layers are summed through a [`Sum`], and what goes
//! from stage to stage is a [`Passing`]. Embeddings stay whole, on the processes of the first stage
//! alone. Shapes: `t` tokens, `h` hidden.

mod grid;
mod part;
mod shard;

pub(crate) use self::grid::Divisible;
pub use self::grid::Grid;
pub use self::part::{Passing, States, TargetPart};
pub(crate) use self::shard::Shard;
pub use self::shard::Sum;
