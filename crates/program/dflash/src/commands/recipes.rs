//! `dflash recipes`: the files of the source tree that users start from, carried in the program.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context;
use dflash_io::say;
use dflash_settings::RecipesSettings;

/// A file's path below the directory, and its content.
type Carried = (&'static str, &'static [u8]);

macro_rules! carried {
    ($($path:literal),* $(,)?) => {
        [$(($path, include_bytes!(concat!("../../../../../", $path)))),*]
    };
}

const FILES: [Carried; 12] = carried![
    "data/sharegpt_sample.json",
    "recipes/README.md",
    "recipes/gemma-4-31b-vllm.toml",
    "recipes/gpt-oss-120b-vllm.toml",
    "recipes/kimi-k2.5-vllm.toml",
    "recipes/llama-3.1-8b-4gpu.toml",
    "recipes/qwen3-4b-1gpu.toml",
    "recipes/qwen3-8b-4gpu.toml",
    "recipes/qwen3-coder-30b-a3b-vllm.toml",
    "recipes/qwen3.5-27b-vllm.toml",
    "recipes/run.sh",
    "recipes/tiny-cpu.toml",
];

/// Writes the files that are not there yet; the paths of all go to standard output.
pub(crate) fn run(settings: &RecipesSettings) -> anyhow::Result<()> {
    FILES.iter().try_for_each(|(path, content)| {
        let path = settings.dir.join(path);
        write(&path, content)?;
        println!("{}", path.display());
        Ok(())
    })
}

fn write(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    match fs::read(path) {
        Ok(found) if found == content => return Ok(()),
        Ok(_) => {
            say(format!("{} is there with other content and stays as it is", path.display()));
            return Ok(());
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir)
        .with_context(|| format!("cannot make the directory {}", dir.display()))?;
    dflash_io::write_bytes(path, content)?;
    if path.extension().is_some_and(|ending| ending == "sh") {
        fs::set_permissions(path, PermissionsExt::from_mode(0o755))
            .with_context(|| format!("cannot make {} executable", path.display()))?;
    }
    Ok(())
}
