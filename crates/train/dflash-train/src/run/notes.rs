//! Messages for the user before the first step.

use tch::{Device, Kind};

use super::worker::Worker;
use crate::schedule::Schedule;

/// Share of the peak learning rate below which a schedule has nearly ended.
const NEARLY_ENDED: f64 = 0.05;

impl Worker<'_, '_> {
    pub(super) fn notes(&self) -> Vec<String> {
        let draft = &self.trainer.draft;
        let mut notes = vec![self.announcement()];
        match &self.prepared.resume {
            None => notes.extend([self.warm_start_notes(), self.notes.clone()].concat()),
            Some(_) => notes.extend(self.resume_notes()),
        }
        if (draft.device(), draft.flat().kind()) == (Device::Cpu, Kind::BFloat16)
            && !dflash_kernels::cpu_multiplies_bf16()
        {
            let note = "this CPU has no instructions for bfloat16: float32 is many times faster";
            notes.push(note.to_owned());
        }
        notes.extend(self.prepared.remarks.iter().cloned());
        notes.extend(self.prepared.packing().cut_note());
        let schedule = Schedule::from(&self.prepared.config.settings.optimizer);
        let planned = self.position.schedule.map_or(self.total, |position| position.planned);
        if !schedule.reaches_peak(planned) {
            let total = planned;
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
            self.trainer.master_weights.elements() as f64 / 1e6,
        )
    }

    /// Where and with which changes the run resumes, and how its schedule continues.
    fn resume_notes(&self) -> Vec<String> {
        let (step, total) = (self.position.step, self.total);
        let rest = if step == total { ": nothing is left to train" } else { "" };
        let mut notes = vec![format!("resuming step {step} of {total}{rest}")];
        notes.extend(self.notes.iter().cloned());
        let Some(end) = self.ended_before.filter(|_| step < total) else { return notes };
        let (from, rate) = (step + 1, self.rate(step));
        notes.push(format!(
            "the schedule was to end at step {end} and now ends at {total}: the rest of it takes steps {from} to {total}, and the learning rate continues from {rate:.3e}"
        ));
        let peak = self.prepared.config.settings.optimizer.lr;
        if rate < NEARLY_ENDED * peak && self.rate(total - 1) <= rate {
            notes.push(format!(
                "this rate has little effect; for a new schedule start a run from this one's \
                 weights, with --from-pretrained {} and another --save-path",
                self.prepared
                    .resume
                    .as_ref()
                    .map_or_else(String::new, |it| it.dir.display().to_string())
            ));
        }
        notes
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
