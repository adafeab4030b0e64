//! Datasets of the field that have a short name.

/// A dataset on the Hub under a short name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// What the user types.
    pub name: &'static str,
    /// The dataset's name on the Hub.
    pub repo: &'static str,
    /// Its configuration, as the Hub's Parquet conversion names the folder.
    pub config: &'static str,
    /// The split to train on.
    pub split: &'static str,
}

/// The names that the field's tools share, and what they stand for.
pub const PRESETS: [Preset; 7] = [
    preset("sharegpt", "Aeala/ShareGPT_Vicuna_unfiltered", "default", "train"),
    preset("ultrachat", "HuggingFaceH4/ultrachat_200k", "default", "train_sft"),
    preset("gsm8k", "openai/gsm8k", "main", "train"),
    preset("magpie", "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "default", "train"),
    preset("open-perfectblend", "mlabonne/open-perfectblend", "default", "train"),
    preset("nemotron", "nvidia/Llama-Nemotron-Post-Training-Dataset", "SFT", "chat"),
    preset("codealpaca", "HuggingFaceH4/CodeAlpaca_20K", "default", "train"),
];

const fn preset(
    name: &'static str,
    repo: &'static str,
    config: &'static str,
    split: &'static str,
) -> Preset {
    Preset { name, repo, config, split }
}

/// All names, for messages.
pub(crate) fn names() -> String {
    PRESETS.map(|preset| preset.name).join(", ")
}
