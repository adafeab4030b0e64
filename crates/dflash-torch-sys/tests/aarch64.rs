//! The kernels compile for aarch64 too: an x86 attribute without a guard would go unnoticed until
//! somebody builds there.

use std::process::Command;

const COMPILER: &str = "aarch64-linux-gnu-g++";

#[test]
fn the_kernels_compile_for_aarch64() {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/cpp/kernels.cpp");
    let mut command = Command::new(COMPILER);
    // As far as an object: checking the syntax alone does not look at attributes.
    command.args(["-std=c++17", "-O1", "-fopenmp", "-Wall", "-Werror", "-o", "/dev/null", "-c"]);
    match command.arg(source).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        Err(_) => println!("skipped: no {COMPILER} (Debian: g++-aarch64-linux-gnu)"),
    }
}
