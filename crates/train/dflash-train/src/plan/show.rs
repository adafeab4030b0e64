//! Formats a plan as a table.

use std::fmt::{self, Display, Formatter};

use super::{AllReduce, Plan, Stream};

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [layers, block, aux_layers] = self.shape;
        writeln!(
            f,
            "draft     {:.2} M parameters: {layers} layers, blocks of {block}, {aux_layers} auxiliary hidden states",
            self.parameters as f64 / 1e6
        )?;
        for note in &self.notes {
            writeln!(f, "note      {note}")?;
        }
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
        if self.target_flops_per_step > 0.0 {
            let target = self.target_flops_per_step / 1e12;
            writeln!(f, "target      {target:.4} TFLOP a step, in turns with the draft")?;
        }
        match self.tflops {
            Some(tflops) => {
                writeln!(f, "speed       {tflops:.4} TFLOP/s a rank ({})", self.tflops_source)?;
            }
            None => writeln!(f, "speed       {}", self.tflops_source)?,
        }
        if let (Some(step), Some(run)) = (self.step_seconds, self.run_seconds) {
            let steps = range(step, self.slow_step_seconds, |seconds| format!("{seconds:.3}"));
            let runs = range(run, self.slow_run_seconds, duration);
            writeln!(f, "time        {steps} s a step, {runs} in all")?;
        }
        write!(f, "hidden      {:.1} MB a step", self.hidden_bytes_per_step / 1e6)?;
        match self.hidden_bytes_per_second {
            Some(rate) => writeln!(f, ", {:.1} MB/s from the servers", rate / 1e6)?,
            None => writeln!(f)?,
        }
        self.show_beside(f)?;
        let (gb, count) = (self.checkpoint_bytes as f64 / 1e9, self.checkpoints);
        let all = gb * count as f64;
        writeln!(
            f,
            "disk        {gb:.2} GB a checkpoint, {all:.2} GB by the end with one an epoch ({count}); --keep-last N keeps N"
        )?;
        if let Some(server) = self.server() {
            writeln!(f, "server      {server}")?;
        }
        self.budget.as_ref().map_or(Ok(()), |budget| write!(f, "\n{budget}"))
    }
}

impl Plan {
    /// The data rate, the servers and the all-reduce.
    fn show_beside(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Some(Stream { bytes_per_second, assembly_share, gbit_per_second }) = &self.stream {
            writeln!(
                f,
                "stream      {:.1} MB/s a rank: {:.0}% of its assembling thread's copy rate, \
                 {gbit_per_second:.1} Gbit/s of the network",
                bytes_per_second / 1e6,
                assembly_share * 100.0
            )?;
        }
        if let Some(servers) = &self.servers {
            let decimals = |number| move |value: f64| format!("{value:.*}", number);
            let [best, slow] = servers.row_seconds;
            let seconds = range(best, Some(slow), decimals(3));
            let [best, slow] = servers.per_trainer;
            let each = range(best, Some(slow), decimals(2));
            let [few, many] = servers.gpus;
            let gpus = range(few as f64, Some(many as f64), decimals(0));
            writeln!(
                f,
                "servers     {:.1} TFLOP per row for the target, {seconds} s on one such GPU: {each} GPUs per \
                 trainer, {gpus} in total",
                servers.row_tflop
            )?;
        }
        if let Some(AllReduce { bytes, nvlink_ms, pcie_ms, network_ms }) = &self.all_reduce {
            let network = network_ms.map_or_else(String::new, |ms| {
                format!(", {ms:.1} ms between machines at 400 Gbit/s")
            });
            writeln!(
                f,
                "all-reduce  {:.2} GB a rank and step, begun while the backward pass runs: {nvlink_ms:.1} ms \
                 over NVLink, {pcie_ms:.1} ms over PCIe{network}",
                bytes / 1e9
            )?;
        }
        if self.budget.is_some() {
            writeln!(
                f,
                "allocator   expandable segments, set by default, since rows differ in size \
                 (PYTORCH_ALLOC_CONF changes it)"
            )?;
            writeln!(
                f,
                "bits        differ from run to run: flash attention's backward pass adds with atomics"
            )?;
        }
        Ok(())
    }

    /// Memory of the weights in a hidden-state server.
    fn server(&self) -> Option<String> {
        let gb: Vec<String> =
            self.server_bytes.iter().map(|bytes| format!("{:.2}", bytes / 1e9)).collect();
        let parts = self.server_parts;
        let weights = match gb.as_slice() {
            [] => return None,
            [one] if parts == 1 => return Some(format!("{one} GB of the target's weights")),
            [one] => format!("{one} GB"),
            stages => format!("{} GB in {} stages", stages.join(" and "), stages.len()),
        };
        let by_heads = match parts {
            1 => String::new(),
            parts => format!(", heads split {parts} ways"),
        };
        Some(format!("{weights} of the target's weights per process{by_heads}"))
    }

    fn parts(&self) -> Vec<(&'static str, f64)> {
        let memory = &self.memory;
        let colocated = memory.target_pass > 0.0;
        let mut parts = vec![
            ("master weights, float32", memory.master_weights),
            ("optimizer's moments", memory.moments),
            ("averaged weights", memory.average),
            ("gradients", memory.gradients),
            ("copy in bfloat16", memory.copy),
            ("target's embedding and lm_head", memory.frozen),
        ];
        parts.extend(colocated.then_some(("target's layers", memory.target)));
        parts.extend([
            ("activations of the largest row", memory.activations),
            ("chunk of logits", memory.logits),
        ]);
        parts.extend(colocated.then_some(("or target's pass, if larger", memory.target_pass)));
        parts.extend(
            (memory.widest > 0.0).then_some(("additional peak within a step", memory.widest)),
        );
        parts.extend([
            ("window of hidden states, on the host", memory.window),
            ("assembled rows, on the host", memory.ahead),
            ("program and libraries", memory.process),
            ("total", self.total_bytes),
        ]);
        parts
    }
}

/// One figure, or a range if the second prints differently.
fn range(best: f64, slow: Option<f64>, print: impl Fn(f64) -> String) -> String {
    let (best, slow) = (print(best), slow.map(print));
    match slow.filter(|slow| *slow != best) {
        Some(slow) => format!("{best} to {slow}"),
        None => best,
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        _ if seconds < 120.0 => format!("{seconds:.0} s"),
        _ if seconds < 7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}
