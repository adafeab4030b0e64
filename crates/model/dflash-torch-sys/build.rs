//! Compiles the C++ of this crate against the libtorch that `LIBTORCH` names.
//!
//! Links libtorch_cpu and libc10 only, so that a program built here runs without CUDA libraries;
//! `load_cuda` opens the rest at run time.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    println!("cargo:rerun-if-changed=cpp");
    compile(&libtorch());
}

/// The directory with `include/` and `lib/`.
fn libtorch() -> PathBuf {
    let dir = std::env::var_os("LIBTORCH").map(PathBuf::from).unwrap_or_else(|| {
        panic!("LIBTORCH is not set; run `make setup`, which installs or finds libtorch 2.11.0")
    });
    let header = dir.join("include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp");
    assert!(
        header.is_file(),
        "LIBTORCH={} has no {}; run `make setup`, which installs or finds libtorch 2.11.0",
        dir.display(),
        header.display()
    );
    dir
}

fn compile(libtorch: &std::path::Path) {
    let include = libtorch.join("include");
    let calls = || {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .define("_GLIBCXX_USE_CXX11_ABI", "1")
            // As system headers, so that warnings are about our own lines.
            .flag("-isystem")
            .flag(&include)
            .flag("-isystem")
            .flag(include.join("torch/csrc/api/include"));
        build
    };
    calls()
        // The header is empty without it, and hides that it is.
        .define("USE_C10D_GLOO", None)
        .include("cpp/gloo_declarations")
        .file("cpp/c10d.cpp")
        .compile("dflash_c10d");
    calls().file("cpp/calls.cpp").compile("dflash_calls");
    calls()
        // GCC 12 follows libtorch's values into branches that they never take.
        .flag_if_supported("-Wno-stringop-overflow")
        .file("cpp/fake_cuda.cpp")
        .compile("dflash_fake_cuda");
    println!("cargo:rustc-link-search=native={}", libtorch.join("lib").display());
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
}
