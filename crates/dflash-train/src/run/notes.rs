//! What a user should know before the first step.

use tch::{Device, Kind};

use super::worker::Worker;
use crate::schedule::Schedule;

impl Worker<'_, '_> {
    pub(super) fn notes(&self) -> Vec<String> {
        let draft = &self.trainer.draft;
        let mut notes = vec![self.announcement()];
        match self.position.step {
            0 => notes.extend(self.warm_start_notes()),
            step => notes.push(format!("resuming step {step} of {}", self.total)),
        }
        if (draft.device(), draft.flat().kind()) == (Device::Cpu, Kind::BFloat16)
            && !dflash_torch_sys::cpu_multiplies_bf16()
        {
            let note = "this CPU has no instructions for bfloat16: float32 is many times faster";
            notes.push(note.to_owned());
        }
        notes.extend(self.prepared.remarks.iter().cloned());
        notes.extend(self.prepared.packing().cut_note());
        let schedule = Schedule::from(&self.prepared.config.settings.optimizer);
        if !schedule.reaches_peak(self.total) {
            let total = self.total;
            notes
                .push(format!("the warm-up is longer than the {total} steps: --lr is not reached"));
        }
        notes
    }

    fn announcement(&self) -> String {
        let draft = &self.trainer.draft;
        let ranks = self.communicator.world_size();
        let device = match draft.device() {
            Device::Cuda(number) => format!("GPU {number}"),
            _ => "the CPU".to_owned(),
        };
        let dtype = if draft.flat().kind() == Kind::BFloat16 { "bfloat16" } else { "float32" };
        format!(
            "training {} layers ({:.2} M parameters) on {} packed rows over {} epochs: {} steps on \
             {ranks} {}, on {device} in {dtype}, with {:.2} M float32 numbers of state on each",
            draft.config().layers.len(),
            draft.layout().trained() as f64 / 1e6,
            self.order.rows(),
            self.order.epoch_of(self.order.rows()),
            self.total,
            if ranks == 1 { "rank" } else { "ranks" },
            self.trainer.masters.elements() as f64 / 1e6,
        )
    }

    fn warm_start_notes(&self) -> Vec<String> {
        let Some(warm_start) = &self.prepared.warm_start else { return Vec::new() };
        let mut notes = warm_start.notes();
        if let Some(vocabulary) = &self.trainer.batches.blocks.vocabulary {
            let (size, all) = (vocabulary.selected().len(), vocabulary.target_size());
            notes.push(format!("it proposes {size} of the target's {all} tokens"));
        }
        notes
    }
}
