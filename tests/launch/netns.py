"""Two hosts on one machine: network, PID, IPC, mount and UTS namespaces of their own, and a wire.

Each host lives as long as a process that reads a pipe of ours, so that none outlives the tests,
whatever ends them. Addresses are of TEST-NET-2, which nothing else uses.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from attrs import frozen
from launch_world import children

WIRE = "eth0"
_LIMIT_S = 20
_BIRTH = """set -e
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
hostname {name}
ip link set lo up
echo born
exec cat
"""


class NoNamespacesError(Exception):
    """The kernel or the machine does not let us make hosts."""


@frozen
class Host:
    """A host by its name, its address on the wire, and the first process in it."""

    name: str
    address: str
    pid: int

    def command(self, *words: str) -> list[str]:
        """A command line that runs `words` in this host, in the working directory it is run in."""
        spaces = ["--user", "--net", "--pid", "--ipc", "--mount", "--uts"]
        return [*_enter(self.pid, *spaces, "--wd=."), *words]

    def run(self, *words: str) -> str:
        """What a short command in this host prints."""
        return _output(self.command(*words))


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other by their interface `WIRE`, and nothing else. Raises
    `NoNamespacesError` with the reason where they cannot be made."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            raise NoNamespacesError(f"{tool} is not installed")
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(_host("host-a", "198.51.100.1", ["--user", "--map-root-user"]))
        b = stack.enter_context(_host("host-b", "198.51.100.2", [], _enter(a.pid, "--user")))
        outside = _enter(a.pid, "--user", "--net")  # where the other's PID has a meaning
        ends = ["name", WIRE, "type", "veth", "peer", "name", WIRE, "netns", str(b.pid)]
        _output([*outside, "ip", "link", "add", *ends])
        for host in (a, b):
            host.run("ip", "address", "add", f"{host.address}/30", "dev", WIRE)
            host.run("ip", "link", "set", WIRE, "up")
        yield a, b


@contextlib.contextmanager
def _host(name: str, address: str, flags: list[str], before: list[str] = []) -> Iterator[Host]:  # noqa: B006
    """One host. Leaving the block ends its keeper's input, so the keeper, so all in the host."""
    spaces = ["--net", "--pid", "--ipc", "--uts", "--mount", "--mount-proc"]
    unshare = ["unshare", *flags, *spaces, "--fork", "--kill-child"]
    keeper = subprocess.Popen(
        [*before, *unshare, "sh", "-c", _BIRTH.format(name=name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with keeper:
        said = keeper.stdout.readline() if keeper.stdout is not None else ""
        if said != "born\n":
            raise NoNamespacesError(said.strip() or "unshare failed")
        yield Host(name, address, children(keeper.pid)[-1])


def _enter(pid: int, *spaces: str) -> list[str]:
    return ["nsenter", "--target", str(pid), "--preserve-credentials", *spaces]


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def in_host(host: Host) -> list[int]:
    """The processes in a host, as numbered here."""
    space = os.readlink(f"/proc/{host.pid}/ns/pid")
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry.name}/ns/pid") == space:
                    found.append(int(entry.name))
    return found
