"""Serve a GLM (`glm_moe_dsa`) checkpoint from two engines: prefill ranks (PCP x DCP x EP) and
decode ranks, with KV moved between them over NIXL, behind an OpenAI-compatible HTTP front.

    python examples/serve_glm.py --model DIR --pcp 4 --dcp 4 --interleave 1 --decode-ranks 2 \
        --prefill-block 16 --decode-block 64 --kv-dtype fp8 --port 8000
    python examples/serve_glm.py --preset article --config FILE
    python examples/serve_glm.py --listen tcp://192.0.2.1:5555 --key-file KEY  # docs/multi-node.md

With `--demo` it sends real prompts to itself, prints a table and ends: 0 if every transferred
byte equals its source. With `--session FILE` it plays an agent session, without HTTP, and ends: 0
if, besides, one rank alone computes the same tokens and no pool has lost a block.
"""

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from attrs import evolve

from kvflow.errors import KvflowError
from kvflow.launch.options import ServeOptions, parse_options

if TYPE_CHECKING:
    from kvflow.engine.deployment import Deployment

T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""For many ranks on few cores; a rank that ends is seen at once."""

# Every rank imports this file too, so what only the front needs is imported in `run`.

MODEL = Path(__file__).parent / "models" / "tiny-glm-python"


class _Stopped(Exception):  # noqa: N818
    """A signal came while something else was waited for."""


async def run(options: ServeOptions) -> int:
    """Serves until a signal, or until the demo or session is done. Returns the exit code."""
    from kvflow.launch.checks import check_launch

    launch = options.launch
    check_launch(launch)
    if launch.transport == "in-process":
        print("transport: in-process (threads of this process, no NIXL)", flush=True)
    print(
        f"starting {launch.prefill_engines} prefill engine(s) of {launch.prefill_size} (pcp "
        f"{launch.pcp}, tp {launch.tp}, dcp {launch.dcp}, interleave {launch.interleave}, block "
        f"{launch.prefill_block}) and "
        f"{launch.decode_ranks} decode group(s) of {launch.decode_size} (block "
        f"{launch.decode_block}, drafts {launch.num_drafts}, latents "
        f"{'on the host' if launch.hisparse else 'in pages'}), kv {launch.kv_dtype}",
        flush=True,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with contextlib.suppress(_Stopped):
        return await (_play if options.session is not None else _serve)(options, stop)
    return 130


async def _serve(options: ServeOptions, stop: asyncio.Event) -> int:
    from kvflow.server import bind, load_tokenizer, make_app, serve

    launch, host = options.launch, options.server.host
    tokenizer = load_tokenizer(launch.model)
    async with contextlib.AsyncExitStack() as stack:
        bound = stack.enter_context(bind(host, options.server.port))
        engine = await _unless(stop, stack.enter_async_context(_world(options)))
        server = await stack.enter_async_context(
            serve(make_app(engine, tokenizer), host, bound=bound)
        )
        print(f"serving {engine.model_name} on {server.url}", flush=True)
        if not options.demo:
            await stop.wait()
            return 0
        from demo_client import run_demo  # lies beside this file

        code = await _unless(stop, run_demo(server.url, engine.model_name, launch))
        _sum_up(engine)
        return code


async def _play(options: ServeOptions, stop: asyncio.Event) -> int:
    from agent_session import check_session, run_session  # these lie beside this file
    from session_turns import load_session

    from kvflow.server import load_tokenizer

    launch = options.launch
    session = load_session(options.session, launch, load_tokenizer(launch.model))
    async with contextlib.AsyncExitStack() as stack:
        engine = await _unless(stop, stack.enter_async_context(_world(options)))
        played, clean = await _unless(stop, run_session(engine, launch, session))
        _sum_up(engine)
    same = await _unless(stop, check_session(launch, session, played))
    return 0 if clean and same else 1


def _world(options: ServeOptions) -> "contextlib.AbstractAsyncContextManager[Deployment]":
    from kvflow.launch.processes import process_deployment
    from kvflow.launch.threads import thread_deployment

    launch = options.launch
    if options.listen is not None and options.key_file is not None:
        from kvflow.launch.hosts import joined_deployment, read_key

        print(f"waiting for its ranks at {options.listen}", flush=True)
        return joined_deployment(launch, options.listen, read_key(options.key_file))
    if launch.transport == "in-process":
        return thread_deployment(launch)
    return process_deployment(launch, start_timeout=START_TIMEOUT_S)


def _sum_up(engine: "Deployment") -> None:
    """Audits the pools and says what decode groups did."""
    for prefill in engine.prefills.values():
        prefill.audit()
    print("\n".join(decode_summary(engine.counters)), flush=True)


def decode_summary(counters: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each decode group that has done anything."""
    lines = []
    for name, n in sorted(counters.items()):
        if n.get("spec_steps"):
            line = f"{name}: {n['spec_emitted_tokens'] / n['spec_steps']:.2f} tokens a target step"
            if seen := n.get("hisparse_hits", 0) + n.get("hisparse_misses", 0):
                line += f", {n['hisparse_hits'] / seen:.1%} of selected host rows were hot"
            lines.append(line)
    return lines


async def _unless(stop: asyncio.Event, work: "Coroutine[None, None, T]") -> "T":
    """What `work` returns; raises `_Stopped` if `stop` came first, and then it is cancelled."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait([stopped, task], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    raise _Stopped


def main(argv: Sequence[str]) -> int:
    """The program."""
    try:
        options = parse_options(argv, default_model=MODEL)
        if options.print_config:
            print(options.as_toml())
            return 0
        if options.demo or options.session:
            launch = evolve(options.launch, verify_transfers=True)
            options = evolve(options, launch=launch, server=evolve(options.server, port=0))
        return asyncio.run(run(options))
    except (KvflowError, OSError) as error:
        print(f"serve_glm: {error}", file=sys.stderr)
        return 1
    finally:
        gc.freeze()  # the process ends: a last walk over all that was imported takes seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
