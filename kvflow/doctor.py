"""What is installed, what is missing, and what that costs.

Every finding is looked at, not assumed: the core moves a few bytes through a plan, and NIXL makes a
UCX agent in a process of its own, so that a broken native library cannot take the doctor along.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, frozen

import kvflow

Status = Literal["ok", "missing", "broken"]


@frozen
class Finding:
    """One thing looked at. `cost` is what its absence costs, empty if it is there; without a
    finding that is `required`, kvflow does not work."""

    name: str
    status: Status
    detail: str
    cost: str = ""
    required: bool = False


@frozen
class Package:
    """A module, the distribution that brings it, and what its absence costs."""

    module: str
    distribution: str
    cost: str
    required: bool = False


_FRONT = "no HTTP server; layouts, transfers and engines are not affected"
_CONTROL = "engines in separate processes cannot reach each other"

PACKAGES = (
    Package("attrs", "attrs", "nothing works", required=True),
    Package("numpy", "numpy", "nothing works", required=True),
    Package("torch", "torch", "plans can be derived and proven, but not moved", required=True),
    Package("triton", "triton", "no GPU kernels; on a CPU nothing changes"),
    Package("zmq", "pyzmq", _CONTROL),
    Package("msgspec", "msgspec", _CONTROL),
    Package("safetensors", "safetensors", "no model can be loaded"),
    Package("tokenizers", "tokenizers", "no text: neither the HTTP server nor the demo starts"),
    Package("jinja2", "jinja2", "no chat templates: /v1/chat/completions is refused"),
    Package("starlette", "starlette", _FRONT),
    Package("uvicorn", "uvicorn", _FRONT),
    Package("hypothesis", "hypothesis", "kvflow.testing cannot draw layouts (kvflow[testing])"),
    Package("openai", "openai", "no demo client (kvflow[demo])"),
    Package("PIL", "pillow", "no PNG drawings (kvflow[png])"),
)

NIXL_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
NIXL_COST = (
    "the server refuses `--transport nixl`, and takes the in-process transport only by name "
    "(install kvflow[nixl])"
)
_UCX_AGENT = """
import importlib, sys
api = importlib.import_module(sys.argv[1] + "._api")
config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
agent = api.nixl_agent("kvflow-doctor", config)
sys.exit(0 if agent.get_agent_metadata() else 1)
"""
_UCX_TIMEOUT_S = 60


def examine() -> tuple[Finding, ...]:
    """Looks at everything; takes a few seconds, since torch is imported and an agent is made."""
    return (
        Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
        Finding("kvflow", "ok", kvflow.__version__),
        *map(look_at_package, PACKAGES),
        look_at_transfers(),
        look_at_nixl(),
        look_at_gpu(),
        Finding("cpu", "ok", f"{_num_cores()} cores for this process"),
        look_at_shared_memory(Path("/dev/shm")),
    )


def works(findings: tuple[Finding, ...]) -> bool:
    """Whether all that kvflow cannot do without is there."""
    return all(f.status == "ok" for f in findings if f.required)


def is_importable(module: str) -> bool:
    """Whether the import system finds a top-level module. Imports nothing."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def look_at_package(package: Package) -> Finding:
    """Found by the import system, with the version its distribution states."""
    name, required = package.distribution, package.required
    if not is_importable(package.module):
        return Finding(name, "missing", "not installed", package.cost, required)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Finding(name, "ok", version, required=required)


def look_at_transfers() -> Finding:
    """Derives, proves and carries out one small transfer in this process."""
    return _tried("in-process transfer", _move_a_few_tokens, "no KV can move", required=True)


def look_at_nixl() -> Finding:
    """Which NIXL module there is, and whether it can make a UCX agent."""
    module = next(filter(is_importable, NIXL_MODULES), None)
    if module is None:
        return Finding("nixl", "missing", f"none of {', '.join(NIXL_MODULES)}", NIXL_COST)

    def make_agent() -> str:
        # The levels silence INFO lines on stdout; NIXL reads them when it is imported.
        quiet = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
        command = [sys.executable, "-c", _UCX_AGENT, module]
        done = subprocess.run(
            command, env={**os.environ, **quiet}, capture_output=True, timeout=_UCX_TIMEOUT_S
        )
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
        return f"{module} {_distribution_version(module)}, UCX agent created"

    return _tried("nixl", make_agent, NIXL_COST)


def look_at_gpu() -> Finding:
    """CUDA devices as torch sees them."""
    cost = "kernels run on the CPU; fine for tests and the demo"
    if not is_importable("torch"):
        return Finding("gpu", "missing", "torch is missing", cost)
    import torch

    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        return Finding("gpu", "missing", f"no CUDA device; torch is {build}", cost)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("gpu", "ok", ", ".join(names))


def look_at_shared_memory(path: Path) -> Finding:
    """Room in the file system that shared memory lives in."""
    if not path.is_dir():
        return Finding(str(path), "missing", "no such folder", "no shared memory between processes")
    usage = shutil.disk_usage(path)
    return Finding(str(path), "ok", f"{usage.free >> 20} of {usage.total >> 20} MiB free")


def as_text(findings: tuple[Finding, ...]) -> str:
    """One line a finding, and one more for what it costs."""
    width = max(len(f.name) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{f.name:{width}}  {f.status:7}  {f.detail}")
        if f.cost:
            lines.append(f"{'':{width}}  {'':7}  -> {f.cost}")
    verdict = "kvflow works here" if works(findings) else "kvflow does not work here"
    missing = [f.name for f in findings if f.status != "ok"]
    return "\n".join([*lines, f"{verdict}; without: {', '.join(missing) or 'nothing'}"])


def as_json(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The same as a value for json.dumps."""
    return {
        "version": kvflow.__version__,
        "works": works(findings),
        "findings": [asdict(f) for f in findings],
    }


def _tried(name: str, attempt: Callable[[], str], cost: str, *, required: bool = False) -> Finding:
    try:
        return Finding(name, "ok", attempt(), required=required)
    except Exception as error:  # a diagnosis must survive whatever it meets
        detail = f"{type(error).__name__}: {error}"
        return Finding(name, "broken", detail, cost, required)


def _distribution_version(module: str) -> str:
    return importlib.metadata.version(module.replace("_", "-"))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _move_a_few_tokens() -> str:
    """Deals 10 one-byte tokens to 2 ranks, gathers them on one, and compares."""
    import torch

    from kvflow.layouts.layout import Binding, KVLayout
    from kvflow.layouts.mesh import Placement
    from kvflow.layouts.paging import Paged
    from kvflow.layouts.record import Field, Record
    from kvflow.layouts.sharding import Replicated, RoundRobin
    from kvflow.layouts.spec import Component, KVCacheSpec
    from kvflow.transfers.executors.base import RankCache
    from kvflow.transfers.executors.strided import StridedExecutor
    from kvflow.transfers.lower import BoundPlan
    from kvflow.transfers.planner import plan_transfer

    num_tokens = 10
    spec = KVCacheSpec((Component("latent", 0, Record((Field("tag", "uint8", 1),))),))
    src = KVLayout.uniform(spec, Placement.simple(RoundRobin(2)), Paged(num_tokens))
    dst = KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(num_tokens))
    plan = plan_transfer(src, dst, (0, num_tokens))
    one_block = {"kv": 1}
    src_binding = Binding.of(src, {"kv": [0]}, one_block, num_tokens)
    dst_binding = Binding.of(dst, {"kv": [0]}, one_block, num_tokens)
    sources = {r: RankCache.allocate(src, r, one_block) for r in range(2)}
    target = RankCache.allocate(dst, 0, one_block)
    tags = torch.arange(1, num_tokens + 1, dtype=torch.uint8)
    for rank, cache in sources.items():
        mine = tags[rank::2]
        cache.pages["latent.0"].memory[: len(mine)] = mine
    StridedExecutor().execute(BoundPlan(plan, src_binding, dst_binding), sources, {0: target})
    if not torch.equal(target.pages["latent.0"].memory, tags):
        raise RuntimeError(f"moved {target.pages['latent.0'].memory.tolist()}")
    return f"{plan.nbytes} bytes over {len(plan.links)} links, equal to their source"
