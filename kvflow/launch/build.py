"""A rank's parts: model, cache, runner, and what it serves."""

from collections.abc import Callable, Mapping, Sequence

import torch

from kvflow.comm import Comm, LocalComm
from kvflow.comm.subgroup import SubComm
from kvflow.engine.access import PagedMemory
from kvflow.engine.decode import DecodeEngine
from kvflow.engine.decode.turns import follow
from kvflow.engine.decode.worker import DecodeWorker
from kvflow.engine.hisparse import HiSparseMemory
from kvflow.engine.mailbox import Mailbox
from kvflow.engine.memory import KVMemory, balanced_deal, by_request_deal
from kvflow.engine.moves import Mover
from kvflow.engine.prefill.rank import serve_prefill
from kvflow.engine.runner import StepRunner
from kvflow.launch.config import LaunchConfig
from kvflow.layouts.layout import KVLayout
from kvflow.models.glm import Glm
from kvflow.transfers.executors.base import RankCache, TwoWayEndpoint

MakeEndpoint = Callable[[RankCache], TwoWayEndpoint]
MakeRank = Callable[
    [LaunchConfig, Comm, Mailbox, MakeEndpoint], tuple[Callable[[], None], TwoWayEndpoint]
]


def prefill_rank(
    config: LaunchConfig, comm: Comm, mailbox: Mailbox, make_endpoint: MakeEndpoint
) -> tuple[Callable[[], None], TwoWayEndpoint]:
    """What prefill rank ``comm.rank`` runs, and the endpoint to close afterwards."""
    tp = _siblings(comm, config.prefill_homes)
    model = _model(config, comm, tp)
    layout = config.prefill_layout(model.spec)
    num_blocks = layout.num_blocks_for(config.prefill_kv_tokens)
    cache = RankCache.allocate(layout, comm.rank, num_blocks)
    endpoint = make_endpoint(cache)
    memory = PagedMemory(layout, cache, comm, config.access)
    runner = StepRunner(model, memory, comm, balanced_deal(config.prefill_homes), tp)
    verify = config.verify_transfers
    mover = Mover(layout, cache.rank, num_blocks, endpoint, verify=verify)
    return lambda: serve_prefill(runner, mover, mailbox, config.stream_layers), endpoint


def decode_rank(
    config: LaunchConfig, comm: Comm, mailbox: Mailbox, make_endpoint: MakeEndpoint
) -> tuple[Callable[[], None], TwoWayEndpoint]:
    """What rank ``comm.rank`` of a decode group runs, and the endpoint to close afterwards."""
    tp = _siblings(comm, config.decode_homes)
    model = _model(config, comm, tp)
    layout = config.decode_layout(model.spec)
    num_blocks = layout.num_blocks_for(config.decode_kv_tokens)
    memory = _decode_memory(config, model, layout, num_blocks, comm)
    endpoint = make_endpoint(memory.cache)
    runner = StepRunner(model, memory, comm, by_request_deal(config.decode_homes), tp)
    worker = DecodeWorker(runner, num_blocks, endpoint, verify_transfers=config.verify_transfers)
    if comm.rank:
        return lambda: follow(worker, comm), endpoint
    engine = DecodeEngine(
        worker,
        mailbox,
        config.eos_ids(),
        comm,
        max_batch=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_drafts=config.num_drafts,
        prefix=config.decode_prefix,
        push=config.transfer == "push",
    )
    return engine.serve, endpoint


def _decode_memory(
    config: LaunchConfig, model: Glm, layout: KVLayout, num_blocks: Mapping[str, int], comm: Comm
) -> KVMemory:
    if not config.hisparse:
        cache = RankCache.allocate(layout, comm.rank, num_blocks)
        return PagedMemory(layout, cache, comm, config.decode_access)
    sizes = config.hisparse_sizes(model.config.index_topk)
    return HiSparseMemory.allocate(layout, comm, num_blocks, sizes, options=config.decode_access)


def _siblings(comm: Comm, homes: Sequence[tuple[int, ...]]) -> Comm:
    """The ranks that compute the same tokens as this one, for other heads."""
    mine = next(home for home in homes if comm.rank in home)
    return SubComm(comm, mine) if len(mine) > 1 else LocalComm()


def _model(config: LaunchConfig, comm: Comm, tp: Comm) -> Glm:
    dtype = {"float32": torch.float32, "float64": torch.float64}[config.dtype]
    return Glm.load(
        config.model,
        kv_dtype=config.kv_dtype,
        dtype=dtype,
        rank=comm.rank,
        size=comm.size,
        tp_rank=tp.rank,
        tp_size=tp.size,
    )
