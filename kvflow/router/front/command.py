"""`kvflow router`: the front as a process."""

import argparse
import asyncio
import logging
import signal
import sys

from attrs import evolve

from kvflow.errors import KvflowError
from kvflow.router.front.app import make_front
from kvflow.router.front.fleet import Fleet, FleetConfig
from kvflow.server import bind, load_tokenizer, serve


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        return asyncio.run(_serve(options))
    except (KvflowError, OSError) as error:
        print(f"kvflow router: {error}", file=sys.stderr)
        return 2


async def _serve(options: argparse.Namespace) -> int:
    if not options.health_interval > 0:
        raise KvflowError(f"--health-interval = {options.health_interval}, must be above 0")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tokenizer = load_tokenizer(options.model)
    name = options.served_model_name or options.model.resolve().name
    config = evolve(FleetConfig(), health_interval_s=options.health_interval)
    fleet = Fleet(name, options.servers, config)
    with bind(options.host, options.port) as bound:
        app = make_front(fleet, tokenizer)
        async with fleet.watched(), serve(app, options.host, bound=bound) as running:
            print(f"routing {name} on {running.url} to {len(fleet.members)} servers", flush=True)
            await stop.wait()
    return 0
