"""A rank's parts: model, cache, runner, and what it serves."""

from collections.abc import Callable

import torch

from kvflow.comm import Comm
from kvflow.engine.decode import DecodeEngine
from kvflow.engine.decode.turns import follow
from kvflow.engine.decode.worker import DecodeWorker
from kvflow.engine.mailbox import Mailbox
from kvflow.engine.memory import by_request_deal
from kvflow.engine.pagedstep import PagedMemory
from kvflow.engine.ranks import serve_prefill
from kvflow.engine.runner import StepRunner
from kvflow.launch.config import LaunchConfig
from kvflow.models.glm import Glm
from kvflow.transfers.executors.base import Endpoint, RankCache

MakeEndpoint = Callable[[RankCache], Endpoint]


def prefill_rank(
    config: LaunchConfig, comm: Comm, mailbox: Mailbox, make_endpoint: MakeEndpoint
) -> tuple[Callable[[], None], Endpoint]:
    """What prefill rank ``comm.rank`` runs, and the endpoint to close afterwards."""
    model = _model(config, comm.rank, comm.size)
    layout = config.prefill_layout(model.spec)
    num_blocks = layout.num_blocks_for(config.prefill_kv_tokens)
    cache = RankCache.allocate(layout, comm.rank, num_blocks)
    endpoint = make_endpoint(cache)
    runner = StepRunner.over(model, layout, cache, comm)
    return lambda: serve_prefill(runner, num_blocks, endpoint, mailbox), endpoint


def decode_rank(
    config: LaunchConfig, comm: Comm, mailbox: Mailbox, make_endpoint: MakeEndpoint
) -> tuple[Callable[[], None], Endpoint]:
    """What rank ``comm.rank`` of a decode group runs, and the endpoint to close afterwards."""
    model = _model(config, comm.rank, comm.size)
    layout = config.decode_layout(model.spec)
    num_blocks = layout.num_blocks_for(config.decode_kv_tokens)
    cache = RankCache.allocate(layout, comm.rank, num_blocks)
    endpoint = make_endpoint(cache)
    homes = by_request_deal([(rank,) for rank in range(comm.size)])
    runner = StepRunner(model, PagedMemory(layout, cache, comm), comm, homes)
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
    )
    return engine.serve, endpoint


def _model(config: LaunchConfig, rank: int, size: int) -> Glm:
    dtype = {"float32": torch.float32, "float64": torch.float64}[config.dtype]
    return Glm.load(config.model, kv_dtype=config.kv_dtype, dtype=dtype, rank=rank, size=size)
