//! The command lines of a way: the user's own flags, and those that the way sets.

use super::Way;

/// Flags of `dflash plan` that describe the machine or the data, and that no run takes; whether a value
/// follows.
const OF_PLANS: [(&str, bool); 10] = [
    ("--suggest", false),
    ("--json", false),
    ("--device", true),
    ("--gpu", true),
    ("--rows", true),
    ("--mean-length", true),
    ("--tflops", true),
    ("--measured", true),
    ("--pipeline", true),
    ("--tensor-parallel-size", true),
];
/// Flags that say who runs the target, and where.
const OF_WAYS: [(&str, bool); 6] = [
    ("--nproc", true),
    ("--gpus", true),
    ("--nnodes", true),
    ("--colocate", false),
    ("--vllm-endpoint", true),
    ("--endpoint", true),
];
/// GPU numbers of several processes.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// What the user typed after `dflash plan`, and the settings that it came to.
#[derive(Clone, Debug, Default)]
pub struct Typed {
    /// The arguments.
    pub arguments: Vec<String>,
    /// The target's name.
    pub target: String,
    /// Whether a dataset is named; otherwise its preparation is part of the commands.
    pub has_data: bool,
    /// Whether settings come from a run file, which says where to save.
    pub has_run_file: bool,
    /// Whether the run file has the trainers run the target, which servers' flags do not undo.
    pub colocates_in_file: bool,
}

impl Typed {
    /// The trainers run the target.
    pub(super) fn together(&self, way: &Way, row_tokens: usize) -> Vec<String> {
        self.prepared(row_tokens, vec![self.train(way)])
    }

    /// Servers on the first GPUs, in the background, and trainers on the others.
    pub(super) fn split(&self, way: &Way, layer_ids: &[u32], row_tokens: usize) -> Vec<String> {
        let ids: Vec<String> = layer_ids.iter().map(ToString::to_string).collect();
        let server = |gpu: usize| match way.server_bytes {
            Some(_) => format!(
                "{VISIBLE}={gpu} dflash hidden-server {} --target-layer-ids {} --port {} &",
                quoted(&self.target),
                ids.join(" "),
                8000 + gpu
            ),
            None => format!(
                "# a vLLM with {} on GPU {gpu}, port {}, as docs/guides/vllm-source.md says",
                self.target,
                8000 + gpu
            ),
        };
        let mut lines: Vec<String> = (0..way.servers).map(server).collect();
        let gpus: Vec<String> =
            (way.servers..way.servers + way.trainers).map(|gpu| gpu.to_string()).collect();
        let undone = if self.colocates_in_file { " --set colocate=false" } else { "" };
        lines.push(format!("{VISIBLE}={} {}{undone}", gpus.join(","), self.train(way)));
        self.prepared(row_tokens, lines)
    }

    /// `lines`, after the preparation of documents that fit into rows of `row_tokens`.
    fn prepared(&self, row_tokens: usize, lines: Vec<String>) -> Vec<String> {
        let mut all = Vec::new();
        if !self.has_data {
            all.push(format!(
                "dflash prepare --target {} --data conversations.jsonl --output data --seq-length {}",
                quoted(&self.target),
                row_tokens
            ));
        }
        all.extend(lines);
        all
    }

    fn train(&self, way: &Way) -> String {
        let mut words = vec!["dflash".to_owned(), "train".to_owned()];
        words.extend(self.kept(way));
        if !self.has_data {
            words.extend(["--data-path".into(), "data".into()]);
        }
        let saves = self.arguments.iter().any(|it| it.starts_with("--save-path"));
        if !saves && !self.has_run_file {
            words.extend(["--save-path".into(), "drafts".into()]);
        }
        words.extend(way.flags.iter().cloned());
        words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
    }

    /// The user's arguments without those of plans and those that the way sets.
    fn kept(&self, way: &Way) -> Vec<String> {
        let mut kept = Vec::new();
        let mut arguments = self.arguments.iter();
        while let Some(argument) = arguments.next() {
            let (flag, has_own_value) = match argument.split_once('=') {
                Some((flag, _)) => (flag, true),
                None => (argument.as_str(), false),
            };
            let known = OF_PLANS.iter().chain(&OF_WAYS).find(|(name, _)| *name == flag);
            // Those of the values that a way sets take one each.
            let set = way.flags.iter().any(|own| own == flag && own.starts_with("--"));
            match known.map(|(_, valued)| *valued).or(set.then_some(flag != "--recompute")) {
                Some(true) if !has_own_value => _ = arguments.next(),
                Some(_) => {}
                None => kept.push(argument.clone()),
            }
        }
        kept
    }
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let plain = |sign: char| sign.is_ascii_alphanumeric() || "-_./:,=+@%".contains(sign);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(flags: &str, servers: usize) -> Way {
        Way {
            name: String::new(),
            flags: flags.split_whitespace().map(str::to_owned).collect(),
            changes_training: false,
            trainers: 2,
            servers,
            servers_needed: None,
            bytes_per_second: None,
            hours: None,
            trainer_bytes: 0.0,
            server_bytes: Some(1.0),
            reason: None,
            commands: Vec::new(),
        }
    }

    fn typed(line: &str) -> Typed {
        let arguments = line.split_whitespace().map(str::to_owned).collect();
        Typed { arguments, target: "it's".into(), ..Typed::default() }
    }

    #[test]
    fn the_user_s_flags_stay_and_those_of_plans_go() {
        let typed = typed(
            "--target x --suggest --gpus 4 --device=h100 --rows 9 --mean-length 3 --max-anchors 99 \
             --target-layer-ids 2 3 --lr 1e-4 --colocate",
        );
        let lines = typed.together(&way("--colocate --nproc 4 --max-anchors 64", 0), 64);
        assert_eq!(
            lines,
            [
                "dflash prepare --target 'it'\\''s' --data conversations.jsonl --output data --seq-length 64",
                "dflash train --target x --target-layer-ids 2 3 --lr 1e-4 --data-path data --save-path \
                 drafts --colocate --nproc 4 --max-anchors 64"
            ]
        );
    }

    #[test]
    fn servers_and_trainers_share_the_gpus_out() {
        let typed = Typed { has_data: true, has_run_file: true, ..typed("run.toml --nproc 4") };
        let lines =
            typed.split(&way("--nproc 2 --vllm-endpoint http://127.0.0.1:8000/v1", 1), &[2, 9], 64);
        assert_eq!(
            lines,
            [
                "CUDA_VISIBLE_DEVICES=0 dflash hidden-server 'it'\\''s' --target-layer-ids 2 9 --port 8000 &",
                "CUDA_VISIBLE_DEVICES=1,2 dflash train run.toml --nproc 2 --vllm-endpoint http://127.0.0.1:8000/v1"
            ]
        );
    }
}
