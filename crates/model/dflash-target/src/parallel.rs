//! A target distributed over several processes: pipeline stages of consecutive layers
//! ([`Grid::pipeline`]), and within a stage tensor parallelism over heads and inner width
//! ([`Grid::tensor`]).
//!
//! This module has the computation of one process ([`TargetPart`]) and the assignment ([`Grid`]).
//! Communication is left to the caller: partial products are summed through a [`Sum`], and a
//! [`Passing`] goes from stage to stage. Embeddings are not sharded and exist only in the first
//! stage. Shapes: `t` tokens, `h` hidden.

mod grid;
mod part;
mod shard;

pub(crate) use self::grid::Divisible;
pub use self::grid::Grid;
pub use self::part::{Passing, States, TargetPart};
pub(crate) use self::shard::Shard;
pub use self::shard::Sum;
