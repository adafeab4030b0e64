//! What a setting of a training run is to a run that goes on, to the other ranks, and to a drafter's card.

/// What a resumed run may do with a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// Anything: it decides nothing of what is computed, or what it comes to is compared in its place.
    Free,
    /// Nothing: what it comes to is compared with the checkpoint, and no flag allows another.
    Lasting,
    /// Change it, and the run says so: it moves last bits, what is left out and counted, or how the result is
    /// measured.
    Told,
    /// Change it where `--allow-changed` names it.
    Compared,
}

/// A setting of `dflash train`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Its key in a run file.
    pub key: &'static str,
    /// What a resumed run may do with it.
    pub resume: Resume,
    /// Whether ranks may have different values: paths, places in the network, what a machine can do.
    pub may_differ: bool,
    /// Whether a drafter's card shows it: it decides what the drafter becomes.
    pub in_recipe: bool,
}

/// Settings that know what they are; see `dflash-settings-derive`.
pub trait Classed {
    /// All of them, those of flattened structs in their place.
    fn settings() -> Vec<Setting>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainSettings;

    #[test]
    fn what_decides_a_drafter_is_in_its_recipe() {
        let all = TrainSettings::settings();
        let of = |key| *all.iter().find(|setting| setting.key == key).unwrap();
        for key in ["lr", "norm_weight_decay", "decay_ratio", "adam_epsilon", "seed", "loss"] {
            assert!(of(key).in_recipe, "{key}");
        }
        assert_eq!(of("speculator_type").resume, Resume::Lasting);
        assert_eq!((of("lr").resume, of("lr").may_differ), (Resume::Compared, false));
        assert!(of("save_path").may_differ && !of("save_path").in_recipe);
        // What is not free and changes the drafter stands on its card.
        let decides = |setting: &&Setting| setting.resume == Resume::Compared;
        let hidden: Vec<&str> =
            all.iter().filter(decides).filter(|it| !it.in_recipe).map(|it| it.key).collect();
        assert_eq!(hidden, ["matmul_precision"], "precision of products, told as the surroundings");
    }
}
