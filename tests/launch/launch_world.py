"""What the launch tests share: the fixture model with a tokenizer, what a deployment leaves behind,
and a server started as a user starts it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import tokenizers
from tokenizers import models, pre_tokenizers

from kvflow.engine.api import Request, SamplingParams
from kvflow.launch.config import LaunchConfig

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "tests" / "fixtures" / "tiny_glm_scaled"
SERVE = ROOT / "examples" / "serve_glm.py"


def fixture_prompts():
    prompts = json.loads((TINY / "reference.json").read_text())["prompts"]
    return {name: (tuple(p["ids"]), list(p["greedy"])) for name, p in prompts.items()}


def config(**changes):
    sizes = {"max_model_len": 512, "prefill_kv_tokens": 1024, "decode_kv_tokens": 1024}
    values = {"kv_dtype": "float32", "max_num_batched_tokens": 64, "verify_transfers": True}
    return LaunchConfig(TINY, **(values | sizes | changes))


def greedy(max_tokens):
    return SamplingParams(max_tokens, temperature=0, ignore_eos=True)


async def collect(deployment, name, ids, max_tokens):
    one = Request(name, ids, greedy(max_tokens))
    return [output async for output in deployment.generate(one)]


async def until(holds, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


def children(pid):
    """Process ids of all descendants that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            state, parent = text.rsplit(")", 1)[1].split()[:2]
            if int(parent) == pid and state != "Z":
                child = int(stat.parent.name)
                found += [child, *children(child)]
    return found


def ranks_of(pid):
    """Descendants that are ranks: spawned, or forked from Python's fork server."""
    words = {child: _command_line(child) for child in children(pid)}
    forked = {child for child, said in words.items() if b"multiprocessing.forkserver" in said}
    spawned = {child for child, said in words.items() if b"spawn_main" in said}
    return [*spawned, *(rank for server in forked for rank in children(server) if rank in forked)]


def _command_line(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def model_with_tokenizer(directory):
    """The fixture model and a byte tokenizer whose 256 ids the model knows."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(TINY / name, directory / name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


class Server:
    """examples/serve_glm.py in a process of its own, with its own place for temporary files."""

    def __init__(self, model, scratch, log, *flags, path=()):
        self.scratch, self.shm = scratch, set(os.listdir("/dev/shm"))
        env = os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
        env["PYTHONPATH"] = os.pathsep.join(map(str, path))
        sizes = [
            "--max-model-len",
            "256",
            "--prefill-kv-tokens",
            "512",
            "--decode-kv-tokens",
            "512",
        ]
        command = [sys.executable, str(SERVE), "--model", str(model), "--port", "0", *sizes, *flags]
        self.log = log
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # a signal meant for the server does not reach the tests
            )

    def output(self):
        return self.log.read_text()

    def url(self, seconds=120.0):
        """Waits until it serves."""
        end = time.monotonic() + seconds
        while "serving " not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)
        return self.output().split(" on ")[1].split()[0]

    def wait(self, seconds):
        return self.process.wait(seconds)

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def leftovers(self):
        """Temporary files and shared memory that were not there before."""
        return [p.name for p in self.scratch.iterdir()] + sorted(
            set(os.listdir("/dev/shm")) - self.shm
        )

    def end(self):
        for pid in [*children(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def complete(url, **body):
    return httpx.post(
        f"{url}/v1/completions", json={"max_tokens": 8, "temperature": 0} | body, timeout=60
    )
