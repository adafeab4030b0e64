//! A plan as a table for people.

use std::fmt::{self, Display, Formatter};

use super::Plan;

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [layers, block, captures] = self.shape;
        writeln!(
            f,
            "draft     {:.2} M parameters: {layers} layers, blocks of {block}, {captures} captures",
            self.parameters as f64 / 1e6
        )?;
        writeln!(
            f,
            "data      {} documents, {} tokens, {} packed rows an epoch",
            self.documents, self.tokens_per_epoch, self.rows_per_epoch
        )?;
        writeln!(
            f,
            "a row     {:.0} tokens, {:.0} anchors, {:.0} slots, {:.0} of them supervised",
            self.row.tokens, self.row.anchors, self.row.slots, self.row.supervised
        )?;
        writeln!(
            f,
            "steps     {} an epoch, {} in all, on {} rank(s)\n",
            self.steps_per_epoch, self.steps, self.ranks
        )?;
        writeln!(f, "memory of a rank, MiB ({})", self.device)?;
        for (name, bytes) in self.parts() {
            writeln!(f, "  {name:<34}{:>12.1}", bytes / f64::from(1 << 20))?;
        }
        writeln!(f, "\narithmetic  {:.4} TFLOP a step", self.flops_per_step / 1e12)?;
        match self.tflops {
            Some(tflops) => {
                writeln!(f, "speed       {tflops:.4} TFLOP/s a rank ({})", self.tflops_source)?;
            }
            None => writeln!(f, "speed       {}", self.tflops_source)?,
        }
        if let (Some(step), Some(run)) = (self.step_seconds, self.run_seconds) {
            writeln!(f, "time        {step:.3} s a step, {} in all", duration(run))?;
        }
        write!(f, "hidden      {:.1} MB a step", self.hidden_bytes_per_step / 1e6)?;
        match self.hidden_bytes_per_second {
            Some(rate) => writeln!(f, ", {:.1} MB/s from the servers", rate / 1e6),
            None => writeln!(f),
        }
    }
}

impl Plan {
    fn parts(&self) -> [(&'static str, f64); 11] {
        let memory = &self.memory;
        [
            ("masters, float32", memory.masters),
            ("optimizer's moments", memory.moments),
            ("averaged weights", memory.average),
            ("gradients", memory.gradients),
            ("copy in bfloat16", memory.copy),
            ("target's embedding and lm_head", memory.frozen),
            ("activations of the largest row", memory.activations),
            ("chunk of logits", memory.logits),
            ("window of hidden states, on the host", memory.window),
            ("program and libraries", memory.process),
            ("in all", self.total_bytes),
        ]
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        _ if seconds < 120.0 => format!("{seconds:.0} s"),
        _ if seconds < 7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}
