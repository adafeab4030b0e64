//! Run files of `dflash train`, seen through `--dump-config`: nothing here needs libtorch.

use std::path::Path;
use std::process::{Command, Output};

const REQUIRED: &str = "target = 'models/m'\ndata-path = 'data/d'\nsave_path = \"out\"\n";

struct RunFileDir(tempfile::TempDir);

impl RunFileDir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Writes `run.toml`: a [train] table with the required settings, and `more`.
    fn with(more: &str) -> Self {
        let place = Self::new();
        place.write("run.toml", &format!("[train]\n{REQUIRED}{more}\n"));
        place
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).unwrap();
    }

    fn run(&self, arguments: &str, variables: &[(&str, &str)]) -> Output {
        run(self.0.path(), arguments, variables)
    }

    /// The resolved settings of `dflash train run.toml ARGUMENTS`.
    fn dump(&self, arguments: &str, variables: &[(&str, &str)]) -> String {
        let output = self.run(&format!("run.toml --dump-config {arguments}"), variables);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn check(&self, arguments: &str, line: &str) {
        let text = self.dump(arguments, &[]);
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }

    fn refuse(&self, arguments: &str, expect: &str) {
        let output = self.run(&format!("run.toml --dump-config {arguments}"), &[]);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(expect), "{expect} in\n{errors}");
        assert!(output.stdout.is_empty());
    }
}

fn run(dir: &Path, arguments: &str, variables: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dflash"))
        .arg("train")
        .args(arguments.split_whitespace())
        .current_dir(dir)
        .env_remove("DFLASH_MODEL")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn keys_are_the_flags_names_in_either_case() {
    let place = RunFileDir::with(
        "lr = 1e-3\nnum_layers = 3\nblock-size = 0x8\ntarget-layer-ids = [1, 2]\nresume = true\n\
         loss = ['ce=0.5', 'kl']\nendpoint = 'http://a:1/v1'\nno_progress = false\nseed = 1_000\n\
         scheduler_type = 'wsd'",
    );
    for line in [
        "target = \"models/m\"",
        "lr = 0.001",
        "num_layers = 3",
        "block_size = 8",
        "target_layer_ids = [1, 2]",
        "resume = \"latest\"",
        "loss = [\"ce=0.5\", \"kl\"]",
        "vllm_endpoint = [\"http://a:1/v1\"]",
        "no_progress = false",
        "seed = 1000",
        "scheduler_type = \"wsd\"",
        "total_seq_len = 8192",
    ] {
        place.check("", line);
    }
}

#[test]
fn flags_beat_set_beats_environment_beats_file_beats_default() {
    let place = RunFileDir::with("lr = 1e-3\nepochs = 2");
    place.check("", "lr = 0.001");
    place.check("--set train.lr=2e-3", "lr = 0.002");
    place.check("--set lr=2e-3 --set train.lr=3e-3", "lr = 0.003");
    place.check("--set train.lr=2e-3 --lr 4e-3", "lr = 0.004");
    place.check("--lr 4e-3", "epochs = 2");
    place.check("--max_steps 7 --max-steps=8", "max_steps = 8");
    place.check("--target-layer-ids 1 2 --target_layer_ids 3", "target_layer_ids = [3]");
    let target = |arguments: &str, expect: &str| {
        let text = place.dump(arguments, &[("DFLASH_MODEL", "of/environment")]);
        assert!(text.contains(&format!("target = \"{expect}\"")), "{text}");
    };
    target("", "of/environment");
    target("--set target=of/set", "of/set");
    target("--set target=of/set --verifier-name-or-path of/flag", "of/flag");
}

#[test]
fn what_set_says_is_read_as_after_a_flag() {
    let place = RunFileDir::with("resume = true\nwarmup = 0.1");
    place.check("", "resume = \"latest\"");
    place.check("", "warmup = 0.1");
    place.check("--set resume=7 --set warmup=30", "resume = \"7\"");
    place.check("--set warmup=30", "warmup = 30");
    place.check("--set train.target_layer_ids=1,2", "target_layer_ids = [1, 2]");
    place.check("--set train.target_layer_ids=[1,3]", "target_layer_ids = [1, 3]");
    place.check("--set save-path=1e3", "save_path = \"1e3\"");
    assert!(!place.dump("--set resume=false", &[]).contains("\nresume ="));
    place.refuse("--set lr=fast", "--set: lr is refused: invalid value 'fast' for '--lr <LR>'");
    place.refuse("--set resume=yes", "--set: resume is refused: invalid value 'yes'");
    place.refuse("--set warmup=1.0", "1.0 may mean one step or all steps");
    place.refuse("--set lr", "--set: lr needs a value");
    place.refuse("--set learning=1", "--set: learning is not a setting");
}

#[test]
fn a_higher_sources_flag_drops_what_it_conflicts_with() {
    let place = RunFileDir::with("gamma = 7.0");
    place.check("--dpace-alpha 0.5", "dpace_alpha = 0.5");
    assert!(!place.dump("--dpace-alpha 0.5", &[]).contains("gamma = "));
    let both = RunFileDir::with("gamma = 7.0\ndpace_alpha = 0.5");
    let output = both.run("run.toml --dump-config", &[]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("--gamma <G>' cannot be used with"), "{errors}");
}

#[test]
fn a_flag_and_what_it_requires_may_come_from_two_places() {
    let place = RunFileDir::with("optimizer = 'muon'");
    place.check("--muon-lr 0.5", "muon_lr = 0.5");
    place.check("--set muon_lr=0.5", "optimizer = \"muon\"");
    let output = RunFileDir::with("muon_lr = 0.5").run("run.toml --dump-config", &[]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("run.toml:5: --muon-lr needs --optimizer muon"), "{errors}");
}

#[test]
fn what_is_dumped_gives_the_same_run() {
    let settings = "warmup = 5\nresume = 'auto'\nadam_betas = [0.8, 0.9]\ntarget_layer_ids = [1, 2]\nloss = ['ce', 'kl=.5']\n\
                    weight_decay = 1\nseed = 18446744073709551615";
    let place = RunFileDir::with(settings);
    let first = place.dump("--max-steps 7 --set lr=.5", &[]);
    assert!(first.contains("warmup = 5\n") && first.contains("[0.8, 0.9]"), "{first}");
    assert!(first.contains("lr = 0.5\n") && first.contains("max_steps = 7\n"), "{first}");
    place.write("run.toml", &first);
    assert_eq!(place.dump("", &[]), first);
}

#[test]
fn mistakes_in_the_file_are_named_with_their_line() {
    let check = |more: &str, expect: &str| RunFileDir::with(more).refuse("", expect);
    check("\nlrr = 1", "run.toml:6: lrr is not a setting of `dflash train`; did you mean lr?");
    check("set = ['lr=1']", "run.toml:5: set is not a setting");
    check("lr = 'fast'", "run.toml:5: lr is a string, but a number is needed");
    check("lr = true", "run.toml:5: lr is true or false, but a number is needed");
    check("resume = 'yes'", "run.toml:5: resume is refused: invalid value 'yes' for '--resume");
    check("resume = [1]", "run.toml:5: resume is a list, but a number or a string is needed");
    check("lr = [1, 2]", "run.toml:5: lr is a list, but a number is needed");
    check("hidden_states_path = 3", "hidden_states_path is a number, but a string is needed");
    check("target_layer_ids = ['a']", "target_layer_ids is a string, but a number or a list of");
    check("epochs = 0", "run.toml:5: --epochs is 0, but it must be at least 1");
    check("zero = 2", "run.toml:5: --zero is 2, but the stages are 0 and 1");
    check("seed = 1.5", "run.toml:5: seed is refused");
    check("scheduler_type = 'cos'", "possible values: cosine, linear, wsd, none");
    check("save-path = 'twice'", "run.toml:5: save-path is given twice");
    check("lr = ", "run.toml:5: ");
    check("[train.draft]\nlayers = 1", "run.toml:5: draft is not a setting");
    check("[model]", "run.toml:5: model is not a table of a run file");
    let output = RunFileDir::new().run("gone.toml", &[]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("cannot read the run file gone.toml"), "{errors}");
}

#[test]
fn what_neither_line_nor_file_gives_is_asked_for() {
    let place = RunFileDir::new();
    place.write("run.toml", "[train]\nlr = 1e-3");
    let output = place.run("run.toml --data-path d", &[]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("--save-path <DIR>"), "{errors}");
    assert!(!errors.contains("--data-path <DIR>\n"), "{errors}");
}

#[test]
fn a_lost_result_is_an_error_and_a_lost_message_is_not() {
    let place = RunFileDir::with("");
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let dump = |more: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash"));
        command.args(["train", "run.toml", "--dump-config"]).args(more.split_whitespace());
        command.current_dir(place.0.path());
        command
    };
    let output = dump("").stdout(full()).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.starts_with("error: failed printing to stdout"), "{errors}");
    assert_eq!(dump("").stderr(full()).output().unwrap().status.code(), Some(0));
    assert_eq!(dump("--epochs 0").stderr(full()).output().unwrap().status.code(), Some(1));
}

#[test]
fn every_command_reads_its_table() {
    let place = RunFileDir::new();
    place.write(
        "run.toml",
        "[prepare]\ndata = ['a.jsonl']\nchat_template_kwargs = { enable_thinking = false }\n\
         [hidden_server]\ntarget = 'm'\nport = 0\n[train]\nmax_anchors = 7\n\
         [eval]\ntarget = 'm'\nlimit = 3\n",
    );
    let dump = |command: &str, more: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_dflash"))
            .args([command, "run.toml", "--dump-config"])
            .args(more.split_whitespace())
            .current_dir(place.0.path())
            .env_remove("DFLASH_MODEL")
            .output()
            .unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{errors}");
        String::from_utf8(output.stdout).unwrap()
    };
    let prepare = dump("prepare", "--set prepare.limit=5");
    assert!(
        prepare.contains("chat_template_kwargs = { \"enable_thinking\" = false }"),
        "{prepare}"
    );
    assert!(prepare.contains("limit = 5\n") && prepare.contains("[prepare]\n"), "{prepare}");
    assert!(dump("hidden-server", "").contains("port = 0\n"));
    assert!(dump("eval", "--draft d --prompts p").contains("limit = 3\n"));
    assert!(dump("plan", "--model m --data-path d").contains("max_anchors = 7\n"));
    let refused = place.run("run.toml --data-path d --target m --save-path s --dump-config", &[]);
    assert_eq!(refused.status.code(), Some(0));
}

#[test]
fn run_files_of_earlier_releases_are_read_as_they_were() {
    let dumped = "resume = false\nresume_or_start = false\nwarmup_ratio = 0.04\nzero = 0\n\
                  matmul_precision = 'float32'\njoin_timeout = 120\nwait_for_server = 60\n\
                  max_in_flight = 16\nvalidation_ratio = 0.0\nmax_anchors = 3072\ngrace = 9";
    let place = RunFileDir::with(dumped);
    for line in ["warmup = 0.04", "zero = 0", "validation_ratio = 0.0", "max_anchors = 3072"] {
        place.check("", line);
    }
    assert!(!place.dump("", &[]).contains("\nresume ="));
    let place = RunFileDir::with("resume_or_start = true\nwarmup-steps = 30\nadam_beta1 = 0.8");
    for line in ["resume = \"auto\"", "warmup = 30", "adam_betas = [0.8, 0.95]"] {
        place.check("", line);
    }
    place.check("--resume-from 7", "resume = \"7\"");
    place.check("--set resume_from=7 --set warmup_ratio=0.5", "warmup = 0.5");
    place.check("--warmup_steps=2", "warmup = 2");
    place.refuse("--set warmup_ratio=1", "--set: warmup is refused: invalid value '1.0'");
    let twice = RunFileDir::with("warmup = 5\nwarmup_ratio = 0.1");
    twice.refuse("", "warmup is given twice in this file");
    RunFileDir::with("warmup_ratio = 'x'").refuse("", "run.toml:5: warmup is refused");
}
