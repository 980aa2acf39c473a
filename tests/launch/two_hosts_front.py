"""The front of tests with two hosts: serves the fixture's prompts to ranks that join.

python two_hosts_front.py ADDRESS KEY_FILE RESULT TIMEOUT served|lost FLAGS...

It ends when they are served, or goes on with a long request until that fails.
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
            while True:
                await collect(deployment, "endless", prompts["p48"][0], 80)
                print("another", flush=True)
        served = await asyncio.gather(
            *(collect(deployment, name, ids, len(out)) for name, (ids, out) in prompts.items())
        )
        tokens = {o[0].request_id: [output.token for output in o] for o in served}
        reports = [output.transfer for o in served for output in o if output.transfer]
        Path(result).write_text(json.dumps({"tokens": tokens, "reports": reports}))


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KvflowError as error:
        sys.exit(f"front: {error}")
