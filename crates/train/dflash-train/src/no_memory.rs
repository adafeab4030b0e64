//! Turns out-of-memory failures, on the host or a GPU, into an error that names the settings to
//! lower. It is not a bug, and a restart would run out of memory again.

use dflash_tensor::{catch_oom, catch_oom_in, is_oom};

use crate::Error;
use crate::config::TrainConfig;

/// The rank that allocates, and the settings that determine how much.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) rank: usize,
}

impl Asking<'_> {
    /// Runs `work`, described by `doing` ("in step 3"). Converts a panic or error due to lack of
    /// memory into [`Error::OutOfMemory`].
    ///
    /// State that `work` changes must be valid after a panic, or must not be used any more.
    pub(crate) fn contain<T>(
        self,
        doing: impl FnOnce() -> String,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        match catch_oom(work) {
            Err(reason) => Err(self.refused(doing(), reason)),
            Ok(Err(error)) => match reason_in(&error) {
                Some(reason) => Err(self.refused(doing(), reason)),
                None => Err(error),
            },
            Ok(done) => done,
        }
    }

    /// The error for an allocation that failed with `reason`.
    pub(crate) fn refused(self, doing: String, reason: String) -> Error {
        Error::OutOfMemory { rank: self.rank, doing, reason, remedy: remedy(self.config) }
    }
}

/// The allocator's message, if the error is caused by our own allocation; a server's message about
/// its memory does not count.
fn reason_in(error: &Error) -> Option<String> {
    if !matches!(error, Error::Torch(_) | Error::Model(_) | Error::Dist(_)) {
        return None;
    }
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        if is_oom(&error.to_string()) {
            return catch_oom_in(&error.to_string());
        }
        cause = error.source();
    }
    None
}

/// The settings to lower, with their present values.
fn remedy(config: &TrainConfig) -> String {
    let settings = &config.settings;
    let chunk = settings.objective.loss_chunk_mib;
    let chunk = chunk.map_or_else(|| "the default".to_owned(), |mib| mib.to_string());
    let recompute = if settings.compute.recompute { "" } else { ", or pass --recompute" };
    let colocate = if settings.hidden_states.colocate {
        let tokens = settings.hidden_states.target_batch_tokens;
        format!(
            "; for the target, lower --target-batch-tokens (now {tokens}), or run it elsewhere in \
             `dflash hidden-server`"
        )
    } else {
        String::new()
    };
    format!(
        "lower --max-anchors (now {}), --total-seq-len (now {}), --loss-chunk-mib (now {}) or \
         --num-layers (now {}){recompute}{colocate}; `dflash plan` with the same flags shows the memory of each \
         part",
        settings.rows.max_anchors(),
        settings.rows.total_seq_len(),
        chunk,
        config.draft.num_layers,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::World;

    const CUDA: &str = "CUDA out of memory. Tried to allocate 20.00 GiB.";

    fn contained(work: impl FnOnce() -> Result<(), Error>) -> Error {
        let config = World::new().config("out");
        Asking { config: &config, rank: 3 }.contain(|| "in step 7".to_owned(), work).unwrap_err()
    }

    #[test]
    fn panics_and_errors_of_allocators_say_what_to_lower() {
        let check = |error: Error| {
            let text = error.to_string();
            for words in [
                "rank 3 ran out of memory in step 7: CUDA out of memory. Tried to allocate 20.00 GiB.;",
                "--max-anchors (now 3072)",
                "--loss-chunk-mib (now 1)",
                "--total-seq-len (now 64)",
                "--num-layers (now 2), or pass --recompute;",
                "`dflash plan`",
            ] {
                assert!(text.contains(words), "{words:?} is not in {text}");
            }
            assert!(matches!(error, Error::OutOfMemory { .. }));
        };
        check(contained(|| panic!("Torch(\"{CUDA}\\nException raised from malloc\")")));
        let torch = tch::TchError::Torch(format!("{CUDA}\nException raised from malloc"));
        check(contained(|| Err(dflash_tensor::Error::from(torch).into())));
        let source =
            dflash_torch_sys::Error::Nccl { operation: "all-reduce", message: CUDA.to_owned() };
        let inner = contained(|| {
            Err(dflash_dist::Error::Collective { rank: 3, operation: "all-reduce", source }.into())
        });
        assert!(inner.to_string().contains("--max-anchors"), "{inner}");
    }

    #[test]
    fn what_a_server_says_of_its_own_memory_is_not_ours() {
        let said = dflash_hidden_states::Error::Interrupted;
        assert!(matches!(contained(|| Err(said.into())), Error::Hidden(_)));
        let sample = Error::BadWeights { path: "out of memory".into(), name: String::new() };
        assert!(matches!(contained(|| Err(sample)), Error::BadWeights { .. }));
    }
}
