"""Writes the Python wheel: a zip file of programs and metadata, with the standard library alone.

`pip` calls `build_wheel` (PEP 517), which builds the programs first; scripts/wheel.sh has them built and
calls this file. Programs are stripped. The same programs and metadata give the same bytes.
"""

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target" / "release"
# The front has a name that no other package installs, and `dflash` is a few bytes that start it.
PROGRAMS = {"dflash-train": RELEASE / "dflash", "dflash-engine": RELEASE / "dflash-engine"}
LAUNCHERS = {"dflash": ROOT / "scripts" / "wheel_launcher.sh"}
# Of torch 2.11's own wheel: no older system has libtorch.
TORCH_GLIBC = (2, 28)
# What RHEL 9 and Amazon Linux 2023 have: glibc 2.34, and the libstdc++ of GCC 11.
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 517's hook."""
    subprocess.run(["make", "build"], cwd=ROOT, check=True, stdout=sys.stderr)
    return write(Path(wheel_directory)).name


def write(out):
    """Writes the wheel into `out`; its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    project["version"] = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    tag = f"py3-none-{platform()}"
    info, scripts = f"{stem}.dist-info", f"{stem}.data/scripts"
    files = [(f"{scripts}/{name}", stripped(path), 0o755) for name, path in PROGRAMS.items()]
    files += [(f"{scripts}/{name}", path.read_bytes(), 0o755) for name, path in LAUNCHERS.items()]
    licenses = [(f"{info}/licenses/{name}", (ROOT / name).read_bytes(), 0o644) for name in project["license-files"]]
    wheel = f"Wheel-Version: 1.0\nGenerator: dflash-train\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files += [
        *licenses,
        (f"{info}/METADATA", metadata(project).encode(), 0o644),
        (f"{info}/WHEEL", wheel.encode(), 0o644),
    ]
    files.append((f"{info}/RECORD", record(files, f"{info}/RECORD").encode(), 0o644))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content, mode in files:
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, content)
    return path


def platform():
    """The wheel's platform tag, with the oldest glibc that both programs run on.

    Ends the process if a program needs a symbol that `NEWEST` excludes."""
    needed = {symbol for path in PROGRAMS.values() for symbol in symbols(path)}
    too_new = sorted(f"{name} needs {kind}_{'.'.join(map(str, version))}"
                     for kind, version, name in needed if version > NEWEST[kind])
    if too_new:
        sys.exit("wheel: RHEL 9 and Amazon Linux 2023 could not start the programs: " + "; ".join(too_new))
    glibc = max(version for kind, version, _ in needed if kind == "GLIBC")
    glibc = max(glibc, TORCH_GLIBC)
    machine = subprocess.run(["uname", "-m"], check=True, capture_output=True, text=True).stdout.strip()
    return f"manylinux_{glibc[0]}_{glibc[1]}_{machine}"


def symbols(path):
    """The versioned symbols of the C and C++ libraries that a program asks for: kind, version, name."""
    table = subprocess.run(["objdump", "-T", path], check=True, capture_output=True, text=True).stdout
    for line in table.splitlines():
        found = re.search(r"\*UND\*.*\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\)?\s+(\S+)$", line)
        if found:
            yield found[1], tuple(map(int, found[2].split("."))), found[3]


def stripped(program):
    """A program's bytes without its symbol table."""
    if not program.is_file():
        sys.exit(f"wheel: {program} is missing; run 'make wheel' or 'make build'")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "program"
        subprocess.run(["strip", "-o", copy, program], check=True)
        return copy.read_bytes()


def metadata(project):
    """The wheel's METADATA, as the core metadata specification 2.4 wants it."""
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", project["name"]),
        ("Version", project["version"]),
        ("Summary", project["description"]),
        ("License-Expression", project["license"]),
        *(("License-File", name) for name in project["license-files"]),
        ("Requires-Python", project["requires-python"]),
        *(("Requires-Dist", dependency) for dependency in project["dependencies"]),
        *(("Classifier", classifier) for classifier in project["classifiers"]),
        *(("Project-URL", f"{label}, {url}") for label, url in project["urls"].items()),
        ("Description-Content-Type", "text/markdown"),
    ]
    head = "".join(f"{key}: {value}\n" for key, value in fields)
    return f"{head}\n{(ROOT / project['readme']).read_text()}"


def record(files, own):
    """The wheel's RECORD: name, digest and size of each file, and its own name without them."""
    def digest(content):
        return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()

    lines = [f"{name},sha256={digest(content)},{len(content)}\n" for name, content, _ in files]
    return "".join(lines) + f"{own},,\n"


if __name__ == "__main__":
    print(write(ROOT / "dist").relative_to(ROOT))
