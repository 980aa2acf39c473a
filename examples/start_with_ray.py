"""Starts the ranks of a deployment on a Ray cluster, for a front that waits for them
(docs/multi-node.md). Needs Ray, and this checkout, the model and the key on every host.

    python examples/start_with_ray.py --front tcp://192.0.2.1:5555 --key-file KEY --per-host 8 \
        --model DIR --pcp 16 --dcp 16 --decode-ranks 8

Every flag but --per-host and --ray-address goes to the ranks. It ends with them: 0 if all ended
well, which they do when their front ends.
"""

import argparse
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MODEL = Path(__file__).parent / "models" / "tiny-glm-python"


def torchrun(size: int, per_host: int) -> tuple[int, int]:
    """Hosts of an engine of `size` ranks, and ranks on each. Raises `ValueError` if hosts of
    `per_host` ranks cannot be filled."""
    ranks = min(size, per_host)
    if size % ranks:
        raise ValueError(f"{size} ranks fill no hosts of {ranks}: --per-host must divide them")
    return size // ranks, ranks


def command(
    rank: int, hosts: int, ranks: int, address: str, port: int, engine: str, flags: Sequence[str]
) -> list[str]:
    """What runs on host `rank` of an engine."""
    run = ["-m", "torch.distributed.run", "--nnodes", str(hosts), "--nproc-per-node", str(ranks)]
    run += ["--node-rank", str(rank), "--master-addr", address, "--master-port", str(port)]
    return [sys.executable, *run, "-m", "kvflow.launch.node", "--engine", engine, *flags]


class Seat:
    """An actor: one engine's place on one host."""

    def meeting(self) -> tuple[str, int]:
        """The address of this host, and a port that is free on it."""
        import ray

        with socket.create_server(("", 0)) as server:
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def run(self, words: list[str]) -> int:
        return subprocess.run(words).returncode


def main(argv: Sequence[str]) -> int:
    """The program. Returns its exit status."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from kvflow.launch.hosts import engine_ranks
    from kvflow.launch.node import node_parser
    from kvflow.launch.options import parse_options

    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--per-host", type=int, required=True, help="most ranks of an engine there")
    parser.add_argument("--ray-address", help="of the cluster; none: one on this machine alone")
    own, flags = parser.parse_known_args(argv)
    of_deployment = node_parser().parse_known_args([*flags, "--engine", "any"])[1]
    engines = engine_ranks(parse_options(of_deployment, default_model=MODEL).launch)
    ray.init(own.ray_address)
    running = []
    for engine, names in engines.items():
        hosts, ranks = torchrun(len(names), own.per_host)
        group = placement_group([{"CPU": ranks}] * hosts, strategy="SPREAD")
        seats = []
        for bundle in range(hosts):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            seat = ray.remote(num_cpus=ranks)(Seat).options(scheduling_strategy=where)
            seats.append(seat.remote())
        meeting = ray.get(seats[0].meeting.remote())
        running += [
            seat.run.remote(command(rank, hosts, ranks, *meeting, engine, flags))
            for rank, seat in enumerate(seats)
        ]
    return max(ray.get(running))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
