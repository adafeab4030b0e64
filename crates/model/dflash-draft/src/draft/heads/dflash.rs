//! DFlash's head: the target's frozen LM head. All rows of a block are proposed at once.

use dflash_settings::{DraftSettings, ExportFormat, SpeculatorType};
use dflash_tensor::Result;
use tch::Tensor;

use crate::draft::head::{
    Choose, Head, HeadChunk, HeadConfig, HeadKind, HeadStart, HeadViews, MetricSums, ProposalBlock,
};
use crate::draft::{DraftConfig, HeadFields, ParameterSpec};
use crate::flops::{RowFlops, RowWork};

/// The type, its only configuration, and its only head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dflash;

impl HeadKind for Dflash {
    fn speculator_type(&self) -> SpeculatorType {
        SpeculatorType::Dflash
    }

    fn fresh(&self, _: &DraftSettings, _: HeadStart<'_>) -> HeadFields {
        HeadFields::default()
    }

    fn read(&self, _: &DraftConfig) -> Result<Box<dyn HeadConfig>> {
        Ok(Box::new(Self))
    }
}

impl HeadConfig for Dflash {
    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn build(&self, _: &HeadViews) -> Box<dyn Head> {
        Box::new(Self)
    }

    fn flops(&self, _: &RowWork) -> RowFlops {
        RowFlops::default()
    }

    fn unservable(&self, _: ExportFormat) -> Option<String> {
        None
    }
}

impl Head for Dflash {
    fn is_plain(&self) -> bool {
        true
    }

    fn logits(&self, _: &HeadChunk<'_>, base_mv: Tensor, _: &mut MetricSums) -> Tensor {
        base_mv
    }

    fn backward(&self, _: &HeadChunk<'_>, _: &Tensor) -> Option<Tensor> {
        None
    }

    fn propose(&self, block: &ProposalBlock<'_>, choose: &mut dyn Choose) {
        let logits_nv = block.lm_head.products(block.hidden_nh);
        for row in 0..logits_nv.size()[0] {
            choose.choose(&logits_nv.narrow(0, row, 1));
        }
    }
}
