//! The class of a training setting: its meaning for resumed runs, for the other ranks, and for a
//! drafter's card.

/// What a resumed run may do with a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resume {
    /// Change it: it does not affect the result, or the value derived from it is compared instead.
    Free,
    /// Not change it: the value derived from it is compared with the checkpoint's, and no flag
    /// allows a difference.
    Lasting,
    /// Change it with a message: it affects the last bits, what is skipped and counted, or how the
    /// result is measured.
    Told,
    /// Change it if `--allow-changed` names it.
    Compared,
}

/// A setting of `dflash train`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Its key in a run file.
    pub key: &'static str,
    /// What a resumed run may do with it.
    pub resume: Resume,
    /// Whether ranks may have different values: paths, addresses, machine capabilities.
    pub may_differ: bool,
    /// Whether a drafter's card shows it: it affects the drafter.
    pub in_recipe: bool,
}

/// Settings with classes; see `dflash-settings-derive`.
pub trait Classed {
    /// All of them, including those of flattened structs in their position.
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
        // Settings that are not free and affect the drafter are on its card.
        let decides = |setting: &&Setting| setting.resume == Resume::Compared;
        let hidden: Vec<&str> =
            all.iter().filter(decides).filter(|it| !it.in_recipe).map(|it| it.key).collect();
        assert_eq!(hidden, ["matmul_precision"], "precision of products, told as the surroundings");
    }
}
