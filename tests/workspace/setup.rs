//! `scripts/setup.sh` in a separate tree, with stand-ins for cargo, the compiler and pip: which
//! libtorch it chooses if CUDA libraries are wanted, and the size it reports for them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// Stand-in for `python3 -m pip install --target DIR`: creates a wheel there, with CUDA libraries
/// if the wheel's dependencies are requested.
const PYTHON: &str = r#"#!/bin/sh
[ "$1" = -m ] || exit 1
[ "$3" = --version ] && exit 0
echo "$*" >> "$PIP_CALLS"
cuda=
while [ $# -gt 0 ]; do
  case $1 in --target) to=$2 ;; --upgrade) cuda=1 ;; esac
  shift
done
mkdir -p "$to/torch/lib" "$to/torch/include"
touch "$to/torch/lib/libtorch_cpu.so" "$to/torch/lib/libc10.so" "$to/torch/lib/libtorch_cuda.so"
echo "__version__ = '2.11.0'" > "$to/torch/version.py"
[ -z "$cuda" ] || { mkdir -p "$to/nvidia/cu13/lib"; touch "$to/nvidia/cu13/lib/libcublas.so.13"; }
"#;

struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for file in ["scripts/setup.sh", "Cargo.toml"] {
            let copy = tree.path(file);
            fs::create_dir_all(copy.parent().unwrap()).unwrap();
            fs::copy(root.join(file), copy).unwrap();
        }
        for (name, text) in [
            ("cargo", "#!/bin/sh\necho cargo 99.0.0\n"),
            ("c++", "#!/bin/sh\n"),
            ("python3", PYTHON),
        ] {
            let program = tree.path("bin").join(name);
            fs::create_dir_all(program.parent().unwrap()).unwrap();
            fs::write(&program, text).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        tree
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Its output, and the number of pip installations so far.
    fn set_up(&self, cuda: &str) -> (String, usize) {
        let output = Command::new("bash")
            .arg(self.path("scripts/setup.sh"))
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", self.path("bin").display()))
            .env("HOME", self.path("home"))
            .env("PIP_CALLS", self.path("calls"))
            .env("DFLASH_SETUP_CUDA", cuda)
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let calls = fs::read_to_string(self.path("calls")).unwrap_or_default();
        (said, calls.lines().count())
    }

    fn links_to_cuda(&self) -> bool {
        let torch = fs::canonicalize(self.path(".deps/libtorch")).unwrap();
        torch.join("../nvidia/cu13/lib/libcublas.so.13").is_file()
    }
}

#[test]
fn a_cache_without_cuda_does_not_pass_where_cuda_is_wanted() {
    let tree = Tree::new();
    // On a machine with a GPU the first call already wants CUDA.
    let has_gpu = Path::new("/dev/nvidiactl").exists();
    let (said, calls) = tree.set_up("0");
    let size = if has_gpu { "2.7 GB to fetch, 5 GB" } else { "600 MB to fetch, 1.3 GB" };
    assert!(said.contains(size) && calls == 1, "{said}");
    assert_eq!(tree.links_to_cuda(), has_gpu);
    assert_eq!(tree.set_up("0").1, 1, "what is there is kept");
    let (said, calls) = tree.set_up("1");
    assert_eq!(calls, if has_gpu { 1 } else { 2 }, "{said}");
    assert!(has_gpu || said.contains("2.7 GB to fetch, 5 GB on disk"), "{said}");
    assert!(has_gpu || said.contains("has no CUDA libraries"), "{said}");
    assert!(tree.links_to_cuda());
    // The other way round one installation serves both, with or without the link.
    assert_eq!(tree.set_up("0").1, calls);
    fs::remove_file(tree.path(".deps/libtorch")).unwrap();
    assert_eq!(tree.set_up("0").1, calls);
    assert!(tree.links_to_cuda());
}
