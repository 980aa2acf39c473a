"""The contract of `Endpoint`, on every implementation, in one process."""

import threading
import time

import pytest
from attrs import evolve
from endpoint_worlds import (
    KEY,
    WORLDS,
    mover,
    nixl_world,
    pair,
    pusher,
    same_bytes,
    source_cache,
    target_cache,
    untouched,
)
from hypothesis import Phase, given, settings

from kvflow.errors import CapacityError, TransferError
from kvflow.layouts.record import Record
from kvflow.testing import Case, cases, check_law
from kvflow.transfers.cost import DIRECT, STRATEGIES
from kvflow.transfers.executors.base import RankCache
from kvflow.transfers.executors.local import LocalEndpoint, LocalFabric
from kvflow.transfers.executors.nixl import NixlEndpoint
from kvflow.transfers.executors.reference import ReferenceExecutor

FEW = settings(max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def expected(bound, sources) -> RankCache:
    cache = target_cache(bound)
    ReferenceExecutor().execute(bound, sources, {0: cache})
    return cache


@pytest.fixture(params=sorted(WORLDS))
def world(request):
    """Makes endpoints and closes them."""
    made, make = [], WORLDS[request.param]()

    def remember(cache):
        made.append(make(cache))
        return made[-1]

    yield remember
    for endpoint in made:
        endpoint.close()


@pytest.fixture
def nixl():
    """As `world`, for NIXL alone, with options."""
    made = []

    def make(cache, **options):
        made.append(nixl_world(**options)(cache))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def connect_all(make, bound, **options):
    """A target endpoint connected to an endpoint of every source rank."""
    sources = {r: source_cache(bound, r) for r in bound.src.layout.placement.all_ranks}
    senders = {r: make(cache, **options) for r, cache in sources.items()}
    receiver = make(target_cache(bound), **options)
    peers = {r: receiver.connect(s.export()) for r, s in senders.items()}
    return sources, senders, receiver, peers


# --- the law --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(WORLDS))
@FEW
@given(case=cases(max_tokens=40, max_shards=3))
def test_endpoints_keep_the_law(kind, case: Case):
    check_law(mover(WORLDS[kind]()), case.src, case.dst, case.tokens)


@pytest.mark.parametrize("strategy", STRATEGIES)
@FEW
@given(case=cases(max_tokens=40, max_shards=2))
def test_every_strategy_keeps_the_law(strategy, case: Case):
    check_law(mover(nixl_world(), strategy=strategy), case.src, case.dst, case.tokens)


@pytest.mark.parametrize("kind", sorted(WORLDS))
@FEW
@given(case=cases(max_tokens=40, max_shards=2))
def test_pushes_keep_the_law(kind, case: Case):
    check_law(pusher(WORLDS[kind]()), case.src, case.dst, case.tokens)


@pytest.mark.parametrize("strategy", [None, *DIRECT])
def test_every_direct_strategy_pushes_the_same_bytes(nixl, strategy):
    """Source ranks write at once, each its share, through their own lanes and lists."""
    bound = pair((37, 700), interleave=16, blocks=(64, 64))
    sources = {r: source_cache(bound, r) for r in range(4)}
    receiver = nixl(target_cache(bound))
    nbytes = 0
    for rank, cache in sources.items():
        sender = nixl(cache)
        peers = {0: sender.connect(receiver.export())}
        report = sender.push(bound, rank, peers, timeout=30, verify=True, strategy=strategy)
        nbytes += report.nbytes
    assert same_bytes(receiver.cache, expected(bound, sources))
    assert nbytes == bound.plan.nbytes
    with pytest.raises(TransferError, match="strategy 'stage' of a push"):
        sender.push(bound, 3, peers, timeout=5, strategy="stage")


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
@pytest.mark.parametrize("interleave", [1, 16, 64])
def test_strategies_give_equal_bytes(nixl, interleave, strategy):
    bound = pair((37, 700), interleave=interleave, blocks=(64, 64))
    sources, _, receiver, peers = connect_all(nixl, bound)
    report = receiver.pull(bound, 0, peers, timeout=30, verify=True, strategy=strategy)
    assert same_bytes(receiver.cache, expected(bound, sources))
    assert (report.nbytes, report.verified) == (bound.plan.nbytes, True)
    assert report.num_links == 4
    if strategy is not None:
        assert set(report.strategies) <= {strategy, "strided"}


def test_a_large_pull_uses_every_lane(nixl, monkeypatch):
    from kvflow.transfers.executors import nixl_direct, nixl_pull

    monkeypatch.setattr(nixl_pull, "_LANES_NBYTES", 0)
    monkeypatch.setattr(nixl_direct, "POST_NBYTES", 1 << 14)
    bound = pair((0, 2000), interleave=64, blocks=(64, 64))
    sources, _, receiver, peers = connect_all(nixl, bound, num_lanes=3)
    for _ in range(2):
        receiver.pull(bound, 0, peers, timeout=30, verify=True)
        assert same_bytes(receiver.cache, expected(bound, sources))
    assert len(receiver._open_lanes()) == 3


def test_a_planted_wrong_byte_is_seen(world):
    """The comparison itself, seen to fail."""
    bound = pair()
    sources, _, receiver, peers = connect_all(world, bound)
    receiver.pull(bound, 0, peers, timeout=30)
    want = expected(bound, sources)
    want.pages["latent.0"].memory[5] ^= 1
    assert not same_bytes(receiver.cache, want)


def test_c07_zero_tokens_complete_at_once(world):
    bound = pair((16, 16))
    receiver = world(target_cache(bound))
    report = receiver.pull(bound, 0, {}, timeout=0.001, verify=True)
    assert (report.nbytes, report.num_descriptors, report.num_links) == (0, 0, 0)
    assert untouched(receiver.cache)
    assert receiver.quiesced()


def test_verify_names_bytes_that_differ(world, monkeypatch):
    """The digest check, seen to fail: the source changes between the copy and the digest."""
    bound = pair()
    sources, _, receiver, peers = connect_all(world, bound)
    spoiled = []

    def spoil(cls_verify):
        def verify(self, *args):
            sources[2].pages["indexer.0"].memory.bitwise_not_()
            spoiled.append(True)
            return cls_verify(self, *args)

        return verify

    from kvflow.transfers.executors.nixl_pull import Pull

    for cls in (LocalEndpoint, Pull):
        monkeypatch.setattr(cls, "_verify", spoil(cls._verify))
    with pytest.raises(TransferError, match=r"indexer\.0 .*digest"):
        receiver.pull(bound, 0, peers, timeout=30, verify=True)
    assert spoiled


# --- refusals -------------------------------------------------------------------------------------


def test_a_bad_seal_is_refused(world):
    bound = pair()
    sender, receiver = world(source_cache(bound, 0)), world(target_cache(bound))
    blob = bytearray(sender.export())
    blob[-1] ^= 1
    with pytest.raises(TransferError, match="bad seal"):
        receiver.connect(bytes(blob))
    with pytest.raises(TransferError, match="bad seal"):
        receiver.connect(b"")


def test_another_key_is_refused():
    bound = pair()
    sender = NixlEndpoint(source_cache(bound, 0), KEY, 1 << 16)
    receiver = NixlEndpoint(target_cache(bound), KEY[::-1], 1 << 16)
    with pytest.raises(TransferError, match="bad seal"):
        receiver.connect(sender.export())
    sender.close()
    receiver.close()
    with pytest.raises(TransferError, match="at least 16 bytes"):
        NixlEndpoint(source_cache(bound, 0), b"short")


def test_unconnected_and_missing_peers_are_refused(world):
    bound = pair()
    receiver = world(target_cache(bound))
    for peers in ({}, dict.fromkeys(range(4), "nobody")):
        with pytest.raises(TransferError):
            receiver.pull(bound, 0, peers, timeout=5)
    with pytest.raises(TransferError, match="rank 3"):
        receiver.pull(bound, 3, {}, timeout=5)
    assert untouched(receiver.cache)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c11_a_slot_outside_the_registered_pages_is_named(nixl, side, strategy):
    """One cache is smaller than the pool that the binding was made for."""
    small, bound = pair((0, 40)), pair((0, 2000))
    sources = {r: source_cache(small if side == "source" else bound, r) for r in range(4)}
    senders = {r: nixl(cache) for r, cache in sources.items()}
    receiver = nixl(target_cache(small if side == "target" else bound))
    peers = {r: receiver.connect(s.export()) for r, s in senders.items()}
    with pytest.raises(TransferError, match=rf"{side} latent\.0: slots .* registered pages"):
        receiver.pull(bound, 0, peers, timeout=5, strategy=strategy)
    assert untouched(receiver.cache)


def test_a_cache_of_other_pages_than_planned_is_refused(nixl):
    bound, other = pair(blocks=(16, 64)), pair(blocks=(8, 64))
    sources = {r: source_cache(other, r) for r in range(4)}
    receiver = nixl(target_cache(bound))
    peers = {r: receiver.connect(nixl(c).export()) for r, c in sources.items()}
    with pytest.raises(TransferError, match=r"pages of 8 x .* the plan says 16"):
        receiver.pull(bound, 0, peers, timeout=5)


def test_a_cache_of_other_records_than_planned_is_refused():
    """Pages of as many tokens and bytes, whose rows are arranged in another way."""
    bound, make = pair(), WORLDS["local"]()
    layout = bound.src.layout
    other = evolve(layout, spec=rearranged(layout.spec))
    peers, target = {}, target_cache(bound)
    receiver = make(target)
    for rank in range(4):
        cache = RankCache.allocate(other, rank, bound.src.num_blocks, fill=1)
        peers[rank] = receiver.connect(make(cache).export())
    with pytest.raises(TransferError, match=r"has records .* the layout's are"):
        receiver.pull(bound, 0, peers, timeout=5, verify=True)
    assert untouched(target)


def rearranged(spec):
    """Planes for rows and rows for planes."""
    components = []
    for one in spec.components:
        order = "row" if len(one.record.arrangement.planes) > 1 else "planar"
        components.append(evolve(one, record=Record(one.record.fields, order)))
    return evolve(spec, components=components)


def test_an_endpoint_of_another_rank_is_refused_before_anything_moves(world):
    """Ranks that swap places have pages of one look and the wrong bytes in them."""
    bound = pair()
    _, senders, receiver, peers = connect_all(world, bound)
    swapped = peers | {0: peers[1], 1: peers[0]}
    with pytest.raises(TransferError, match=r"is named for rank 0, it is 1"):
        receiver.pull(bound, 0, swapped, timeout=5, verify=True)
    # here the target has the pages of source rank 1
    twin = world(RankCache(1, target_cache(bound).pages))
    there = {0: senders[0].connect(twin.export())}
    with pytest.raises(TransferError, match=r"is named for rank 0, it is 1"):
        senders[0].push(bound, 0, there, timeout=5, verify=True)
    with pytest.raises(TransferError, match=r"rank 2 at the cache of (rank )?0"):
        senders[0].push(bound, 2, there, timeout=5)
    with pytest.raises(TransferError, match=r"rank 0 at the cache of (rank )?1"):
        twin.pull(bound, 0, peers, timeout=5)
    assert untouched(receiver.cache)
    assert untouched(twin.cache)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_cache_with_fewer_blocks_than_bound_is_refused(nixl, side):
    """Though every slot that moves is there: the pool that the binding is of has one more."""
    small = pair((0, 40))
    end, binding = ("src", small.src) if side == "source" else ("dst", small.dst)
    more = evolve(binding, num_blocks={"kv": binding.num_blocks["kv"] + 1})
    _, _, receiver, peers = connect_all(nixl, small)
    with pytest.raises(
        TransferError, match=rf"latent\.0 has \d+ blocks in the {side} cache of rank"
    ):
        receiver.pull(evolve(small, **{end: more}), 0, peers, timeout=5)
    assert untouched(receiver.cache)


# --- staging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["pack", "stage"])
def test_c18_a_small_staging_area_splits_the_payload(nixl, strategy):
    """Staging for 64 tokens, 200 tokens over DCP 4: parts that fit, counted, right."""
    row = max(c.record.nbytes for c in bound_components())
    bound = pair((0, 200), blocks=(4, 64))
    sources, _, receiver, peers = connect_all(nixl, bound, staging_nbytes=64 * row)
    report = receiver.pull(bound, 0, peers, timeout=30, verify=True, strategy=strategy)
    assert same_bytes(receiver.cache, expected(bound, sources))
    assert report.num_parts > 4 * 2  # more parts than links and kinds of components
    assert receiver._door.landing.num_lent == 0


def bound_components():
    return pair().src.layout.spec.components


def test_fault_k08_more_descriptors_than_allowed_are_refused_before_anything_moves(nixl):
    bound = pair((0, 600))
    sources, _, receiver, peers = connect_all(nixl, bound, max_descriptors=1000)
    num_pieces = 600 * sum(len(r.pieces(16)) for r in (c.record for c in bound_components()))
    with pytest.raises(CapacityError, match=rf"{num_pieces} descriptors for .* at most 1000"):
        receiver.pull(bound, 0, peers, timeout=5, strategy="strided")
    assert untouched(receiver.cache)
    assert receiver.pull(bound, 0, peers, timeout=30, strategy="stage").num_descriptors < 1000
    assert same_bytes(receiver.cache, expected(bound, sources))


def test_staging_below_one_row_is_refused_by_name_or_avoided(nixl):
    bound = pair()
    sources, _, receiver, peers = connect_all(nixl, bound, staging_nbytes=64)
    for strategy in ("pack", "stage"):
        with pytest.raises(CapacityError, match=r"a (row|page) of"):
            receiver.pull(bound, 0, peers, timeout=5, strategy=strategy)
    assert receiver.pull(bound, 0, peers, timeout=30).strategies == ("strided",)
    assert same_bytes(receiver.cache, expected(bound, sources))


def test_owners_take_their_staging_back(nixl):
    bound = pair()
    _, senders, receiver, peers = connect_all(nixl, bound)
    for _ in range(3):
        receiver.pull(bound, 0, peers, timeout=30, strategy="pack")
    until = time.monotonic() + 5
    while any(s._outbox.num_lent for s in senders.values()):
        assert time.monotonic() < until, "a packed part was never released"
        time.sleep(0.01)


def test_several_readers_share_one_owner(nixl):
    """Two decode ranks pull packed rows at once through staging that holds little."""
    bound = pair((0, 600))
    sources = {r: source_cache(bound, r) for r in range(4)}
    senders = {r: nixl(c, staging_nbytes=1 << 14) for r, c in sources.items()}
    receivers = [nixl(target_cache(bound)) for _ in range(2)]
    failures = []

    def pull(receiver):
        try:
            peers = {r: receiver.connect(s.export()) for r, s in senders.items()}
            receiver.pull(bound, 0, peers, timeout=60, strategy="pack", verify=True)
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=pull, args=(r,)) for r in receivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(same_bytes(r.cache, expected(bound, sources)) for r in receivers)


# --- failures -------------------------------------------------------------------------------------


def test_d11_a_refusal_reaches_the_reader_at_once(nixl, monkeypatch):
    """The owner cannot serve one component: the reader learns it, not its deadline."""
    bound = pair()
    sources, senders, receiver, peers = connect_all(nixl, bound)
    pages = dict(sources[1].pages)
    del pages["indexer.0"]
    senders[1].service.cache = RankCache(1, pages)
    begin = time.monotonic()
    with pytest.raises(TransferError, match=r"refused: rank 1 has no component 'indexer\.0'"):
        receiver.pull(bound, 0, peers, timeout=60, strategy="pack")
    assert time.monotonic() - begin < 10
    assert senders[1].service.num_refused == 1
    until = time.monotonic() + 10
    while not receiver.quiesced() or receiver._door.landing.num_lent:
        assert time.monotonic() < until  # reads that were under way end, and give landing back
        time.sleep(0.005)


def test_d11_a_slot_out_of_range_is_refused_by_the_owner(nixl):
    bound = pair()
    _, senders, receiver, peers = connect_all(nixl, bound)
    small = RankCache.allocate(bound.src.layout, 2, {"kv": 1})
    senders[2].service.cache = small
    with pytest.raises(TransferError, match=r"refused: .* must be in \[0, 16\) of rank 2"):
        receiver.pull(bound, 0, peers, timeout=60, strategy="pack")


def test_d01_local_target_is_not_quiesced_until_the_writer_ended():
    bound, fabric = pair(), LocalFabric()
    sources = {r: source_cache(bound, r) for r in range(4)}
    senders = {r: LocalEndpoint(c, fabric) for r, c in sources.items()}
    opened, reached = threading.Event(), threading.Event()

    def gate(num_done: int) -> None:
        if num_done == 8:  # 40 % of 4 links x 5 components
            reached.set()
            opened.wait(30)

    receiver = LocalEndpoint(target_cache(bound), fabric, gate)
    peers = {r: receiver.connect(s.export()) for r, s in senders.items()}
    with pytest.raises(TransferError, match=r"did not end within"):
        receiver.pull(bound, 0, peers, timeout=0.3)
    assert reached.is_set()
    assert not receiver.quiesced()
    assert not same_bytes(receiver.cache, expected(bound, sources))
    opened.set()
    until = time.monotonic() + 10
    while not receiver.quiesced():
        assert time.monotonic() < until
        time.sleep(0.005)
    assert same_bytes(receiver.cache, expected(bound, sources))  # it wrote on until the end


def test_a_source_that_leaves_midway_is_an_error():
    bound, fabric = pair(), LocalFabric()
    senders = {r: LocalEndpoint(source_cache(bound, r), fabric) for r in range(4)}
    receiver = LocalEndpoint(
        target_cache(bound), fabric, lambda n: senders[3].close() if n == 3 else None
    )
    peers = {r: receiver.connect(s.export()) for r, s in senders.items()}
    with pytest.raises(TransferError, match="closed"):
        receiver.pull(bound, 0, peers, timeout=10)
    assert receiver.quiesced()


def test_d08_closing_twice_and_using_what_is_closed(world):
    bound = pair()
    endpoint = world(target_cache(bound))
    endpoint.close()
    endpoint.close()
    assert endpoint.quiesced()
    for use in (
        lambda: endpoint.pull(bound, 0, {}, timeout=1),
        lambda: endpoint.connect(b"x" * 64),
        endpoint.export,
    ):
        with pytest.raises(TransferError):
            use()


def test_connecting_again_is_harmless(world):
    bound = pair()
    sources, senders, receiver, peers = connect_all(world, bound)
    for rank, sender in senders.items():
        assert receiver.connect(sender.export()) == peers[rank]
        assert sender.connect(receiver.export()) == receiver.name
    receiver.pull(bound, 0, peers, timeout=30, verify=True)
    assert same_bytes(receiver.cache, expected(bound, sources))


def test_a_younger_endpoint_replaces_the_older_of_its_label(nixl):
    bound = pair((0, 20), ranks=1)
    old = nixl(source_cache(bound, 0), label="prefill/0")
    young = nixl(source_cache(bound, 0), label="prefill/0")
    receiver = nixl(target_cache(bound))
    old_blob = old.export()
    old_name = receiver.connect(old_blob)
    young_name = receiver.connect(young.export())
    with pytest.raises(TransferError, match="not connected"):
        receiver.pull(bound, 0, {0: old_name}, timeout=5)
    with pytest.raises(TransferError, match="generation"):
        receiver.connect(old_blob)
    receiver.pull(bound, 0, {0: young_name}, timeout=30, verify=True)
    assert same_bytes(receiver.cache, expected(bound, {0: young.cache}))


def test_messages_of_strangers_are_dropped(nixl):
    bound = pair()
    _, senders, receiver, peers = connect_all(nixl, bound)
    receiver._agent.notify(peers[0], b"not sealed at all")
    until = time.monotonic() + 5
    while senders[0].service.num_dropped == 0:
        assert time.monotonic() < until
        time.sleep(0.005)
    receiver.pull(bound, 0, peers, timeout=30, strategy="pack", verify=True)


def test_an_export_that_leaves_its_region_is_refused(nixl):
    import msgspec

    from kvflow.transfers.executors.nixl_wire import Export, Region, encode
    from kvflow.transfers.executors.seal import unseal

    bound = pair((0, 20), ranks=1)
    sender, receiver = nixl(source_cache(bound, 0)), nixl(target_cache(bound))
    export = msgspec.msgpack.decode(unseal(KEY, sender.export()), type=Export)
    info = export.components["latent.0"]
    short = msgspec.structs.replace(info, region=Region(info.region.address, 10))
    forged = msgspec.structs.replace(export, components={"latent.0": short})
    with pytest.raises(TransferError, match=r"latent\.0 pages .* must lie inside"):
        receiver.connect(encode(KEY, forged))


def test_no_thread_outlives_an_endpoint():
    bound = pair((0, 20), ranks=1)
    before = set(threading.enumerate())
    sender, receiver = (
        NixlEndpoint(c, KEY, 1 << 16) for c in (source_cache(bound, 0), target_cache(bound))
    )
    peers = {0: receiver.connect(sender.export())}
    receiver.pull(bound, 0, peers, timeout=30)
    receiver.close()
    sender.close()
    assert set(threading.enumerate()) <= before
