//! Settings of the optimizer and the learning-rate schedule.

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_RATE, MOST_STEPS, at_odds, positive, shares, within};
use crate::choices::{OptimizerKind, SchedulerType};
use crate::warmup::Warmup;

/// Decay rates of AdamW's moment estimates. The second averages over about 20 steps, whereas
/// PyTorch's 0.999 averages over 1,000: a drafter trains for tens of thousands of steps at most, on
/// gradients whose size changes early on, and language-model recipes use this value (GPT-3, LLaMA,
/// OLMo).
pub(crate) const DEFAULT_BETAS: [f64; 2] = [0.9, 0.95];

/// Adam moves a weight by about the learning rate a step, and weights are below 1: beyond this the first step
/// destroys them. Recipes lie between 1e-5 and 1e-2, Muon's up to 0.1.
const MOST_SENSIBLE_RATE: f64 = 1.0;
/// Largest weight decay: beyond it, even small learning rates flip the sign of weights.
const MOST_DECAY: f64 = 1e6;
/// Largest gradient norm: sums of squares overflow float32 before reaching it.
const MOST_NORM: f64 = 1e20;

/// Learning rate, its schedule, and the optimizer.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct OptimizerSettings {
    /// Peak learning rate.
    #[cfg_attr(feature = "clap", arg(long, value_name = "LR", default_value_t = 6e-4))]
    #[setting(compared, recipe)]
    pub lr: f64,
    /// Accept learning rates above 1, with which a run diverges, for tests of that.
    #[cfg_attr(feature = "clap", arg(long, hide = true))]
    #[serde(default)]
    #[setting(free)]
    pub allow_any_lr: bool,
    /// Learning-rate schedule after the warm-up.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = SchedulerType::Cosine))]
    #[setting(compared, recipe)]
    pub scheduler_type: SchedulerType,
    /// Warm-up: a fraction of all steps, below 1, or a number of steps.
    #[cfg_attr(feature = "clap", arg(long, value_name = "R|N", default_value_t = Warmup::Share(0.04)))]
    #[setting(compared, recipe)]
    pub warmup: Warmup,
    /// Final learning rate, as a fraction of the peak.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "R", default_value_t = 0.0))]
    #[setting(compared, recipe)]
    pub min_lr_ratio: f64,
    /// Fraction of all steps used for the decay, for wsd.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "R", default_value_t = 0.2))]
    #[setting(compared, recipe)]
    pub decay_ratio: f64,
    /// Optimizer of the matrices; norms always use AdamW.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = OptimizerKind::Adamw))]
    #[setting(lasting, recipe)]
    pub optimizer: OptimizerKind,
    /// Muon's peak learning rate, for the matrices. Default: ten times --lr.
    #[cfg_attr(feature = "clap", arg(long, value_name = "LR"))]
    #[setting(compared, recipe)]
    pub muon_lr: Option<f64>,
    /// Decays of AdamW's means of gradients and of squared gradients. Default: 0.9,0.95.
    #[cfg_attr(feature = "clap", arg(long, value_name = "B1,B2", action = clap::ArgAction::Set, value_delimiter = ','))]
    #[setting(compared, recipe)]
    pub adam_betas: Option<Vec<f64>>,
    /// Added to the root of AdamW's mean of squared gradients, to avoid division by 0. Default:
    /// 1e-8.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "E"))]
    #[setting(compared, recipe)]
    pub adam_epsilon: Option<f64>,
    /// Decoupled weight decay of matrices.
    #[cfg_attr(feature = "clap", arg(long, value_name = "W", default_value_t = 0.0))]
    #[setting(compared, recipe)]
    pub weight_decay: f64,
    /// Decoupled weight decay of norms and biases.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "W", default_value_t = 0.0))]
    #[setting(compared, recipe)]
    pub norm_weight_decay: f64,
    /// Keep a moving average of the weights with this decay; checkpoints then serve the average.
    #[cfg_attr(feature = "clap", arg(long, value_name = "D"))]
    #[setting(lasting, recipe)]
    pub ema_decay: Option<f64>,
    /// Clip gradients to this global norm.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1.0))]
    #[setting(compared, recipe)]
    pub max_grad_norm: f64,
    /// Stop after N consecutive steps with a non-finite gradient (such steps are skipped and
    /// counted).
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "N", default_value_t = 10))]
    #[setting(free)]
    pub max_bad_steps: u64,
}

impl OptimizerSettings {
    /// Decays of AdamW's means of gradients and of squared gradients.
    pub fn adam_betas(&self) -> [f64; 2] {
        let given = self.adam_betas.as_deref().and_then(|betas| betas.try_into().ok());
        given.unwrap_or(DEFAULT_BETAS)
    }

    /// Replaces unset settings by their defaults.
    pub(crate) fn settle(&mut self) {
        self.adam_betas = Some(self.adam_betas().to_vec());
    }

    fn check_betas(&self) -> Result<(), Invalid> {
        let Some(betas) = &self.adam_betas else { return Ok(()) };
        if betas.len() == 2 && betas.iter().all(|decay| (0.0..1.0).contains(decay)) {
            return Ok(());
        }
        let betas: Vec<String> = betas.iter().map(ToString::to_string).collect();
        let expected =
            "it must be two numbers B1,B2: shares of itself that a mean keeps, from 0 and below 1";
        Err(Invalid::new("adam_betas", betas.join(","), expected))
    }

    /// Refuses a rate that looks like a slip of the pen, such as 6e4 for 6e-4, before hours are spent on it.
    fn check_rates(&self) -> Result<(), Invalid> {
        let rates = [("lr", self.lr), ("muon_lr", self.muon_lr.unwrap_or_default())];
        let absurd = rates.into_iter().find(|(_, rate)| *rate > MOST_SENSIBLE_RATE);
        match absurd.filter(|_| !self.allow_any_lr) {
            Some((key, rate)) => {
                let expected = format!(
                    "with a rate above {MOST_SENSIBLE_RATE} a run diverges in its first steps; the default \
                     is 6e-4 (is a minus sign missing?). --allow-any-lr trains with it all the same"
                );
                Err(Invalid::new(key, rate, expected))
            }
            None => Ok(()),
        }
    }

    /// # Errors
    /// A number is out of range, or a setting has no effect given another one.
    pub fn check(&self) -> Result<(), Invalid> {
        positive([
            ("lr", self.lr, MOST_RATE),
            ("muon_lr", self.muon_lr.unwrap_or(1.0), MOST_RATE),
            ("adam_epsilon", self.adam_epsilon.unwrap_or(1.0), MOST_RATE),
            ("max_grad_norm", self.max_grad_norm, MOST_NORM),
        ])?;
        self.check_rates()?;
        shares([("min_lr_ratio", self.min_lr_ratio), ("decay_ratio", self.decay_ratio)])?;
        self.check_betas()?;
        within([("max_bad_steps", self.max_bad_steps, 1..=MOST_STEPS)])?;
        if self.muon_lr.is_some() && self.optimizer != OptimizerKind::Muon {
            return Err(at_odds("muon_lr", "needs --optimizer muon"));
        }
        let decays =
            [("weight_decay", self.weight_decay), ("norm_weight_decay", self.norm_weight_decay)];
        if let Some((key, decay)) =
            decays.into_iter().find(|(_, decay)| !(0.0..=MOST_DECAY).contains(decay))
        {
            let expected =
                format!("weights decay by a share; it must be at least 0 and at most {MOST_DECAY}");
            return Err(Invalid::new(key, decay, expected));
        }
        match self.ema_decay {
            Some(decay) if !(decay > 0.0 && decay < 1.0) => {
                let expected = "an average keeps a share of itself between 0 and 1";
                Err(Invalid::new("ema_decay", decay, expected))
            }
            _ => Ok(()),
        }
    }
}
