//! Token embedding: a table, or the tied output projection of a packed target.

use std::sync::Arc;

use dflash_kernels::decode::{self, Matrix, floats_mut};
use tch::{Device, Kind, Tensor};

/// Embedding rows in the type that the target runs in.
#[derive(Debug)]
pub(crate) struct Embedding {
    stored: Stored,
    kind: Kind,
}

#[derive(Debug)]
enum Stored {
    /// [V, H] in that type, or in bfloat16 if it represents the same values.
    Table(Tensor),
    Shared(Arc<Matrix>),
}

impl Embedding {
    /// Reads rows from `table_vh` [V, H].
    pub(crate) fn table(table_vh: Tensor) -> Self {
        let kind = table_vh.kind();
        Self { stored: Stored::Table(table_vh), kind }
    }

    /// [`Self::table`] for a target that runs in `kind`, which represents the table's values
    /// exactly.
    pub(crate) fn stored_as(table_vh: Tensor, kind: Kind) -> Self {
        Self { stored: Stored::Table(table_vh), kind }
    }

    /// Reads rows from the packed output projection of a target that runs in `kind`.
    pub(crate) fn shared(matrix: Arc<Matrix>, kind: Kind) -> Self {
        Self { stored: Stored::Shared(matrix), kind }
    }

    /// Rows [T, H] of the tokens `ids_t` `[T]` (int64, on the device).
    pub(crate) fn rows(&self, ids_t: &Tensor) -> Tensor {
        match &self.stored {
            Stored::Table(table_vh) => table_vh.index_select(0, ids_t).to_kind(self.kind),
            Stored::Shared(matrix) => {
                let ids = Vec::<i64>::try_from(ids_t).expect("token ids are integers");
                let size = [ids.len() as i64, matrix.depth()];
                let mut rows_th = Tensor::empty(size, (Kind::Float, Device::Cpu));
                matrix.rows(&ids, floats_mut(&mut rows_th));
                rows_th.to_kind(self.kind)
            }
        }
    }

    /// The whole table [V, H]; a copy if it is stored otherwise.
    pub(crate) fn whole(&self) -> Tensor {
        match &self.stored {
            Stored::Table(table_vh) => table_vh.to_kind(self.kind),
            Stored::Shared(matrix) => matrix.unpacked(0..matrix.outputs(), self.kind).tr(),
        }
    }

    /// The packed output projection, if tied.
    pub(crate) fn matrix(&self) -> Option<&Arc<Matrix>> {
        match &self.stored {
            Stored::Table(_) => None,
            Stored::Shared(matrix) => Some(matrix),
        }
    }

    /// The same embedding for the packed passes.
    pub(crate) fn for_packed_decoder(&self) -> decode::Embedding {
        match &self.stored {
            Stored::Table(table_vh) => decode::Embedding::Table(table_vh.shallow_clone()),
            Stored::Shared(matrix) => decode::Embedding::Shared(Arc::clone(matrix)),
        }
    }

    /// Number of elements of the table.
    pub(crate) fn numel(&self) -> usize {
        match &self.stored {
            Stored::Table(table_vh) => table_vh.numel(),
            Stored::Shared(matrix) => (matrix.depth() * matrix.outputs()) as usize,
        }
    }

    /// Type of the rows.
    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Device of the rows.
    pub(crate) fn device(&self) -> Device {
        match &self.stored {
            Stored::Table(table_vh) => table_vh.device(),
            Stored::Shared(_) => Device::Cpu,
        }
    }
}
