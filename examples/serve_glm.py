"""Serve a GLM (`glm_moe_dsa`) checkpoint from two engines: prefill ranks (PCP x DCP x EP) and
decode ranks, with KV moved between them over NIXL, behind an OpenAI-compatible HTTP front.

    python examples/serve_glm.py --model DIR --pcp 4 --dcp 4 --interleave 1 --decode-ranks 2 \
        --prefill-block 16 --decode-block 64 --kv-dtype fp8 --port 8000
    python examples/serve_glm.py --preset article --config FILE

With `--demo` it sends real prompts to itself, prints a table and ends: 0 if every transferred
byte equals its source.
"""

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve

from kvflow.errors import KvflowError
from kvflow.launch.options import ServeOptions, parse_options

# Every spawned rank imports this file too, so what only the front needs is imported in `run`.

MODEL = Path(__file__).parent / "models" / "tiny-glm-python"


async def run(options: ServeOptions) -> int:
    """Serves until a signal, or until the demo is done. Returns the exit code."""
    from kvflow.launch.checks import check_launch
    from kvflow.launch.processes import process_deployment
    from kvflow.launch.threads import thread_deployment
    from kvflow.server import bind, load_tokenizer, make_app, serve

    launch = options.launch
    check_launch(launch)
    if launch.transport == "in-process":
        print("transport: in-process (threads of this process, no NIXL)", flush=True)
    world = thread_deployment if launch.transport == "in-process" else process_deployment
    print(
        f"starting {launch.prefill_size} prefill rank(s) (pcp {launch.pcp}, tp {launch.tp}, dcp "
        f"{launch.dcp}, interleave {launch.interleave}, block {launch.prefill_block}) and "
        f"{launch.decode_ranks} decode group(s) of {launch.decode_size} (block "
        f"{launch.decode_block}, drafts {launch.num_drafts}, latents "
        f"{'on the host' if launch.hisparse else 'in pages'}), kv {launch.kv_dtype}",
        flush=True,
    )
    tokenizer = load_tokenizer(launch.model)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        bound = stack.enter_context(bind(options.server.host, options.server.port))
        entering = asyncio.ensure_future(stack.enter_async_context(world(launch)))
        if not await _unless(stop, entering):
            return 130
        engine = entering.result()
        app = make_app(engine, tokenizer)
        server = await stack.enter_async_context(serve(app, options.server.host, bound=bound))
        print(f"serving {engine.model_name} on {server.url}", flush=True)
        if not options.demo:
            await stop.wait()
            return 0
        from demo_client import run_demo  # lies beside this file

        demo = asyncio.ensure_future(run_demo(server.url, engine.model_name, launch))
        if not await _unless(stop, demo):
            return 130
        engine.prefill.audit()
        print("\n".join(decode_summary(engine.counters)), flush=True)
        return demo.result()
    return 0


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


async def _unless(stop: asyncio.Event, work: "asyncio.Future[object]") -> bool:
    """Waits for `work`; False if `stop` came first, and then the work is cancelled."""
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait([stopped, work], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if work.done():
        work.result()  # an error of the work is raised here
        return True
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return False


def main(argv: Sequence[str]) -> int:
    """The program."""
    try:
        options = parse_options(argv, default_model=MODEL)
        if options.print_config:
            print(options.as_toml())
            return 0
        if options.demo:
            options = evolve(options, launch=evolve(options.launch, verify_transfers=True), port=0)
        return asyncio.run(run(options))
    except (KvflowError, OSError) as error:
        print(f"serve_glm: {error}", file=sys.stderr)
        return 1
    finally:
        gc.freeze()  # the process ends: a last walk over all that was imported takes seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
