"""A deployment over two hosts, started as docs/multi-node.md says, and what UCX logs of it."""

import json
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

from launch_world import TINY
from netns import WIRE, in_host

HERE = Path(__file__).parent
_TORCHRUN = {"torch.distributed.run", "--nproc-per-node"}
FRONT_PORT, STORE_PORT = 5555, 29500
FRONT = str(HERE / "two_hosts_front.py")
SIZES = "--max-model-len 512 --prefill-kv-tokens 1024 --decode-kv-tokens 1024"
FLAGS = f"--model {TINY} --kv-dtype float32 --max-num-batched-tokens 64 --verify-transfers {SIZES}"


class World:
    """Programs in hosts `a` and `b`. The front runs in `a`; each program writes a log."""

    def __init__(self, hosts, scratch, flags):
        (self.a, self.b), self.scratch = hosts, scratch
        self.flags = [*FLAGS.split(), *flags.split()]
        self.front_address = f"tcp://{self.a.address}:{FRONT_PORT}"
        self.programs, self.num_groups = {}, 0
        self.key = scratch / "key"
        self.key.write_bytes(secrets.token_bytes(32))
        self.result = scratch / "result.json"

    def start(self, host, name, *words, **environ):
        self.start_words(host, name, sys.executable, *words, **environ)

    def start_words(self, host, name, *words, **environ):
        env = {n: v for n, v in os.environ.items() if not n.startswith(("UCX_", "GLOO_"))}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environ
        env["PYTHONPATH"] = os.pathsep.join([str(HERE), env.get("PYTHONPATH", "")])
        with self.log(name).open("w") as log:
            self.programs[name] = subprocess.Popen(
                host.command(*words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self.scratch,
                start_new_session=True,
            )

    def start_front(self, *, until="served", timeout=180):
        words = [FRONT, self.front_address, str(self.key)]
        self.start(self.a, "front", *words, str(self.result), str(timeout), until, *self.flags)

    def start_engine(self, engine, hosts, *extra, per_host=1):
        """`per_host` ranks in each of the hosts, under torchrun unless there is one rank alone."""
        node = [*self.node(engine), *extra]
        log = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
        if len(hosts) * per_host == 1:
            self.start(hosts[0], engine, *node, **log)
            return
        run = ["-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--master-addr"]
        run += [hosts[0].address, "--master-port", str(STORE_PORT + self.num_groups)]
        run += ["--nproc-per-node", str(per_host), "--log-dir", str(self.scratch)]
        self.num_groups += 1
        for rank, host in enumerate(hosts):
            self.start(host, f"{engine}@{rank}", *run, "--node-rank", str(rank), *node, **log)

    def node(self, engine):
        """Python's words that start one rank of an engine."""
        front = ["--front", self.front_address, "--key-file", str(self.key)]
        return ["-m", "kvflow.launch.node", *front, "--engine", engine, *self.flags]

    def log(self, name):
        return self.scratch / f"{name}.log"

    def logs(self):
        return "\n".join(f"--- {n}\n{self.log(n).read_text()[-6000:]}" for n in self.programs)

    def wait(self, seconds=240):
        """The exit status of every program, once all have ended."""
        end = time.monotonic() + seconds
        while any(program.poll() is None for program in self.programs.values()):
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)
        return {name: program.returncode for name, program in self.programs.items()}

    def wait_for(self, name, text, seconds=180):
        """Until a program has written `text`."""
        end = time.monotonic() + seconds
        while text not in self.log(name).read_text():
            assert self.programs[name].poll() is None, self.logs()
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def served(self):
        return json.loads(self.result.read_text())

    def left(self):
        """Processes of a host besides its first one."""
        return {h.name: [pid for pid in in_host(h) if pid != h.pid] for h in (self.a, self.b)}

    def find(self, host, word):
        """The one process in a host, as numbered here, that `word` is an argument of the command
        line of; torchrun's own do not count."""
        words = {pid: words_of(pid) for pid in in_host(host)}
        found = [p for p, w in words.items() if word in w and not _TORCHRUN & set(w)]
        assert len(found) == 1, (found, self.logs())
        return found[0]

    def end(self):
        for program in self.programs.values():
            if program.poll() is None:
                program.kill()
            program.wait(20)


def words_of(pid):
    """The command line of a process; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


_PEER = re.compile(r"\| \S+ (self|inter-node|intra-node) cfg#\d+ +\|")
_WORK = re.compile(r"\| (remote memory \w+|active message) by ")
_ROW = re.compile(r"\| *\d\S* *\| [^|]+ \| ([^|]+?) *\|")


def transports(log):
    """What UCX chose, as its tables of protocols say: transports by peer ("inter-node",
    "intra-node") and kind of work ("remote memory read", "active message", ...)."""
    found, peer, work = {}, None, None
    for line in log.splitlines():
        if at := _PEER.search(line):
            peer, work = at[1], None
        elif at := _WORK.search(line):
            work = at[1]
        elif (at := _ROW.search(line)) and peer and work:
            found.setdefault((peer, work), set()).add(at[1])
    return found


TCP = {f"tcp/{WIRE}"}
