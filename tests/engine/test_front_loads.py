"""What routers are told of load: by the engines one by one, and by the deployment as a whole."""

from types import SimpleNamespace

from kvflow.engine.front.routing import Routing
from kvflow.router.config import EngineInfo, Load, RouterConfig
from kvflow.router.log import ChainScheme, KVEventLog
from kvflow.router.policy import Router

ROOM = 1000


def routing():
    router = Router(RouterConfig(block_size=16))
    for role in "prefill", "decode":
        router.register(EngineInfo(f"{role}-0", role, 16, ROOM))
    return Routing(router, None, KVEventLog(ChainScheme("rule", "model", 16), ("device",), ROOM))


def prefill(load):
    return SimpleNamespace(name="prefill-0", load=lambda: load, kv=SimpleNamespace(changes=list))


def gauges(**phases):
    names = ("waiting", "pulling", "restoring", "running", "preempted", "kv_tokens")
    return dict.fromkeys(names, 0.0) | phases


def test_every_request_of_a_decode_engine_counts_whatever_its_phase():
    ours = routing()
    said = gauges(waiting=1.0, pulling=2.0, restoring=4.0, running=8.0, preempted=16.0)
    ours.decode_changed("decode-0", said | {"kv_tokens": 100.0})
    assert ours.router.account("decode-0").num_requests == 31
    assert ours.log.load() == Load(100, 8, 23)


def test_a_server_tells_the_tokens_of_the_engines_whose_room_it_tells():
    """A prompt that lies on both sides is not counted twice against the room of one."""
    ours = routing()
    ours.prefill_changed(prefill(Load(700, 1, 2, 300)))
    ours.decode_changed("decode-0", gauges(running=1.0, kv_tokens=600.0))
    assert ours.router.account("prefill-0").kv_tokens == 700
    assert ours.log.load() == Load(600, 2, 2, 300)
    assert ours.log.load().kv_tokens_used <= ours.log.max_kv_tokens
