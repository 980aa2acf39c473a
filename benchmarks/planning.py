"""What it costs to plan and verify a long request, as a share of a memcpy of the bytes it plans.

    python benchmarks/planning.py [--tokens N] [--rounds R]

Each case derives the plan of a GLM-5.3 request (101 components, 54,728 bytes a token, blocks of 64)
and proves it: two bindings whose block tables are random permutations, and the verification of the
plan against them. The memcpy is of reused, touched 1 GiB buffers on one thread, scaled by bytes,
and takes turns with the cases; times are of the process (CPU). The second table plans the same
request for models of other depths: what planning holds in memory must not grow with layers.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from measure import GIB, Memcpy, in_turns, load, ratio

from kvflow.layouts.chunks import BalancedChunks
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin, Sharding
from kvflow.layouts.spec import GLM_5_3, KVCacheSpec
from kvflow.transfers.lower import BoundPlan
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer

Pair = tuple[KVLayout, KVLayout]


def layout(sharding: Sharding, block_size: int, layers: int = 78) -> KVLayout:
    spec = KVCacheSpec.from_config(dict(GLM_5_3, num_hidden_layers=layers))
    return KVLayout.uniform(spec, Placement.simple(sharding), Paged(block_size))


def folded(pcp: int, dcp: int, interleave: int, block_size: int) -> KVLayout:
    """DCP over the ranks of PCP, as the prefill engine has it."""
    spec = KVCacheSpec.from_config(GLM_5_3)
    mesh = Mesh((Axis("pcp", pcp), Axis("dcp", dcp, over=("pcp",))))
    placement = mesh.place(RoundRobin(dcp, interleave), "dcp")
    return KVLayout.uniform(spec, placement, Paged(block_size))


def cases(tokens: int) -> dict[str, tuple[float, Pair]]:
    """Name -> (target in percent of the memcpy, layouts)."""

    def dealt(num_ranks: int, interleave: int) -> KVLayout:
        return layout(RoundRobin(num_ranks, interleave), 64)

    one, chunked = layout(Replicated(), 64), layout(BalancedChunks(8, 0, tokens), 64)
    return {
        "DCP8 I=64 -> one rank": (1, (dealt(8, 64), one)),
        "PCP8xDCP8 I=64 -> one rank": (1, (folded(8, 8, 64, 64), one)),
        "DCP8 I=64 -> DCP4 I=64": (1, (dealt(8, 64), dealt(4, 64))),
        "balanced chunks of 8 -> DCP8 I=64": (1, (chunked, dealt(8, 64))),
        "DCP8 I=1 -> one rank": (5, (dealt(8, 1), one)),
        "PCP8xDCP8 I=1 -> one rank": (5, (folded(8, 8, 1, 64), one)),
        "DCP8 I=1 -> DCP6 I=1": (5, (dealt(8, 1), dealt(6, 1))),
        "DCP8 I=1 -> one rank, B 16 -> 64": (5, (layout(RoundRobin(8, 1), 16), one)),
    }


def tables(side: KVLayout, tokens: int, seed: int) -> Callable[[], Binding]:
    """Makes the binding of a request that fills its pool in random order."""
    num = side.num_blocks_for(tokens)
    rng = np.random.default_rng(seed)
    ids = {group: rng.permutation(n) for group, n in num.items()}
    return lambda: Binding.of(side, ids, num, tokens)


def planned(pair: Pair, tokens: int) -> tuple[Callable[[], Plan], Callable[[], BoundPlan], Plan]:
    """Planning, binding and proving the plan, and the plan."""
    src, dst = pair
    here, there = tables(src, tokens, 1), tables(dst, tokens, 2)
    plan = plan_transfer(src, dst, (0, tokens))
    return (
        lambda: plan_transfer(src, dst, (0, tokens)),
        lambda: BoundPlan(plan, here(), there()),
        plan,
    )


def time_table(tokens: int, rounds: int) -> None:
    memcpy = Memcpy(GIB)
    calls: dict[str, Callable[[], object]] = {"memcpy": memcpy}
    plans = {}
    for name, (_, pair) in cases(tokens).items():
        calls[f"plan {name}"], calls[f"prove {name}"], plans[name] = planned(pair, tokens)
    seconds = in_turns(calls, rounds, time.process_time)
    gib = min(seconds["memcpy"])
    print(f"memcpy of 1 GiB: best {gib * 1e3:.0f} ms")
    print(f"{'case':36} {'runs':>8} {'plan ms':>8} {'prove ms':>9} {'% memcpy':>9} {'target':>7}")
    for name, (target, _) in cases(tokens).items():
        scale = plans[name].nbytes / GIB
        both = [ratio(seconds, f"{verb} {name}", "memcpy") for verb in ("plan", "prove")]
        ms = [sorted(seconds[f"{verb} {name}"])[rounds // 2] * 1e3 for verb in ("plan", "prove")]
        print(
            f"{name:36} {plans[name].num_runs:8} {ms[0]:8.1f} {ms[1]:9.1f} "
            f"{sum(both) / scale * 100:9.2f} {target:6} %"
        )


def memory_table(tokens: int) -> None:
    print(f"\n{'main layers':>11} {'components':>10} {'plan holds MiB':>15} {'peak MiB':>9}")
    for layers in (1, 26, 78, 156):
        pair = layout(RoundRobin(8, 1), 64, layers), layout(Replicated(), 64, layers)
        bindings = tables(pair[0], tokens, 1)(), tables(pair[1], tokens, 2)()
        tracemalloc.start()
        bound = BoundPlan(plan_transfer(*pair, (0, tokens)), *bindings)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        num = len(bound.plan.src.spec.components)
        print(f"{layers:11} {num:10} {held / 2**20:15.2f} {peak / 2**20:9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.tokens < 1 or args.rounds < 1:
        parser.error(f"--tokens {args.tokens} and --rounds {args.rounds} must be at least 1")
    print(f"{args.tokens} tokens, 1 thread, median of {args.rounds} rounds, {load()}")
    time_table(args.tokens, args.rounds)
    memory_table(args.tokens)


if __name__ == "__main__":
    main()
