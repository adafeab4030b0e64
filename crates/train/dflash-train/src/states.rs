//! Hidden states of a packed row computed in this process.

use tch::Tensor;

/// The auxiliary layers of a row's documents, concatenated, on the device that computed them.
#[derive(Debug)]
pub(crate) struct ComputedStates {
    /// Ascending.
    layer_ids: Vec<u32>,
    /// [tokens, H] per layer.
    layers: Vec<Tensor>,
}

impl ComputedStates {
    pub(crate) fn new(layer_ids: Vec<u32>, layers: Vec<Tensor>) -> Self {
        Self { layer_ids, layers }
    }

    /// The states of one layer, [tokens, H].
    pub(crate) fn layer(&self, id: u32) -> &Tensor {
        let index = self.layer_ids.binary_search(&id).expect("the source has the layers asked for");
        &self.layers[index]
    }

    /// The rows `rows_c` `[C]` of `layer_ids`, concatenated to [C, K*H].
    pub(crate) fn gathered(&self, layer_ids: &[u32], rows_c: &Tensor) -> Tensor {
        let parts: Vec<Tensor> =
            layer_ids.iter().map(|&id| self.layer(id).index_select(0, rows_c)).collect();
        Tensor::cat(&parts, 1)
    }
}
