//! The kernels compile for aarch64 too: otherwise an unguarded x86 attribute would go unnoticed
//! until somebody builds there.

use std::process::Command;

const COMPILER: &str = "aarch64-linux-gnu-g++";

#[test]
fn the_kernels_compile_for_aarch64() {
    for file in [
        "kernels.cpp",
        "kernel_rows.cpp",
        "decode.cpp",
        "decode_team.cpp",
        "decode_scratch.cpp",
        "product.cpp",
        "unpack.cpp",
    ] {
        let source = format!("{}/cpp/{file}", env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(COMPILER);
        // Compile to an object: a syntax check ignores attributes.
        command.args(["-std=c++17", "-O1", "-fopenmp", "-Wall", "-Werror", "-Wno-psabi"]);
        command.args(["-DLEVEL=neon", "-o", "/dev/null", "-c"]);
        match command.arg(source).output() {
            Ok(output) => {
                let stderr = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{file}: {stderr}");
            }
            Err(_) => println!("skipped: no {COMPILER} (Debian: g++-aarch64-linux-gnu)"),
        }
    }
}
