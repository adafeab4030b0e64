//! Compiles this crate's C++: the CPU loops for each instruction-set level, the GPU emulation, and
//! the optimizer against the headers of `LIBTORCH`, the libtorch that `dflash-torch-sys` links.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    println!("cargo:rerun-if-changed=cpp");
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-changed={SHIM}");
    compile_optimizer(&libtorch());
    compile_kernels();
    compile_decode();
    compile_emulation();
}

/// Converts C++ exceptions to error messages.
const SHIM: &str = "../dflash-torch-sys/cpp/guarded.h";

/// Compiles the call of libtorch's fused AdamW, with the bindings' compiler flags.
fn compile_optimizer(libtorch: &std::path::Path) {
    let include = libtorch.join("include");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // As system headers, so that warnings only concern our own code.
        .flag("-isystem")
        .flag(&include)
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include"))
        .include("../dflash-torch-sys/cpp")
        .file("cpp/optimizer.cpp")
        .compile("dflash_optimizer");
}

/// Compiles the GPU kernels as CPU code, for tests.
fn compile_emulation() {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .define("DFLASH_EMULATION", None)
        // The kernels move several elements as one struct.
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        // Its longjmp check assumes a single stack.
        .flag("-U_FORTIFY_SOURCE")
        .file("cpp/emulation.cpp")
        .compile("dflash_emulation");
}

/// Compiles the decoding passes once per instruction-set level.
fn compile_decode() {
    let loops = || {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .opt_level(3)
            .flag("-fopenmp-simd")
            .flag("-fno-math-errno")
            .flag("-fno-trapping-math")
            // Functions with vector arguments are inlined; no call crosses compilation settings.
            .flag("-Wno-psabi");
        build
    };
    let level = |name: &str, flags: &[&str]| {
        let mut build = loops();
        for flag in flags {
            build.flag(flag);
        }
        build
            .define("LEVEL", name)
            .file("cpp/decode.cpp")
            .file("cpp/product.cpp")
            .compile(&format!("dflash_decode_{name}"));
    };
    loops()
        .file("cpp/decode_team.cpp")
        .file("cpp/decode_scratch.cpp")
        .compile("dflash_decode_team");
    match std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => {
            level("avx512bf16", &["-march=x86-64-v4", "-mavx512bf16"]);
            level("avx512", &["-march=x86-64-v4"]);
            level("avx2", &["-march=x86-64-v3"]);
        }
        Ok("aarch64") => level("neon", &[]),
        _ => {}
    }
    level("baseline", &[]);
}

/// Compiles the CPU loops for speed, without floating-point traps and errno.
fn compile_kernels() {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(3)
        .flag("-fopenmp")
        .flag("-fno-math-errno")
        .flag("-fno-trapping-math")
        .file("cpp/kernels.cpp")
        .file("cpp/unpack.cpp")
        .compile("dflash_kernels");
    let rows = |name: &str, flags: &[&str]| {
        let mut build = cc::Build::new();
        build.cpp(true).std("c++17").opt_level(3).flag("-fopenmp-simd");
        build.flag("-fno-math-errno").flag("-fno-trapping-math").flags(flags);
        build.define("LEVEL", name).file("cpp/kernel_rows.cpp");
        build.compile(&format!("dflash_kernel_rows_{name}"));
    };
    if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        rows("avx512", &["-march=x86-64-v4"]);
        rows("avx2", &["-march=x86-64-v3"]);
    }
    rows("baseline", &[]);
    // The libgomp that libtorch loads, so both share one thread pool.
    println!("cargo:rustc-link-lib=gomp");
}

/// The libtorch directory; the bindings' build script checks it more closely.
fn libtorch() -> PathBuf {
    std::env::var_os("LIBTORCH").map(PathBuf::from).unwrap_or_else(|| {
        panic!("LIBTORCH is not set; run `make setup`, which installs or finds libtorch 2.11.0")
    })
}
