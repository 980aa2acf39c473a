"""Every option of a deployment with every other: the factors, their rules, and a row as a scene.

The value "-" stands where an option can do nothing, as the interleave of a cache that is not
sharded; so each pair of two other values is met where both of them act.
"""

import functools

import numpy as np
from attrs import evolve
from engine_scenes import UNIT_NBYTES, VOCAB, Arrival, Scene
from engine_world import config, reference_model

from kvflow.engine.access import AccessOptions
from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.hisparse import HiSparseBytes
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.testing import covering_rows

MAX_LEN = 64
NONE = "-"

FACTORS = {
    # the prefill engine
    "pcp": (1, 2, 3, 4),
    "tp": (1, 2, 4),
    "dcp": ("1", "part", "all"),  # of the pcp x tp ranks
    "interleave": (NONE, 1, 4, "block"),
    "prefill_block": (3, 7, 16),
    "prefill_kv": ("tight", "ample"),
    "max_num_batched_tokens": (11, 128),
    "attention": (NONE, "auto", "whole", "union", "queries"),
    "index": (NONE, "keys", "queries"),
    "workspace": (NONE, 16, "whole"),
    "overlap": (NONE, False, True),
    "prefill_engines": (1, 2),
    # the decode engine
    "decode_ranks": (1, 2),
    "decode_tp": (1, 2, 4),
    "decode_dcp": (1, 2, 3, 4),
    "decode_interleave": (NONE, 1, 4, "block"),
    "decode_block": (4, 7, 16),
    "decode_kv": ("tight", "ample"),
    "decode_attention": (NONE, "auto", "whole", "union", "queries"),
    "decode_index": (NONE, "keys", "queries"),
    "decode_workspace": (NONE, 16, "whole"),
    "decode_overlap": (NONE, False, True),
    "max_num_seqs": (1, 4),
    "num_drafts": (0, 1, 3),
    "hisparse": ("off", "on", "capped"),
    # both, and between them
    "kv_dtype": ("fp8", "float64"),
    "prefix": ("off", "device", "host", "disk"),
    "hit_block": (NONE, "block", 4),
    "transfer": ("pull", "push"),
    "streaming": ("off", "steps", "layers"),
    "loans": (NONE, False, True),
    "local_prefill_tokens": (0, 9),
}


def part_of(size):
    """A number of shards between 1 and `size` that divides it; None if there is none."""
    return next((d for d in range(2, size) if size % d == 0), None)


def dcp_of(pcp, tp, dcp):
    return {"1": 1, "part": part_of(pcp * tp), "all": pcp * tp}[dcp]


def _needs(name, other):
    """Whether two factors are both absent or both there."""
    return (name == NONE) == other


RULES = [
    lambda pcp, tp: pcp * tp <= 8,
    lambda pcp, tp, prefill_engines: pcp * tp * prefill_engines <= 8,
    lambda pcp, tp, dcp: dcp == "1" or (dcp_of(pcp, tp, dcp) or 1) > 1,
    lambda dcp, interleave: _needs(interleave, dcp == "1"),
    lambda dcp, attention: _needs(attention, dcp == "1"),
    lambda dcp, index: _needs(index, dcp == "1"),
    lambda dcp, workspace: _needs(workspace, dcp == "1"),
    lambda dcp, overlap: _needs(overlap, dcp == "1"),
    # one divides the other: they share ranks
    lambda decode_tp, decode_dcp: max(decode_tp, decode_dcp) % min(decode_tp, decode_dcp) == 0,
    lambda decode_dcp, decode_interleave: _needs(decode_interleave, decode_dcp == 1),
    lambda decode_dcp, decode_attention: _needs(decode_attention, decode_dcp == 1),
    lambda decode_dcp, decode_index: _needs(decode_index, decode_dcp == 1),
    lambda decode_dcp, decode_workspace: _needs(decode_workspace, decode_dcp == 1),
    lambda decode_dcp, decode_overlap: _needs(decode_overlap, decode_dcp == 1),
    lambda prefix, hit_block: _needs(hit_block, prefix == "off"),
    lambda prefix, loans: _needs(loans, prefix == "off"),
]


@functools.cache
def covering():
    """The rows of the matrix."""
    return covering_rows(FACTORS, RULES)


def scene(row, directory):
    """The row, with the same conversations in each; `directory` is for a disk tier."""
    launch = launch_of(row, directory)
    stored_by = None
    if row["prefix"] == "disk":
        prefix = evolve(launch.prefix, block_size=launch.unit_size)
        other = {"pcp": 3, "dcp": 3, "interleave": 2, "prefill_block": 5, "prefix": prefix}
        stored_by = config(**other, **_common(row))
    return Scene(launch, conversations(), stored_by, right_of_8=5 if row["num_drafts"] else None)


def _common(row):
    return {"kv_dtype": row["kv_dtype"], "dtype": "float64", "max_model_len": MAX_LEN}


def launch_of(row, directory):
    """The configuration that a row stands for."""
    sizes = {"tight": MAX_LEN, "ample": 3 * MAX_LEN}
    same = ("pcp", "tp", "prefill_block", "max_num_batched_tokens", "prefill_engines")
    same += ("decode_ranks", "decode_tp", "decode_dcp", "decode_block", "max_num_seqs")
    same += ("num_drafts", "transfer", "local_prefill_tokens")
    launch = config(
        **{name: row[name] for name in same},
        dcp=dcp_of(row["pcp"], row["tp"], row["dcp"]),
        interleave=_interleave(row["interleave"], row["prefill_block"]),
        access=_access(row, ""),
        prefill_kv_tokens=sizes[row["prefill_kv"]],
        decode_interleave=_interleave(row["decode_interleave"], row["decode_block"]),
        decode_access=_access(row, "decode_"),
        decode_kv_tokens=sizes[row["decode_kv"]],
        hisparse=row["hisparse"] != "off",
        streaming=row["streaming"] != "off",
        stream_layers=2 if row["streaming"] == "layers" else 0,
        loans=row["loans"] in (NONE, True),
        prefix=_prefix(row, directory),
        **_common(row),
    )
    return _capped(launch) if row["hisparse"] == "capped" else launch


def _interleave(value, block_size):
    return {NONE: 1, "block": block_size}.get(value, value)


def _access(row, side):
    attention, index, workspace, overlap = (
        row[side + name] for name in ("attention", "index", "workspace", "overlap")
    )
    if attention == NONE:
        return AccessOptions()
    return AccessOptions(attention, index, 1 << 18 if workspace == "whole" else workspace, overlap)


def _prefix(row, directory):
    if row["prefix"] == "off":
        return PrefixConfig(enabled=False)
    block_size = None if row["hit_block"] == "block" else row["hit_block"]
    if row["prefix"] == "device":
        return PrefixConfig(block_size=block_size)
    host = 30 * UNIT_NBYTES
    if row["prefix"] == "host":
        return PrefixConfig(block_size=block_size, host_nbytes=host)
    return PrefixConfig(True, block_size, host, directory, 60 * UNIT_NBYTES)


def _capped(launch):
    """The least that the device can be given for the latent rows of HiSparse."""
    model = reference_model(launch.kv_dtype, "float64")
    layout = launch.decode_layout(model.spec)
    blocks = layout.num_blocks_for(launch.decode_kv_tokens)
    sizes = launch.hisparse_sizes(model.config.index_topk)
    nbytes = HiSparseBytes.of(layout, blocks, sizes).latent_pool
    return evolve(launch, hisparse_device_nbytes=nbytes)


def _words(seed, count):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, count).tolist())


def conversations():
    """Three turns. `a` and `b` begin alike and are longer than a step of 11 tokens, `b` and what
    follows it are drawn by chance, the client of `c` leaves, `d` is another tenant's, and `a` is
    asked once more."""
    stem = _words(1, 29)
    chance = SamplingParams(5, 1.0, 0.9, 11, ignore_eos=True, num_logprobs=3)
    a = Arrival(Request("a", stem, _greedy(5)))
    b = Arrival(Request("b", stem[:20] + _words(2, 7), chance))
    c = Arrival(Request("c", _words(3, 3), _greedy(5)), cancel_after=2)
    a2 = Arrival(Request("a2", _words(4, 5), _greedy(4)), follows=a)
    b2 = Arrival(Request("b2", _words(5, 9), chance), stop_at=3, follows=b)
    c2 = Arrival(Request("c2", _words(6, 18), _greedy(2)), follows=c)
    d = Arrival(Request("d", stem[:22], _greedy(2), "another tenant"))
    a3 = Arrival(Request("a3", _words(7, 4), _greedy(3)), follows=a2)
    again = Arrival(Request("a again", stem, _greedy(3)))
    return (a, b, c), (a2, b2, c2, d), (a3, again)


def _greedy(max_tokens):
    return SamplingParams(max_tokens, temperature=0, ignore_eos=True)
