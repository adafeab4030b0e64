//! Compiles this crate's C++ against the libtorch that `LIBTORCH` names.
//!
//! Links only libtorch_cpu and libc10, so programs run without CUDA libraries; `load_cuda` opens
//! those at run time.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    println!("cargo:rerun-if-changed=cpp");
    compile(&libtorch());
}

/// The directory that has `include/` and `lib/`.
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
            // As system headers, so that warnings only concern our own code.
            .flag("-isystem")
            .flag(&include)
            .flag("-isystem")
            .flag(include.join("torch/csrc/api/include"));
        build
    };
    calls()
        // Without it the header is silently empty.
        .define("USE_C10D_GLOO", None)
        .include("cpp/gloo_declarations")
        .file("cpp/c10d.cpp")
        .compile("dflash_c10d");
    calls().file("cpp/calls.cpp").compile("dflash_calls");
    calls()
        // GCC 12 warns about branches that libtorch's values never reach.
        .flag_if_supported("-Wno-stringop-overflow")
        .file("cpp/fake_cuda.cpp")
        .compile("dflash_fake_cuda");
    println!("cargo:rustc-link-search=native={}", libtorch.join("lib").display());
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
}
