"""Installs torch, after asking pip what it would take.

    python tools/install_torch.py torch==2.13.0
    python tools/install_torch.py dist/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl

The arguments go to `pip install`. Exit status 1, with nothing installed, if pip would bring a CUDA
build to a machine that has no GPU: several gigabytes that nothing here could use.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable

PIP = (sys.executable, "-m", "pip", "install", "-qq", "--no-compile")

ADVICE = """\
No GPU was found here (no nvidia-smi), yet pip would install a CUDA build of torch:
  {packages}
Nothing was installed. Pass the path or the requirement of a CPU wheel instead, for example
  make test TORCH=path/to/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
or whatever arguments make your pip find one:
  make test TORCH="torch==2.13.0+cpu --extra-index-url <an index of CPU wheels>\""""


def cuda_packages(names: Iterable[str]) -> list[str]:
    """Those distribution names that only a CUDA build of torch depends on."""
    return sorted(n for n in names if n.lower().startswith(("nvidia-", "cuda-")))


def planned_names(arguments: list[str]) -> list[str]:
    """Distribution names that `pip install` would install now. Raises CalledProcessError."""
    command = [*PIP, "--dry-run", "--report", "-", *arguments]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [item["metadata"]["name"] for item in json.loads(answer)["install"]]


def main(arguments: list[str]) -> int:
    try:
        if not shutil.which("nvidia-smi") and (cuda := cuda_packages(planned_names(arguments))):
            print(ADVICE.format(packages=", ".join(cuda)), file=sys.stderr)
            return 1
        subprocess.run([*PIP, *arguments], check=True)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
