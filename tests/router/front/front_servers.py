"""Fake servers and a front before them, over real sockets."""

import asyncio
import contextlib

import httpx
from attrs import define, field
from front_world import CachingEngine, until

from kvflow.router.front.app import make_front
from kvflow.router.front.fleet import Fleet, FleetConfig
from kvflow.server import make_app, serve

QUICK = FleetConfig(
    health_interval_s=0.05, health_timeout_s=2.0, connect_timeout_s=1.0, feed_retry_s=0.02
)


@define(eq=False)
class FakeServer:
    """A kvflow server around a `CachingEngine`, which can go away and come back on its port."""

    engine: CachingEngine
    tokenizer: object
    port: int = 0
    url: str = ""
    _stack: contextlib.AsyncExitStack = field(factory=contextlib.AsyncExitStack)

    async def start(self):
        app = make_app(self.engine, self.tokenizer)
        running = await self._stack.enter_async_context(serve(app, port=self.port))
        self.port, self.url = running.port, running.url

    async def stop(self):
        await self._stack.aclose()


@define(eq=False)
class World:
    """A front, its servers and a client of the front."""

    servers: list[FakeServer]
    fleet: Fleet
    url: str
    client: httpx.AsyncClient

    @property
    def engines(self):
        return [server.engine for server in self.servers]

    async def complete(self, **body):
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0} | body
        return await self.client.post("/v1/completions", json=body)

    def server_of(self, response):
        """Which server answered, by its number."""
        urls = [server.url for server in self.servers]
        return urls.index(response.headers["x-kvflow-server"])

    def held(self, server):
        """Device blocks that the front believes a server to hold."""
        index = self.fleet.router.index
        return index.num_blocks(server.url, "device") if server.url in index else None

    async def all_in(self, num=None):
        await until(lambda: len(self.fleet.rotation) == (num or len(self.servers)))


def routed(tokenizer, scenario, engines=2, config=QUICK, **kwargs):
    """Runs `scenario(world)` with a front before `engines` servers (a number, or the engines
    themselves); nothing may run afterwards."""
    if isinstance(engines, int):
        engines = [CachingEngine(tokenizer.vocab_size, **kwargs) for _ in range(engines)]
    servers = [FakeServer(engine, tokenizer) for engine in engines]

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            for server in servers:
                await server.start()
                stack.push_async_callback(server.stop)
            fleet = Fleet(engines[0].model_name, [server.url for server in servers], config)
            await stack.enter_async_context(fleet.watched())
            running = await stack.enter_async_context(serve(make_front(fleet, tokenizer), port=0))
            client = httpx.AsyncClient(base_url=running.url, timeout=20)
            await stack.enter_async_context(client)
            world = World(servers, fleet, running.url, client)
            result = await scenario(world)
        assert all(engine.live == set() for engine in engines)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others
        return result

    return asyncio.run(main())
