//! Exports a draft to another layout or type, loads the export and compares it.
//!
//! - [`Source`] is the draft, from any supported layout;
//! - `checks` rejects a draft that does not match its target, or that an engine would serve
//!   wrongly;
//! - `gguf` is llama.cpp's layout; the other two are in `dflash-draft`;
//! - `compare` compares the loaded export with the draft: [`Deviation`].
//!
//! An export is built under a temporary name and renamed once it has passed.

mod checks;
mod compare;
mod error;
mod gguf;
mod source;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use dflash_chat::ChatTokenizer;
use dflash_draft::objective::DraftVocabulary;
use dflash_draft::{Parameter, Role, Verifier};
use dflash_identity::TargetIdentity;
use dflash_io::PendingDir;
use dflash_settings::{ExportDtype, ExportFormat, ExportSettings};
use dflash_target::{TargetFacts, TargetIo};
use dflash_tensor::{DeviceKind, kind_name};
use tch::{Kind, Tensor};

pub use compare::Deviation;
pub use error::{Error, Result};
pub use source::Source;

/// speculators' names of a pruned draft's additional tensors.
const HEAD: &str = "lm_head.weight";

/// A finished export.
#[derive(Debug)]
pub struct Exported {
    /// Its path.
    pub path: PathBuf,
    /// Total size of its files in bytes.
    pub bytes: u64,
    /// Its deviation from the draft.
    pub deviation: Deviation,
}

/// The target's data that an export needs.
struct Target<'a> {
    dir: &'a Path,
    facts: &'a TargetFacts,
    identity: TargetIdentity,
    tokenizer: Option<&'a ChatTokenizer>,
}

/// Exports `source`, whose target is in `target_dir`, according to `settings`. GGUF needs the
/// target's tokenizer.
///
/// # Errors
/// A draft that does not match the target or that the engine would serve wrongly; an output that
/// exists; I/O; an export that differs from its source.
pub fn export(
    mut source: Source,
    settings: &ExportSettings,
    target_dir: &Path,
    facts: &TargetFacts,
    tokenizer: Option<&ChatTokenizer>,
    stop: &AtomicBool,
) -> Result<Exported> {
    if settings.output.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: settings.output.clone() });
    }
    let identity = TargetIdentity::read(target_dir, &settings.target)?;
    checks::fits(&source, facts, &identity, settings)?;
    checks::servable(&source, facts, settings)?;
    if settings.full_vocabulary {
        source.vocabulary = None;
    }
    let source = source.complete(facts.num_hidden_layers, facts.eos_token_ids.first().copied());
    let target = Target { dir: target_dir, facts, identity, tokenizer };
    tch::no_grad(|| write(&source, settings, &target, stop))
}

fn write(
    source: &Source,
    settings: &ExportSettings,
    target: &Target<'_>,
    stop: &AtomicBool,
) -> Result<Exported> {
    let aside = PendingDir::create(&settings.output)?;
    let head_vh = match (&source.vocabulary, settings.format) {
        (Some(vocabulary), ExportFormat::Speculators | ExportFormat::Gguf) => {
            Some(pruned_head(target, vocabulary)?)
        }
        _ => None,
    };
    check_stop(stop)?;
    let head_vh = head_vh.as_ref();
    let path = match settings.format {
        ExportFormat::Gguf => {
            let path = aside.path().join("draft.gguf");
            let missing = || dflash_chat::Error::NoTokenizer { dir: target.dir.into() };
            let tokenizer = target.tokenizer.ok_or_else(missing)?;
            gguf::write(&path, source, head_vh, settings.dtype, tokenizer, &target.identity)?;
            path
        }
        _ => {
            write_directory(aside.path(), source, head_vh, settings, target)?;
            aside.path().to_owned()
        }
    };
    check_stop(stop)?;
    let deviation = check(source, head_vh, &path, settings)?;
    let bytes = size(&path)?;
    check_stop(stop)?;
    let output = settings.output.clone();
    if settings.format == ExportFormat::Gguf {
        std::fs::rename(&path, &output).map_err(dflash_io::Error::io("write", &output))?;
    } else {
        aside.commit()?;
    }
    Ok(Exported { path: output, bytes, deviation })
}

fn check_stop(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}

/// A pruned draft's rows of the target's head, [Vd, H] in float32.
fn pruned_head(target: &Target<'_>, vocabulary: &DraftVocabulary) -> Result<Tensor> {
    let head = TargetIo::of(target.dir, target.facts, DeviceKind::CPU_F32)?;
    Ok(head.lm_head_vh.index_select(0, &Tensor::from_slice(vocabulary.selected())))
}

/// Writes z-lab's or speculators' layout to `dir`.
fn write_directory(
    dir: &Path,
    source: &Source,
    head_vh: Option<&Tensor>,
    settings: &ExportSettings,
    target: &Target<'_>,
) -> Result<()> {
    let kind = kind(settings.dtype);
    let mut more = Vec::new();
    if let (Some(vocabulary), Some(head_vh)) = (&source.vocabulary, head_vh) {
        let members = Tensor::from_slice(&vocabulary.membership()).to_kind(Kind::Bool);
        more.push(("d2t".to_owned(), Tensor::from_slice(&vocabulary.offsets())));
        more.push((HEAD.to_owned(), head_vh.to_kind(kind)));
        more.push(("t2d".to_owned(), members));
    }
    if settings.format == ExportFormat::Zlab {
        source.config().save(dir, &kind_name(kind))?;
    } else {
        let sizes = source.vocabulary.as_ref().map(|vocabulary| vocabulary.selected().len());
        let says = sizes.unwrap_or(source.config().vocab_size as usize);
        let architectures = vec![target.facts.architecture.clone()];
        // Not its path, since exports are moved to other machines.
        let name_or_path = target.identity.name.clone();
        let verifier = Verifier { name_or_path, architectures };
        source.config().save_speculators(dir, &kind_name(kind), says, &verifier)?;
    }
    target.identity.write_into_draft(dir)?;
    Ok(source.draft.save_weights(dir, kind, &more)?)
}

/// libtorch's type for a safetensors type.
fn kind(dtype: ExportDtype) -> Kind {
    match dtype {
        ExportDtype::Bf16 => Kind::BFloat16,
        ExportDtype::F16 => Kind::Half,
        ExportDtype::F32 => Kind::Float,
        ExportDtype::Q80 => unreachable!("the settings refuse q8_0 outside GGUF"),
    }
}

/// Loads the export at `path` and compares it with its source.
fn check(
    source: &Source,
    head_vh: Option<&Tensor>,
    path: &Path,
    settings: &ExportSettings,
) -> Result<Deviation> {
    let loaded = Source::open(path)?;
    if loaded.vocabulary != source.vocabulary {
        let detail = "other tokens than the draft's".into();
        return Err(Error::Differs { what: "the pruned vocabulary".into(), detail });
    }
    if let Some(own) = head_vh {
        let read = if path.is_file() {
            gguf::read(path)?.head_vh.expect("a vocabulary was read, and a head with it")
        } else {
            let weights = path.join("model.safetensors");
            let file = dflash_tensor::checkpoint::TensorFile::open(&weights)?;
            file.any_tensor(HEAD)?.to_kind(Kind::Float)
        };
        compare::tensor("the pruned head", own, &read, settings.dtype)?;
    }
    let stored = |parameter: &Parameter| match settings.format {
        ExportFormat::Gguf if parameter.role == Role::Vector => ExportDtype::F32,
        _ => settings.dtype,
    };
    compare::compare(&source.draft, &loaded.draft, stored)
}

/// Total size in bytes of a file, or of the files in a directory.
fn size(path: &Path) -> Result<u64> {
    let unreadable = |source| dflash_formats::Error::Read { path: path.into(), source };
    if path.is_file() {
        return Ok(path.metadata().map_err(unreadable)?.len());
    }
    let mut bytes = 0;
    for entry in path.read_dir().map_err(unreadable)? {
        let metadata = entry.and_then(|entry| entry.metadata()).map_err(unreadable)?;
        bytes += metadata.len();
    }
    Ok(bytes)
}
