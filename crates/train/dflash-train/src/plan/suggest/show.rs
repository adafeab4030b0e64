//! A suggestion as a table for people, with the best way's commands below.

use std::fmt::{self, Display, Formatter};

use super::{Suggestion, Way};
use crate::plan::show::{duration, range};

impl Display for Suggestion {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.machine)?;
        let width = self.ways.iter().map(|way| way.name.chars().count()).max().unwrap_or_default();
        writeln!(f, "     {:width$}  {:>18}  GB a trainer", "way", "time")?;
        for (at, way) in self.ways.iter().enumerate() {
            let number = if way.reason.is_none() { format!("{:3}", at + 1) } else { "  -".into() };
            let memory = way.trainer_bytes / 1e9;
            writeln!(f, "{number}  {:width$}  {:>18}  {memory:>12.1}", way.name, way.time())?;
            way.details().iter().try_for_each(|detail| writeln!(f, "       {detail}"))?;
        }
        match self.ways.first().filter(|way| way.reason.is_none()) {
            None => writeln!(f, "\nNo way fits: describe a larger machine, or pass smaller values"),
            Some(best) => {
                writeln!(f, "\nThe best, {}:\n", best.name)?;
                best.commands.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
                if best.changes_training {
                    writeln!(f, "\nIt trains with other values than those given.")?;
                }
                Ok(())
            }
        }
    }
}

impl Way {
    /// How long it takes, in words.
    pub fn time(&self) -> String {
        self.hours.map_or("not known".into(), |[best, slow]| {
            range(best * 3600.0, Some(slow * 3600.0), duration)
        })
    }

    fn details(&self) -> Vec<String> {
        let mut details = Vec::new();
        if self.name.ends_with("smaller values") {
            // What follows --colocate and --nproc N.
            details.push(self.flags.get(3..).unwrap_or_default().join(" "));
        }
        details.extend(self.reason.as_ref().map(|reason| match self.hours {
            Some(_) if self.servers == 0 && self.trainer_bytes > 0.0 => reason.clone(),
            _ => format!("does not work: {reason}"),
        }));
        if let (Some([few, many]), Some(rate)) = (self.servers_needed, self.bytes_per_second) {
            let needed = range(few, Some(many), |it| format!("{it:.1}"));
            let waits = if few > self.servers as f64 { "; the trainers wait" } else { "" };
            details.push(format!(
                "{:.1} MB/s keep the trainers busy, which takes {needed} servers{waits}",
                rate / 1e6
            ));
        }
        if let Some(bytes) = self.server_bytes {
            details.push(format!("{:.1} GB of the target's weights a server", bytes / 1e9));
        }
        details
    }
}
