//! The few-row passes of every level, compared with the same arithmetic in double precision, on
//! this processor and, for aarch64, in an emulator; and their machine code.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the build script put the libraries linked here.
const LIBRARIES: &str = env!("OUT_DIR");

const AARCH64: &str = "aarch64-linux-gnu-";

#[cfg(target_arch = "x86_64")]
const LEVELS: &[&str] = &["baseline", "avx2", "avx512", "avx512bf16"];
#[cfg(target_arch = "aarch64")]
const LEVELS: &[&str] = &["baseline", "neon"];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const LEVELS: &[&str] = &["baseline"];

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The output of a command that must succeed; `None`, with a note, if it is missing.
fn output(command: &mut Command, package: &str) -> Option<String> {
    match command.output() {
        Ok(output) => {
            let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{command:?}: {stdout}{stderr}");
            Some(stdout)
        }
        Err(_) => {
            let program = command.get_program().display();
            println!("skipped: no {program} (Debian: {package})");
            None
        }
    }
}

fn compiler(program: &str, flags: &[&str], out: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["-std=c++17", "-Wall", "-Wno-psabi", "-pthread"]).args(flags);
    command.arg("-I").arg(source("cpp")).arg("-o").arg(out);
    command
}

#[test]
fn every_level_computes_what_double_precision_does_whatever_threads_and_company() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("parity");
    let cxx = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut build = compiler(&cxx, &["-O2"], &program);
    build.arg(source("tests/decode/parity.cpp"));
    for level in LEVELS {
        build.arg(format!("{LIBRARIES}/libdflash_decode_{level}.a"));
    }
    build.arg(format!("{LIBRARIES}/libdflash_decode_team.a"));
    if output(&mut build, "g++").is_none() {
        return;
    }
    let found = output(&mut Command::new(program), "").expect("a program that was just made");
    print!("{found}");
    assert!(found.contains("baseline: ok"), "{found}");
}

/// Compiles the passes for aarch64 with the flags of the build script.
fn aarch64_objects(dir: &Path) -> Option<Vec<PathBuf>> {
    let program = format!("{AARCH64}g++");
    let flags = ["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-c"];
    let mut objects = Vec::new();
    for (file, level) in [("decode", "neon"), ("decode", "baseline"), ("decode_scratch", "neon")] {
        let object = dir.join(format!("{file}_{level}.o"));
        let mut build = compiler(&program, &flags, &object);
        build.arg(format!("-DLEVEL={level}")).arg(source(&format!("cpp/{file}.cpp")));
        output(&mut build, "g++-aarch64-linux-gnu")?;
        objects.push(object);
    }
    Some(objects)
}

#[test]
fn neon_computes_the_same_and_keeps_its_sums_in_registers() {
    let dir = tempfile::tempdir().unwrap();
    let Some(objects) = aarch64_objects(dir.path()) else { return };
    check_loops("neon", &format!("{AARCH64}objdump"), &objects[0]);
    let program = dir.path().join("parity");
    let mut build = compiler(&format!("{AARCH64}g++"), &["-O2", "-static"], &program);
    build.arg(source("tests/decode/parity.cpp")).args(&objects);
    output(&mut build, "g++-aarch64-linux-gnu").expect("the compiler was there");
    let mut run = Command::new("qemu-aarch64");
    let Some(found) = output(run.arg(&program).arg("short"), "qemu-user") else { return };
    assert!(found.contains("neon: ok") && found.contains("baseline: ok"), "{found}");
}

#[test]
fn the_inner_loops_of_products_store_nothing_on_the_stack() {
    for level in LEVELS {
        let library = PathBuf::from(format!("{LIBRARIES}/libdflash_decode_{level}.a"));
        check_loops(level, "objdump", &library);
    }
}

/// An instruction: its address and its text.
type Instruction<'a> = (u64, &'a str);

fn check_loops(level: &str, objdump: &str, object: &Path) {
    let mut command = Command::new(objdump);
    command.args(["-d", "-C", "--no-show-raw-insn"]).arg(object);
    let Some(listing) = output(&mut command, "binutils") else { return };
    let mut loops = 0;
    for (name, code) in functions(&listing).filter(|(name, _)| is_tile(name)) {
        for body in inner_loops(&code).into_iter().filter(|body| multiplies(body)) {
            loops += 1;
            let stored: Vec<&Instruction<'_>> =
                body.iter().filter(|(_, text)| stores_on_stack(text)).collect();
            assert!(stored.is_empty(), "{level}: {name} stores {stored:x?}");
        }
    }
    // At least one tile for one, two and three rows each, for two product types.
    assert!(loops >= 6, "{level}: only {loops} loops were found");
}

/// Whether a loop accumulates products, rather than adding the sums to the result.
fn multiplies(body: &[Instruction<'_>]) -> bool {
    let is_product =
        |text: &str| ["fmadd", "fmla", "mulps", "dpbf16"].iter().any(|it| text.contains(it));
    body.iter().any(|(_, text)| is_product(text))
}

/// Kernels for few rows, or for those of a prompt.
fn is_tile(name: &str) -> bool {
    name.contains("run_tile<") || name.contains("::tile<")
}

fn functions(listing: &str) -> impl Iterator<Item = (&str, Vec<Instruction<'_>>)> {
    listing.split("\n\n").filter_map(|block| {
        let (head, body) = block.trim_start().split_once('\n')?;
        let name = head.split_once('<')?.1;
        let instruction = |line: &'_ str| {
            let (address, text) = line.split_once(':')?;
            Some(u64::from_str_radix(address.trim(), 16).ok()?).zip(Some(text.len()))
        };
        let lines = body.lines().filter_map(|line| {
            let (address, length) = instruction(line)?;
            Some((address, line[line.len() - length..].trim()))
        });
        Some((name, lines.collect()))
    })
}

/// Innermost loops: from the target of a backward jump to the jump.
fn inner_loops<'a, 'b>(code: &'b [Instruction<'a>]) -> Vec<&'b [Instruction<'a>]> {
    let place = |address: u64| code.iter().position(|(at, _)| *at == address);
    let jump = |(end, (_, text)): (usize, &Instruction<'_>)| {
        let is_jump = text.starts_with('j') || text.starts_with("b.") || text.starts_with("cbnz");
        let address = text.split_once(" <")?.0.rsplit([' ', '\t']).next()?;
        let begin = place(u64::from_str_radix(address, 16).ok()?)?;
        (is_jump && begin < end).then_some((begin, end))
    };
    let all: Vec<(usize, usize)> = code.iter().enumerate().filter_map(jump).collect();
    let holds_another = |&(begin, end): &(usize, usize)| {
        all.iter().any(|&other| other != (begin, end) && begin <= other.0 && other.1 <= end)
    };
    let inner = all.iter().filter(|one| !holds_another(one));
    inner.map(|&(begin, end)| &code[begin..=end]).collect()
}

/// In x86 AT&T syntax, where the last operand is the destination, and in aarch64.
fn stores_on_stack(text: &str) -> bool {
    let is_x86 = text.contains("mov") && (text.ends_with("(%rsp)") || text.ends_with("(%rbp)"));
    is_x86 || (text.starts_with("st") && text.contains("[sp"))
}

#[test]
fn a_store_on_the_stack_is_found() {
    let listing = "0000 <run_tile<2>(Tile)>:\n   0:\tpush %rbp\n   1:\tvmovups (%rax),%ymm0\n   \
                   5:\tvmovaps %ymm0,-0x20(%rsp)\n   9:\tjne 1 <run_tile<2>(Tile)+0x1>\n   b:\tret";
    let (_, code) = functions(listing).next().unwrap();
    let loops = inner_loops(&code);
    assert_eq!(loops.iter().map(|body| body.len()).collect::<Vec<_>>(), [3]);
    assert_eq!(loops[0].iter().filter(|(_, text)| stores_on_stack(text)).count(), 1);
    assert!(stores_on_stack("str\tq0, [sp, #16]") && !stores_on_stack("vmovaps -0x20(%rsp),%ymm0"));
}
