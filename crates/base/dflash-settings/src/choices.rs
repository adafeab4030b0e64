//! Settings that choose among a few.
//!
//! Libraries use these types directly, so that a new choice forces them to handle it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An enum of plain choices with the same names on the command line, in run files and in messages.
/// Adding a variant adds a choice.
macro_rules! choices {
    ($(
        $(#[$doc:meta])*
        $name:ident { $( $(#[$variant_doc:meta])* $variant:ident $(= $alias:literal)* ),+ $(,)? }
    )+) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
        #[serde(rename_all = "kebab-case")]
        pub enum $name { $(
            $(#[$variant_doc])*
            $(#[serde(alias = $alias)] #[cfg_attr(feature = "clap", value(alias = $alias))])*
            $variant,
        )+ }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Its name for users, files and messages.
            pub const fn name(self) -> &'static str {
                match self { $(
                    Self::$variant => {
                        const NAME: &str = stringify!($variant);
                        const KEBAB: [u8; kebab_len(NAME)] = kebab_case(NAME);
                        match std::str::from_utf8(&KEBAB) {
                            Ok(name) => name,
                            Err(_) => panic!("identifiers of choices are ASCII"),
                        }
                    }
                )+ }
            }

            /// The inverse of [`Self::name`].
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|choice| choice.name() == name)
            }
        }
    )+ };
}

/// Length of `name` in kebab case: every capital except the first gets a hyphen before it.
const fn kebab_len(name: &str) -> usize {
    let (bytes, mut len, mut at) = (name.as_bytes(), name.len(), 1);
    while at < bytes.len() {
        len += bytes[at].is_ascii_uppercase() as usize;
        at += 1;
    }
    len
}

/// `name` in kebab case, as serde and clap derive it from a variant.
const fn kebab_case<const LEN: usize>(name: &str) -> [u8; LEN] {
    let bytes = name.as_bytes();
    let (mut kebab, mut from, mut to) = ([b'-'; LEN], 0, 0);
    while from < bytes.len() {
        to += (from > 0 && bytes[from].is_ascii_uppercase()) as usize;
        kebab[to] = bytes[from].to_ascii_lowercase();
        from += 1;
        to += 1;
    }
    kebab
}

choices! {
    /// Kinds of drafters.
    SpeculatorType {
        /// Block diffusion conditioned on the target's hidden states.
        Dflash,
        /// The same with a low-rank term of the token before each prediction; no engine serves it.
        Markov,
    }

    /// When to use colors.
    ColorChoice {
        /// On a terminal, unless NO_COLOR is set.
        Auto,
        /// Always.
        Always,
        /// Never.
        Never,
    }

    /// Type of weights and activations.
    #[derive(Default)]
    Dtype {
        /// bfloat16 on a GPU, float32 on a CPU.
        #[default]
        Auto,
        /// bfloat16.
        Bfloat16 = "bf16",
        /// float32.
        Float32 = "f32" = "float",
    }

    /// Shells with completions.
    Shell {
        /// GNU Bash.
        Bash,
        /// Z shell.
        Zsh,
        /// Fish.
        Fish,
        /// Elvish.
        Elvish,
        /// PowerShell.
        Powershell,
    }

    /// Type of hidden states on the wire and in files.
    #[derive(Default)]
    WireDtype {
        /// What drafts train on.
        #[default]
        Bf16,
        /// Twice the bytes, for comparisons.
        F32,
    }

    /// Rounding of the factors of a matrix product on the CPU.
    MatmulPrecision {
        /// None: exact to float32's own rounding.
        Float32,
        /// To bfloat16, as GPUs train; sums stay float32.
        Bfloat16,
    }

    /// Optimizers of the matrices.
    OptimizerKind {
        /// AdamW.
        Adamw,
        /// Muon: orthogonalised momentum.
        Muon,
    }

    /// Programs that show a run's metrics.
    Tracker {
        /// TensorBoard's event files.
        Tensorboard,
        /// MLflow's file store.
        Mlflow,
        /// Weights & Biases, as an offline run.
        Wandb,
        /// None of them.
        None,
    }

    /// Learning-rate schedules.
    SchedulerType {
        /// Half a cosine.
        Cosine,
        /// A straight line.
        Linear,
        /// Warm-up, stable, decay.
        Wsd,
        /// No decay.
        None,
    }

    /// What to do with a sample whose hidden states are not stored.
    OnMissing {
        /// Ask the server.
        Generate,
        /// Skip it.
        Skip,
        /// Skip it and log that.
        Warn,
        /// Fail.
        Raise,
    }

    /// What to do with generated hidden states.
    OnGenerate {
        /// Keep nothing.
        Delete,
        /// Store them in --hidden-states-path for later epochs and runs.
        Cache,
    }

    /// Whether the target thinks before it answers.
    #[derive(Default)]
    Thinking {
        /// The chat template's own default.
        #[default]
        Auto,
        /// With `enable_thinking` true for the template.
        On,
        /// With `enable_thinking` false for the template.
        Off,
    }

    /// Backend for gradients between GPUs.
    Backend {
        /// NCCL if all ranks can use it, else gloo.
        Auto,
        /// NCCL, or an error.
        Nccl,
        /// Over the host.
        Gloo,
    }
}

impl Thinking {
    /// The value of `enable_thinking`, if it is set.
    pub const fn template_variable(self) -> Option<bool> {
        match self {
            Self::Auto => None,
            Self::On => Some(true),
            Self::Off => Some(false),
        }
    }
}

impl WireDtype {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Display for WireDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How many tokens are proposed at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Speculate {
    /// As many as pay, chosen in each step: none if plain decoding is faster.
    #[default]
    Auto,
    /// None: plain decoding.
    Off,
    /// This many, or as many as the draft can.
    Tokens(usize),
}

/// Far more than is ever accepted; each costs a row of the target's pass.
const MOST_PROPOSALS: usize = 1024;

impl FromStr for Speculate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            ("off", _) => Ok(Self::Off),
            (_, Ok(tokens @ 1..=MOST_PROPOSALS)) => Ok(Self::Tokens(tokens)),
            _ => Err(format!("pass auto, off, or a number from 1 to {MOST_PROPOSALS}")),
        }
    }
}

impl fmt::Display for Speculate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Off => write!(f, "off"),
            Self::Tokens(tokens) => write!(f, "{tokens}"),
        }
    }
}

impl TryFrom<String> for Speculate {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Speculate> for String {
    fn from(speculate: Speculate) -> Self {
        speculate.to_string()
    }
}

/// Where to compute: `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// CUDA if libtorch has it, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU: by number, or the process's own (a rank's GPU, or the first).
    Cuda(Option<usize>),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbered =
            |text: &str| text.strip_prefix("cuda:").and_then(|digits| digits.parse().ok());
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            _ => numbered(text)
                .map(|number| Self::Cuda(Some(number)))
                .ok_or_else(|| "pass auto, cpu, cuda or cuda:N".to_owned()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Cpu => write!(f, "cpu"),
            Self::Cuda(None) => write!(f, "cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

impl TryFrom<String> for Device {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        device.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in ["auto", "cpu", "cuda", "cuda:3"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        for text in ["gpu", "cuda:", "cuda:x", "cuda:-1", ""] {
            assert!(text.parse::<Device>().unwrap_err().contains("cuda:N"), "{text}");
        }
    }

    #[test]
    fn names_are_those_of_run_files() {
        fn check<T: Serialize + Copy>(all: &[T], name: fn(T) -> &'static str) {
            for &choice in all {
                assert_eq!(serde_json::to_value(choice).unwrap(), name(choice));
            }
        }
        check(SpeculatorType::ALL, SpeculatorType::name);
        check(WireDtype::ALL, WireDtype::name);
        check(Shell::ALL, Shell::name);
        check(Backend::ALL, Backend::name);
        assert_eq!(SpeculatorType::from_name("markov"), Some(SpeculatorType::Markov));
        assert_eq!(SpeculatorType::from_name("Markov"), None);
        // no choice has two words so far
        assert_eq!(kebab_case::<{ kebab_len("TwoWordsF32") }>("TwoWordsF32"), *b"two-words-f32");
    }

    #[test]
    fn run_files_know_the_aliases_of_flags() {
        let dtype = |text: &str| serde_json::from_value::<Dtype>(text.into()).ok();
        assert_eq!(dtype("bf16"), Some(Dtype::Bfloat16));
        assert_eq!(dtype("bfloat16"), Some(Dtype::Bfloat16));
        assert_eq!(dtype("float"), Some(Dtype::Float32));
        assert_eq!(dtype("half"), None);
    }
}
