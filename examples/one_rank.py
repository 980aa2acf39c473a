"""OneRank: an engine of a single rank, the reference that every deployment is held against.

The whole prompt is one step and each token another; one contiguous block a request. Nothing is
sharded, transferred, cached, drafted or batched.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import torch
from attrs import define, field

from kvflow.comm.local import LocalComm
from kvflow.engine.api import Metric, Request, TokenOutput
from kvflow.engine.messages import StepItem
from kvflow.engine.runner import StepRunner
from kvflow.launch.config import LaunchConfig
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated
from kvflow.models.glm import Glm
from kvflow.transfers.executors.base import RankCache


@define(eq=False)
class OneRank:
    """An `EngineClient` with the model, KV format and precision of a deployment, and nothing else
    of it. Ends of sequences are ignored."""

    launch: LaunchConfig
    model: Glm = field(init=False)
    _turn: asyncio.Lock = field(init=False, factory=asyncio.Lock)

    def __attrs_post_init__(self) -> None:
        dtype = {"float32": torch.float32, "float64": torch.float64}[self.launch.dtype]
        self.model = Glm.load(self.launch.model, kv_dtype=self.launch.kv_dtype, dtype=dtype)

    @property
    def max_model_len(self) -> int:
        return self.launch.max_model_len

    @property
    def model_name(self) -> str:
        return self.launch.model_name

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """One request, alone."""
        size, count = len(request.prompt), request.sampling.max_tokens
        layout = KVLayout.uniform(
            self.model.spec, Placement.simple(Replicated()), Paged(size + count)
        )
        cache = RankCache.allocate(layout, 0, {"kv": 1})
        runner = StepRunner.over(self.model, layout, cache, LocalComm())
        tokens, start = list(request.prompt), 0
        for position in range(size, size + count):
            item = StepItem("alone", start, tokens, None, {"kv": [0]}, request.sampling)
            async with self._turn:  # in a thread, so that the caller's loop stays awake
                answers = await asyncio.to_thread(runner.run, [item])
            (sampled,) = answers["alone"]
            last = position == size + count - 1
            yield TokenOutput(
                request.request_id, sampled.token, position, "length" if last else None
            )
            tokens, start = [sampled.token], position

    def metrics(self) -> Sequence[Metric]:
        """None."""
        return ()

    async def healthy(self) -> bool:
        """Always."""
        return True
