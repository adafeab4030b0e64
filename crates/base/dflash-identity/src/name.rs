//! Names of targets.

use std::path::Path;

/// A repository's name on the Hub, also for a directory in the Hub's cache; otherwise the
/// directory's own name, even if the user wrote `.` or a trailing slash.
pub fn short_name(name: &str, dir: &Path) -> String {
    if Path::new(name) != dir {
        return name.split('@').next().unwrap_or(name).to_owned();
    }
    let whole = dir.canonicalize().unwrap_or_else(|_| dir.into());
    cached_repository(&whole).unwrap_or_else(|| last_part(&whole.to_string_lossy()).to_owned())
}

/// `.../models--OWNER--NAME/snapshots/COMMIT` as `OWNER/NAME`.
fn cached_repository(dir: &Path) -> Option<String> {
    let snapshots = dir.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let folder = snapshots.parent()?.file_name()?.to_str()?;
    Some(folder.strip_prefix("models--")?.replacen("--", "/", 1))
}

/// Whether `ours` may be the model that another program calls `theirs`, a path or a repository:
/// whether the last parts agree. Owners differ between mirrors, and paths between machines.
pub fn same_name(ours: &str, theirs: &str) -> bool {
    let theirs = cached_repository(Path::new(theirs)).unwrap_or_else(|| theirs.to_owned());
    let theirs = theirs.split('@').next().unwrap_or_default();
    last_part(ours).eq_ignore_ascii_case(last_part(theirs))
}

fn last_part(name: &str) -> &str {
    name.trim_end_matches('/').rsplit('/').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_named_after_its_directory_or_repository() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("Qwen3-8B");
        let cached = dir.path().join("models--Qwen--Qwen3-8B/snapshots/0123abcd");
        std::fs::create_dir(&model).unwrap();
        std::fs::create_dir_all(&cached).unwrap();
        let own = |dir: &Path| short_name(&dir.to_string_lossy(), dir);
        assert_eq!(own(&model.join(".")), "Qwen3-8B");
        assert_eq!(own(Path::new("absent/Model/")), "Model");
        assert_eq!(own(&cached), "Qwen/Qwen3-8B");
        assert_eq!(short_name("Qwen/Qwen3-8B", &cached), "Qwen/Qwen3-8B");
        assert_eq!(short_name("Qwen/Qwen3-8B@main", dir.path()), "Qwen/Qwen3-8B");
    }

    #[test]
    fn names_agree_in_their_last_part() {
        let check = |theirs: &str, expect: bool| {
            assert_eq!(same_name("Qwen/Qwen3-8B", theirs), expect, "{theirs}");
        };
        check("Qwen/Qwen3-8B", true);
        check("/models/Qwen3-8B/", true);
        check("mirror/qwen3-8b@main", true);
        check("/cache/models--Qwen--Qwen3-8B/snapshots/0123", true);
        check("Qwen/Qwen3-4B", false);
        check("target", false);
    }
}
