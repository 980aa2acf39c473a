"""The front of tests with two hosts: serves the fixture's prompts to ranks that join.

python two_hosts_front.py ADDRESS KEY_FILE RESULT TIMEOUT served|lost FLAGS...

It ends when they are served, or serves one of them again and again until a rank is lost.
"""

import asyncio
import json
import sys
from pathlib import Path

from launch_world import TINY, collect, fixture_prompts

from kvflow.errors import KvflowError
from kvflow.launch.hosts import joined_deployment, read_key
from kvflow.launch.options import parse_options


async def main(address, key_file, result, timeout, end, *flags):
    launch = parse_options(flags, default_model=TINY).launch
    key = read_key(Path(key_file))
    async with joined_deployment(launch, address, key, start_timeout=float(timeout)) as deployment:
        print("started", flush=True)
        prompts = fixture_prompts()
        if end == "lost":
            await _until_lost(deployment, prompts["p48"][0])
        served = await asyncio.gather(
            *(collect(deployment, name, ids, len(out)) for name, (ids, out) in prompts.items())
        )
        tokens = {o[0].request_id: [output.token for output in o] for o in served}
        reports = [output.transfer for o in served for output in o if output.transfer]
        hosts = {e.name: e.host for e in deployment.routing.router.engines}
        told = {"tokens": tokens, "reports": reports, "hosts": hosts}
        Path(result).write_text(json.dumps(told))


async def _until_lost(deployment, ids):
    """Serves one request after another; raises why none can be served any more."""
    while await deployment.healthy():
        try:
            await collect(deployment, "again", ids, 80)
            print("another", flush=True)
        except KvflowError as error:  # it may have met the loss before the front knew
            print(f"a request failed: {error}", flush=True)
            await asyncio.sleep(0.2)
    raise KvflowError(deployment.failure)


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KvflowError as error:
        sys.exit(f"front: {error}")
