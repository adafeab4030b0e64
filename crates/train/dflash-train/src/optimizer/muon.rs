//! Muon: orthogonalises (approximately) the momentum of each matrix before taking it as a step.
//!
//! The rule and its constants are those of `torch.optim.Muon`, with which speculators trains: the
//! Newton-Schulz iteration in bfloat16, Nesterov momentum, decoupled weight decay. Parameters other
//! than matrices use AdamW.

use dflash_kernels::kernels::Kernels;
use tch::{Device, Kind, Tensor};

use super::groups::Piece;
use super::step_gate::StepGate;

/// Coefficients of the quintic iteration (Keller Jordan, "Muon", 2024): the steepest start for
/// which singular values still settle near 1.
const COEFFICIENTS: (f64, f64, f64) = (3.4445, -4.7750, 2.0315);

/// Keeps the first division finite (PyTorch's value).
const EPSILON: f64 = 1e-7;

/// Constants of Muon.
#[derive(Clone, Copy, Debug)]
pub struct MuonConfig {
    /// Muon's learning rate as a multiple of AdamW's.
    pub rate_ratio: f64,
    /// Momentum.
    pub momentum: f64,
    /// Number of Newton-Schulz iterations.
    pub iterations: usize,
    /// How a matrix's shape affects the learning rate.
    pub scale: MuonScale,
}

/// How a matrix's shape affects the learning rate: the entries of an orthogonal matrix have root
/// mean square `1 / sqrt(max(rows, columns))`.
#[derive(Clone, Copy, Debug)]
pub enum MuonScale {
    /// `sqrt(max(1, rows / columns))`.
    Original,
    /// `0.2 sqrt(max(rows, columns))`: gives updates about the size of AdamW's.
    MatchRmsAdamw,
}

impl Default for MuonConfig {
    /// speculators' recipe: ten times AdamW's rate, with PyTorch's momentum and iterations.
    fn default() -> Self {
        Self { rate_ratio: 10.0, momentum: 0.95, iterations: 5, scale: MuonScale::MatchRmsAdamw }
    }
}

impl MuonScale {
    fn factor(self, rows: i64, columns: i64) -> f64 {
        match self {
            Self::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
            Self::MatchRmsAdamw => 0.2 * (rows.max(columns) as f64).sqrt(),
        }
    }
}

/// Muon's state for the matrices of a share.
#[derive(Debug)]
pub(super) struct Muon {
    pub(super) config: MuonConfig,
    /// Momentum of the matrices, laid out like the share.
    pub(super) momentum: Tensor,
}

impl Muon {
    /// Updates the matrix `piece` of the share at learning rate `rate`.
    pub(super) fn step(
        &self,
        piece: &Piece,
        master_weights: &Tensor,
        gradient: &Tensor,
        rate: f64,
        kernels: Kernels,
    ) {
        let matrix = |buffer: &Tensor| piece.of(buffer).view(piece.shape.as_slice());
        let (gradient, momentum) = (matrix(gradient), matrix(&self.momentum));
        let _ = momentum.shallow_clone().lerp_(&gradient, 1.0 - self.config.momentum);
        let update = self.direction(&gradient, &momentum, kernels);
        let _ = matrix(master_weights).g_add_(&(update * -self.length(piece, rate)));
    }

    /// As [`Self::step`], if `gate` allows it, with the gradient divided by its divisor.
    pub(super) fn step_on_device(
        &self,
        piece: &Piece,
        master_weights: &Tensor,
        gradient: &Tensor,
        rate: f64,
        gate: &StepGate,
        kernels: Kernels,
    ) {
        let matrix = |buffer: &Tensor| piece.of(buffer).view(piece.shape.as_slice());
        let (gradient, momentum) = (gate.divided(&matrix(gradient)), matrix(&self.momentum));
        let share = gate.share(1.0 - self.config.momentum);
        let _ = momentum.shallow_clone().lerp_tensor_(&gradient, &share);
        let update = self.direction(&gradient, &momentum, kernels);
        let length = gate.share(-self.length(piece, rate));
        let _ = matrix(master_weights).g_add_(&(update * length));
    }

    /// Update direction of a matrix, in the type of its gradient and momentum.
    fn direction(&self, gradient: &Tensor, momentum: &Tensor, kernels: Kernels) -> Tensor {
        let ahead = gradient.lerp(momentum, self.config.momentum);
        let products = product_kind(momentum.device(), kernels);
        orthogonalise(products, &ahead, self.config.iterations).to_kind(momentum.kind())
    }

    /// Step size of a matrix of this shape at learning rate `rate`.
    fn length(&self, piece: &Piece, rate: f64) -> f64 {
        rate * self.config.scale.factor(piece.shape[0], piece.shape[1])
    }
}

/// The matrix with the same singular vectors and singular values of about 1, by the Newton-Schulz
/// iteration. Matmuls use type `products`, and their results are rounded to bfloat16, like the
/// reference: exact enough for a direction.
fn orthogonalise(products: Kind, matrix: &Tensor, iterations: usize) -> Tensor {
    let (a, b, c) = COEFFICIENTS;
    let size = matrix.size();
    let tall = size[0] > size[1];
    let wide = |x: &Tensor| if tall { x.transpose(-2, -1) } else { x.shallow_clone() };
    let rounded = |x: Tensor| x.to_kind(Kind::BFloat16).to_kind(products);
    // a batch of one: only libtorch's batched matmul takes scale factors
    let mut x = rounded(wide(&matrix.unsqueeze(0)));
    x = rounded(&x / x.norm().clamp_min(EPSILON));
    for _ in 0..iterations {
        let gram = rounded(x.matmul(&x.transpose(-2, -1)));
        let polynomial = rounded(gram.baddbmm(&gram, &gram, b, c));
        x = rounded(x.baddbmm(&polynomial, &x, a, 1.0));
    }
    wide(&x).squeeze_dim(0)
}

/// A type with fast matmuls on the device: without bfloat16 instructions a CPU is twenty times
/// slower in bfloat16 than in float32, which represents the same numbers and sums.
fn product_kind(device: Device, kernels: Kernels) -> Kind {
    let slow =
        kernels == Kernels::Fast && device == Device::Cpu && !dflash_kernels::cpu_multiplies_bf16();
    if slow { Kind::Float } else { Kind::BFloat16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflash_test_support::alone;

    #[test]
    fn singular_values_come_near_one() {
        // Not every seed works: five iterations leave the small singular values of a nearly
        // singular matrix small.
        let _alone = alone();
        tch::manual_seed(5);
        for shape in [[6, 4], [4, 6], [5, 5], [1, 7]] {
            let matrix = Tensor::randn(shape, (Kind::Float, Device::Cpu));
            let found = orthogonalise(Kind::BFloat16, &matrix, 5);
            assert_eq!(found.size(), shape);
            let (_, values, _) = found.to_kind(Kind::Float).svd(true, false);
            let values = Vec::<f32>::try_from(values).unwrap();
            assert!(values.iter().all(|value| (0.3..1.4).contains(value)), "{shape:?}: {values:?}");
        }
    }

    #[test]
    fn both_kinds_of_products_find_the_same_direction() {
        let _alone = alone();
        tch::manual_seed(6);
        let matrix = Tensor::randn([40, 24], (Kind::Float, Device::Cpu));
        let found = |products| orthogonalise(products, &matrix, 5).to_kind(Kind::Float);
        let (native, wide) = (found(Kind::BFloat16), found(Kind::Float));
        // rounding errors are amplified with the smallest singular values
        let cosine = (&native * &wide).sum(None) / (native.norm() * wide.norm());
        assert!(cosine.double_value(&[]) > 0.99, "{cosine:?}");
    }

    #[test]
    fn a_gradient_of_zero_moves_nothing() {
        let found =
            orthogonalise(Kind::BFloat16, &Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)), 5);
        assert_eq!(found.abs().max().double_value(&[]), 0.0);
    }

    #[test]
    fn a_tall_matrix_takes_larger_steps_in_either_scale() {
        assert_eq!(MuonScale::Original.factor(8, 2), 2.0);
        assert_eq!(MuonScale::Original.factor(2, 8), 1.0);
        assert_eq!(MuonScale::MatchRmsAdamw.factor(2, 100), 2.0);
    }
}
