"""NIXL endpoints between real, spawned processes: bytes, death, silence, idleness."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from endpoint_worlds import nixl_world, pair, same_bytes, source_cache, target_cache
from nixl_child import Child

from kvflow.errors import TransferError
from kvflow.transfers.cost import STRATEGIES
from kvflow.transfers.executors.nixl_wire import Pack, pack_runs
from kvflow.transfers.executors.reference import ReferenceExecutor

pytestmark = pytest.mark.processes
PAIR = {"tokens": (5, 900), "interleave": 1, "blocks": (16, 64)}


@pytest.fixture(scope="module")
def child():
    child = Child.start(PAIR)
    yield child
    child.close()


@pytest.fixture
def receiver():
    endpoint = nixl_world()(target_cache(pair(**PAIR)))
    yield endpoint
    endpoint.close()


def expected(bound):
    cache = target_cache(bound)
    ranks = bound.src.layout.placement.all_ranks
    ReferenceExecutor().execute(bound, {r: source_cache(bound, r) for r in ranks}, {0: cache})
    return cache


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.01)


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_bytes_cross_processes(child, receiver, strategy):
    bound = pair(**PAIR)
    peers = {r: receiver.connect(blob) for r, blob in enumerate(child.exports)}
    report = receiver.pull(bound, 0, peers, timeout=30, verify=True, strategy=strategy)
    assert report.verified
    assert same_bytes(receiver.cache, expected(bound))
    wait_until(lambda: not any(lent for _, lent in child.counters()))


def test_one_connection_serves_many_requests(child, receiver):
    """Other tokens through the same lists, and each request touches only its own slots."""
    peers = {r: receiver.connect(blob) for r, blob in enumerate(child.exports)}
    for start in (899, 640, 5):
        bound = pair(**(PAIR | {"tokens": (start, 900)}))
        receiver.pull(bound, 0, peers, timeout=30, verify=True)
        assert same_bytes(receiver.cache, expected(bound))


def test_a_killed_peer_is_an_error_at_once_and_can_come_back():
    options = {"tokens": (0, 100), "ranks": 2}
    bound, child = pair(**options), Child.start(options)
    receiver = nixl_world()(target_cache(bound))
    peers = {r: receiver.connect(blob) for r, blob in enumerate(child.exports)}
    receiver.pull(bound, 0, peers, timeout=30)
    child.kill()
    for strategy in (None, *STRATEGIES):
        begin = time.monotonic()
        with pytest.raises(TransferError, match="a read failed: nixlRemoteDisconnectError"):
            receiver.pull(bound, 0, peers, timeout=60, strategy=strategy)
        assert time.monotonic() - begin < 10
        assert receiver.quiesced()
    with pytest.raises(TransferError, match="no connection"):
        receiver.connect(child.exports[0])
    again = Child.start(options)
    peers = {r: receiver.connect(blob) for r, blob in enumerate(again.exports)}
    receiver.pull(bound, 0, peers, timeout=30, verify=True)
    assert same_bytes(receiver.cache, expected(bound))
    receiver.close()
    again.close()


@pytest.mark.slow
def test_an_owner_that_dies_while_it_packs_is_noticed():
    """No read is under way then: the reader asks whether the owner still lives."""
    bound = pair((0, 100), ranks=1)
    child = Child.start({"tokens": (0, 100), "ranks": 1})
    receiver = nixl_world()(target_cache(bound))
    peers = {0: receiver.connect(child.exports[0])}
    os.kill(child.process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, child.process.kill)
    killer.start()
    begin = time.monotonic()
    with pytest.raises(TransferError, match="a read failed"):
        receiver.pull(bound, 0, peers, timeout=60, strategy="pack")
    assert time.monotonic() - begin < 20
    killer.join()
    wait_until(receiver.quiesced)
    receiver.close()
    child.kill()


@pytest.mark.slow
def test_d01_d03_a_silent_peer_leaves_the_target_unquiesced_until_it_ends():
    """Over plain TCP a stopped owner answers no read. The pull ends at its deadline, its handle is
    kept, nothing is cancelled or freed; when the owner wakes up the bytes still arrive."""
    tcp = {"ucx": {"engine_config": "TLS=tcp"}}
    options = {"tokens": (0, 4000), "ranks": 1, "blocks": (64, 64)}
    bound = pair(**options)
    child = Child.start(options, **tcp)
    receiver = nixl_world(**tcp)(target_cache(bound))
    peers = {0: receiver.connect(child.exports[0])}
    peer, mine = receiver._peers[peers[0]], receiver._door.geometries
    for kind in peer.kinds(mine):  # preparing a list may need the owner's answer
        for grain in (0, 1, 32):
            peer.lists(receiver._agent, mine, kind, (grain, None, None))
    os.kill(child.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TransferError, match=r"did not end within 0\.500 s"):
            receiver.pull(bound, 0, peers, timeout=0.5, strategy="pages")
        assert not receiver.quiesced()
        with pytest.raises(TransferError, match="reads of failed pulls"):
            receiver.close(timeout=0.1)  # the buffers must stay
        with pytest.raises(TransferError, match="still has reads under way"):
            receiver.connect(child.exports[0])  # nothing is torn down either
        time.sleep(0.5)
        assert not receiver.quiesced()
        assert not same_bytes(receiver.cache, expected(bound))
    finally:
        os.kill(child.process.pid, signal.SIGCONT)
    wait_until(receiver.quiesced, 30)
    assert same_bytes(receiver.cache, expected(bound))  # the late bytes came
    peers = {0: receiver.connect(child.exports[0])}
    receiver.pull(bound, 0, peers, timeout=30, verify=True)
    receiver.close()
    child.close()


def test_a_loan_ends_with_its_lease_if_the_reader_is_gone(child, receiver):
    bound = pair(**PAIR)
    peer = receiver._peers[receiver.connect(child.exports[0])]
    runs = pack_runs(next(runs for _, rank, runs in bound.links_to(0) if rank == 0))
    receiver._door.ask(peer, lambda i: Pack(i, ("latent.0",), runs, 0.5))
    wait_until(lambda: child.counters()[0][1] == 1)
    wait_until(lambda: child.counters()[0][1] == 0, 5)


@pytest.mark.parametrize("progress", ["poll", "none"])
def test_an_idle_endpoint_costs_almost_no_cpu(progress):
    bound = pair((0, 20), ranks=1)
    endpoint = nixl_world(progress=progress)(target_cache(bound))
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.25  # a spinning thread would use all of it
    endpoint.close()


def test_kvflow_works_without_nixl():
    """Everything imports; only making an endpoint fails, and says what to install."""
    code = """
import sys
for name in ("nixl", "nixl_cu12", "nixl_cu13"):
    sys.modules[name] = None
import kvflow, torch
from kvflow.errors import TransferError
from kvflow.kernels.rows import PageView
from kvflow.layouts.spec import latent_record
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.nixl import NixlEndpoint
record = latent_record("float32", latent_rank=4, rope_dim=2)
pages = PageView(torch.zeros(256, dtype=torch.uint8), record, 2, 48)
try:
    NixlEndpoint(RankCache(0, {"latent.0": pages}), b"k" * 16)
except TransferError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert 'pip install "kvflow[nixl]"' in done.stdout, done.stderr
