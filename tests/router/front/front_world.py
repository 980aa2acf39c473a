"""Servers whose engine only pretends to compute but keeps a real index of chains, and readers of
what they say."""

import asyncio
import contextlib
import json

import httpx
from attrs import define, evolve, field
from server_helpers import ScriptedEngine

from kvflow.engine.prefix.hashes import HASH_SCHEME, PrefixHasher
from kvflow.router.events import KVEvents, Stored
from kvflow.router.log import ChainScheme, KVEventLog

BLOCK = 8
TIERS = ("device", "host", "disk")


def log_of(block_size=BLOCK, content="scripted", **kwargs):
    scheme = ChainScheme(HASH_SCHEME, content, block_size)
    return KVEventLog(scheme, TIERS, max_kv_tokens=10_000, **kwargs)


@define(eq=False)
class CachingEngine(ScriptedEngine):
    """A `ScriptedEngine` that keeps the chain of every prompt on its device and says so."""

    log: KVEventLog = field(factory=log_of)
    held: set = field(factory=set)
    prompts: list = field(factory=list)

    def kv_events(self):
        return self.log

    def chain(self, prompt, salt=None):
        scheme = self.log.scheme
        return PrefixHasher(scheme.content, scheme.block_size).chain(prompt, salt).hashes

    def cache(self, prompt, salt=None):
        hashes = self.chain(prompt, salt)
        self.held.update(hashes)
        stored = Stored(hashes, None, len(hashes) * self.log.scheme.block_size)
        self.log.on_events("prefill-0", KVEvents("device", [stored]))

    def forget(self):
        self.held.clear()
        self.log.on_events("prefill-0", KVEvents("device", cleared=True))

    def _output(self, request, idx):
        cached = 0
        if idx == 0:
            hashes = self.chain(request.prompt, request.cache_salt)
            hit = next((n for n, one in enumerate(hashes) if one not in self.held), len(hashes))
            cached = min(hit * self.log.scheme.block_size, len(request.prompt) - 1)
            self.prompts.append((request.prompt, cached))
            self.cache(request.prompt, request.cache_salt)
        return evolve(super()._output(request, idx), cached_tokens=cached)


@contextlib.asynccontextmanager
async def events_of(url):
    """An iterator over the events of a server, as JSON."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=20) as client,
        client.stream("GET", "/kv_events") as response,
    ):
        assert response.status_code == 200, await response.aread()

        async def events():
            async for line in response.aiter_lines():
                if line:
                    assert line.startswith("data: ")
                    yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])

        yield events()


async def until(holds, within_s=5.0):
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)
