"""The disk tier: files that prove what they hold, within a budget, found again by a new engine."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_ranks import SymbolicRanks, toy_spec

from kvflow.engine.prefix.hashes import HASH_SCHEME, PrefixHasher
from kvflow.engine.tiers.disk import DiskTier
from kvflow.engine.tiers.host import Entry, Place
from kvflow.engine.tiers.memory import unit_nbytes
from kvflow.engine.tiers.unitfile import MAGIC, most_file_nbytes, open_unit
from kvflow.errors import CapacityError, KvflowError, TransferError
from kvflow.router.events import KVEvents, Stored
from kvflow.transfers.executors.nixl_files import NixlFiles
from kvflow.transfers.executors.plain_files import PlainFiles

CHAIN = PrefixHasher("content", 4, shifted=True).chain(range(40))


@pytest.fixture(params=["plain", "nixl"])
def files(request):
    if request.param == "plain":
        return PlainFiles()
    try:
        return NixlFiles()
    except TransferError as error:
        pytest.skip(str(error))


def entry(k):
    following = CHAIN.following(k)
    place, label = Place(CHAIN.hashes[k], following), CHAIN.label(k, following)
    return Entry(place, CHAIN.block(k), label, CHAIN.parent(k))


def payload(k, nbytes=5000):
    return torch.arange(nbytes, dtype=torch.int64).add(k).remainder(251).to(torch.uint8)


def store(tier, k, nbytes=5000):
    tier.make_room(nbytes)
    data = payload(k, nbytes)
    tier.publish(tier.write(CHAIN.key(k, CHAIN.following(k)), entry(k), data))


def read(tier, k, nbytes=5000):
    data = torch.zeros(nbytes, dtype=torch.uint8)
    tier.read(tier.find(CHAIN, k, CHAIN.following(k)), data)
    return data


def found(tier):
    return [k for k in range(9) if tier.find(CHAIN, k, CHAIN.following(k)) is not None]


def test_what_is_written_is_read_and_found_by_the_next_tier(files, tmp_path):
    tier = DiskTier(tmp_path, 1 << 20, 4, files)
    for k in range(3):
        store(tier, k)
    for again in (tier, DiskTier(tmp_path, 1 << 20, 4, files)):
        assert found(again) == [0, 1, 2]
        for k in range(3):
            assert torch.equal(read(again, k), payload(k))
        assert again.held_nbytes == sum(p.stat().st_size for p in tmp_path.glob("*.unit"))
    assert tier.variant(CHAIN, 1).entry.place.following == 8
    assert tier.find(CHAIN, 1, 9) is None


def test_a_tier_says_what_its_files_hold_from_its_opening_on(tmp_path):
    """In whatever order they were written, each with the block before it."""
    first = DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
    for k in (2, 0, 1):
        store(first, k)
    assert first.events.drain().stored == (
        Stored(CHAIN.hashes[2:3], CHAIN.hashes[1], 4),
        Stored(CHAIN.hashes[:2], None, 8),
    )
    for k in (1, 2):  # looked for in this order, as a request does
        os.utime(unit_path(first, k), ns=(k, k))
    again = DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
    told = again.events.drain()
    assert told.tier == "disk"
    assert told.stored == (
        Stored(CHAIN.hashes[1:3], CHAIN.hashes[0], 8),
        Stored(CHAIN.hashes[:1], None, 4),
    )
    assert [open_unit(unit_path(again, k)).entry.parent for k in range(2)] == [
        None,
        CHAIN.hashes[0],
    ]
    again.refuse(again.find(CHAIN, 1, CHAIN.following(1)))
    assert again.events.drain() == KVEvents("disk", removed=(CHAIN.hashes[1],))
    again.make_room(again.nbytes - 5000)
    assert set(again.events.drain().removed) == {CHAIN.hashes[0], CHAIN.hashes[2]}
    store(again, 0)
    assert again.clear() == 1
    assert again.events.drain() == KVEvents("disk", removed=(CHAIN.hashes[0],))
    assert again.events.drain() is None


def test_a_block_is_there_until_its_last_variant_goes(tmp_path):
    """Rows made with two tokens behind the block are two files, and one block to a router."""
    tier = DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
    store(tier, 1)
    place = Place(CHAIN.hashes[1], 99)
    other = Entry(place, CHAIN.block(1), CHAIN.label(1, 99), CHAIN.parent(1))
    tier.publish(tier.write(CHAIN.key(1, 99), other, payload(1)))
    tier.events.drain()
    tier.refuse(tier.find(CHAIN, 1, 99))
    assert tier.events.drain() is None
    tier.refuse(tier.find(CHAIN, 1, CHAIN.following(1)))
    assert tier.events.drain().removed == (CHAIN.hashes[1],)


def nbytes_in(directory):
    """Of all files there but the manifest."""
    return sum(p.stat().st_size for p in directory.iterdir() if p.is_file() and p.suffix != ".json")


def unit_path(tier, k):
    return tier.find(CHAIN, k, CHAIN.following(k)).path


@pytest.mark.parametrize(
    "damage",
    ["short", "empty", "header", "magic", "version", "scheme", "foreign", "directory", "long"],
)
def test_a_file_that_proves_nothing_is_refused_counted_and_a_miss(files, tmp_path, damage):
    tier = DiskTier(tmp_path, 1 << 20, 4, files)
    for k in range(2):
        store(tier, k)
    path = unit_path(tier, 0)
    content = path.read_bytes()
    spoiled = {
        "short": content[:-1],
        "empty": b"",
        "header": content[:40] + bytes([content[40] ^ 1]) + content[41:],
        "magic": b"x" + content[1:],
        "version": b"kvflow.unit.1\n" + content[len(MAGIC) :],
        "scheme": content.replace(HASH_SCHEME.encode(), HASH_SCHEME.encode()[::-1]),
        "foreign": b"something else" * 100,
        "long": content + b"x",
        "directory": None,
    }[damage]
    path.unlink()
    if spoiled is None:
        path.mkdir()
    else:
        path.write_bytes(spoiled)
    again = DiskTier(tmp_path, 1 << 20, 4, files)
    assert found(again) == [1]
    assert again.num_refused == (damage != "directory")
    assert path.exists() == (damage == "directory")  # that is no file of the tier's
    assert nbytes_in(tmp_path) == again.held_nbytes


@pytest.mark.parametrize("where", ["first", "last", "gone", "cut"])
def test_bytes_that_changed_since_are_never_served(files, tmp_path, where):
    tier = DiskTier(tmp_path, 1 << 20, 4, files)
    store(tier, 0)
    file = tier.find(CHAIN, 0, 4)
    match where:
        case "gone":
            file.path.unlink()
        case "cut":
            os.truncate(file.path, file.file_nbytes - 1)
        case _:
            at = file.start if where == "first" else file.file_nbytes - 1
            with open(file.path, "r+b") as raw:
                raw.seek(at)
                byte = raw.read(1)
                raw.seek(at)
                raw.write(bytes([byte[0] ^ 1]))
    with pytest.raises(TransferError):
        read(tier, 0)
    tier.refuse(file)
    assert found(tier) == []
    assert tier.num_refused == 1
    assert nbytes_in(tmp_path) == tier.held_nbytes == 0
    store(tier, 0)  # and it can be stored anew
    assert torch.equal(read(tier, 0), payload(0))


def test_the_oldest_files_go_and_a_unit_that_never_fits_is_refused(files, tmp_path):
    one = 4096 + 5000
    tier = DiskTier(tmp_path, 4 * one + 2 * 4096, 4, files)
    for k in range(3):
        store(tier, k)
    assert found(tier)[:1] == [0]  # a look-up is a use
    tier.find(CHAIN, 0, CHAIN.following(0))
    for k in (3, 4, 5):
        store(tier, k)
    assert len(tier) == 4
    assert tier.held_nbytes <= tier.nbytes
    assert tier.num_evicted == 2
    assert found(tier) == [0, 3, 4, 5]
    assert len(list(tmp_path.glob("*.unit"))) == 4
    smaller = DiskTier(tmp_path, 2 * one, 4, files)
    assert len(smaller) == 2
    assert len(list(tmp_path.glob("*.unit"))) == 2
    with pytest.raises(CapacityError, match="the disk tier has"):
        smaller.make_room(3 * one)
    assert smaller.num_store_refused == 1


@pytest.mark.parametrize("size", [1, 4, 200, 1000])
def test_room_is_made_for_the_largest_header(size, tmp_path):
    """The longest numbers a header can hold; its tokens alone may take more than a page."""
    last = 2**63 - 1
    chain = PrefixHasher("content", size, shifted=True).chain([last] * (size + 1))
    said = Entry(Place(chain.hashes[0], last), chain.block(0), chain.label(0, last), None)
    tier = DiskTier(tmp_path, most_file_nbytes(5000, size), size, PlainFiles())
    tier.make_room(5000)
    tier.publish(tier.write(chain.key(0, last), said, payload(0)))
    (path,) = tmp_path.glob("*.unit")
    assert path.stat().st_size == tier.held_nbytes == tier.nbytes
    assert len(tier) == 1


def test_a_write_that_fails_leaves_nothing(files, tmp_path):
    tier = DiskTier(tmp_path / "tier", 1 << 20, 4, files)
    shutil.rmtree(tier.directory)
    with pytest.raises(TransferError, match="cannot be written"):
        tier.write(CHAIN.key(0, 4), entry(0), payload(0))
    assert not tier.directory.exists()


@pytest.mark.parametrize("setting", ["block_size", "hash_scheme", "manifest"])
def test_fault_i02_other_hash_settings_are_refused_at_the_start_by_name(tmp_path, setting):
    DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
    if setting == "block_size":
        with pytest.raises(KvflowError, match="block_size is 4 there and 8 here"):
            DiskTier(tmp_path, 1 << 20, 8, PlainFiles())
        return
    said = (
        json.dumps({"hash_scheme": "sha1", "block_size": 4})
        if setting != "manifest"
        else "something else"
    )
    (tmp_path / "tier.json").write_text(said)
    text = "hash_scheme is 'sha1' there" if setting != "manifest" else "no manifest"
    with pytest.raises(KvflowError, match=text):
        DiskTier(tmp_path, 1 << 20, 4, PlainFiles())


@pytest.mark.parametrize("said", ["", "{", '{"hash_scheme": "kv'])
@pytest.mark.parametrize("has_units", [False, True])
def test_a_manifest_that_was_cut_off_is_replaced_if_nothing_depends_on_it(
    tmp_path, said, has_units
):
    if has_units:
        store(DiskTier(tmp_path, 1 << 20, 4, PlainFiles()), 0)
    (tmp_path / "tier.json").write_text(said)
    if has_units:
        with pytest.raises(KvflowError, match=r"no manifest.*delete it, and the \*.unit files"):
            DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
        return
    for _ in range(2):
        DiskTier(tmp_path, 1 << 20, 8, PlainFiles())
    with pytest.raises(KvflowError, match="block_size is 8 there and 4 here"):
        DiskTier(tmp_path, 1 << 20, 4, PlainFiles())


@pytest.mark.parametrize("said", [None, ""])
def test_of_engines_that_open_a_directory_at_once_the_first_sets_what_it_is(tmp_path, said):
    """Those with the same settings all get it, the others are told what differs."""

    def open_tier(directory, unit_size, barrier, ends):
        barrier.wait()
        try:
            ends.append(DiskTier(directory, 1 << 20, unit_size, PlainFiles()).unit_size)
        except KvflowError as error:
            ends.append(str(error).partition(": ")[2])

    for attempt in range(60):
        directory, ends = tmp_path / str(attempt), []
        directory.mkdir()
        if said is not None:
            (directory / "tier.json").write_text(said)
        sizes, barrier = (4, 8, 4, 8), threading.Barrier(4)
        threads = [
            threading.Thread(target=open_tier, args=(directory, size, barrier, ends))
            for size in sizes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = json.loads((directory / "tier.json").read_text())["block_size"]
        lost = f"block_size is {won} there and {12 - won} here; no key would ever match"
        assert sorted(ends, key=str) == [won, won, lost, lost]
        assert [p.name for p in directory.iterdir()] == ["tier.json"]


WRITE_FOR_EVER = """
import os, pathlib, sys, time
from kvflow.engine.tiers.directory import draft_of
with draft_of(pathlib.Path(sys.argv[1], "a" * 64 + ".unit")) as (draft, fd):
    os.write(fd, bytes(9000))
    print(draft.name, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_engine_left_is_removed_and_nobody_elses(tmp_path):
    """While it writes, its draft stays; when it was killed, the next engine removes it."""
    foreign = ["notes.txt", ".hidden", f".{'a' * 64}.unit.backup", f"{'a' * 64}.unit.bak", "b.unit"]
    for name in foreign:
        (tmp_path / name).write_bytes(b"x")
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            draft = writer.stdout.readline().strip()
            DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
            assert set(os.listdir(tmp_path)) == {*foreign, "tier.json", draft}
        finally:
            writer.kill()
    assert (tmp_path / draft).stat().st_size == 9000
    DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
    assert set(os.listdir(tmp_path)) == {*foreign, "tier.json"}


def test_an_opening_engine_takes_no_draft_from_one_that_writes(tmp_path):
    ends = threading.Event()

    def keep_opening():
        while not ends.is_set():
            DiskTier(tmp_path, 1 << 20, 4, PlainFiles())

    opener = threading.Thread(target=keep_opening)
    opener.start()
    try:
        tier = DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
        for k in (*range(9), *range(9)) * 4:
            store(tier, k)
    finally:
        ends.set()
        opener.join()
    assert found(tier) == list(range(9))
    assert nbytes_in(tmp_path) == tier.held_nbytes


def test_a_draft_that_was_removed_before_it_was_locked_is_begun_anew(tmp_path, monkeypatch):
    tier, lock, taken = DiskTier(tmp_path, 1 << 20, 4, PlainFiles()), fcntl.flock, []

    def remove_first(fd, operation):
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(taken[0])
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    store(tier, 0)
    assert len(taken) == 1
    assert torch.equal(read(tier, 0), payload(0))


def test_a_budget_bounds_a_directory_full_of_broken_files(tmp_path):
    first = DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
    for k in range(9):
        store(first, k)
    for k in range(4):
        os.truncate(unit_path(first, k), 6000)
    shutil.copy(unit_path(first, 8), tmp_path / f"{'0' * 64}.unit")  # holds what it is not named
    tier = DiskTier(tmp_path, 3 * (4096 + 5000), 4, PlainFiles())
    assert len(tier) == 3
    assert nbytes_in(tmp_path) == tier.held_nbytes <= tier.nbytes


def test_a_file_that_another_engine_has_replaced_is_its_own(tmp_path):
    """Rows of one prefix may have other bits there: a miss here, once, and no loss there."""
    mine = DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
    store(mine, 0)
    theirs = DiskTier(tmp_path, 1 << 20, 4, PlainFiles())
    theirs.publish(theirs.write(CHAIN.key(0, 4), entry(0), payload(7)))
    with pytest.raises(TransferError, match="not what was written"):
        read(mine, 0)
    mine.refuse(mine.find(CHAIN, 0, 4))
    for tier in (mine, theirs):
        assert torch.equal(read(tier, 0), payload(7))
        assert tier.held_nbytes == nbytes_in(tmp_path)


@given(st.binary(max_size=200), st.integers(0, 3000))
@settings(max_examples=40)
def test_no_bytes_break_the_reading_of_a_header(tmp_path_factory, junk, size):
    path = tmp_path_factory.mktemp("junk") / "a.unit"
    for content in (junk, MAGIC + junk, MAGIC + size.to_bytes(8, "little") + junk):
        path.write_bytes(content)
        with pytest.raises(TransferError):
            open_unit(path)


# --- traffic between the tiers


class Held(PlainFiles):
    """Files that are moved only while the gate is open."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    def write(self, fd, offset, data):
        self.gate.wait(20)
        super().write(fd, offset, data)

    def read(self, fd, offset, data):
        self.gate.wait(20)
        super().read(fd, offset, data)


def ranks_on(directory, files=None, **changes):
    sizes = {"block": 4, "num_blocks": 10, "host_units": 24, "mtp": True}
    return SymbolicRanks(2, 2, directory=directory, files=files or Held(), **(sizes | changes))


def test_a_restarted_engine_finds_what_the_last_one_has_stored(tmp_path):
    async def run():
        first = ranks_on(tmp_path)
        await first.serve("a", range(37))
        await first.settle()
        second = ranks_on(tmp_path, interleave=4, block=2, unit=4, num_blocks=40)
        await first.close()
        said = [await second.serve("a", range(37)), await second.serve("b", (*range(20), 99, 98))]
        reused = dict(second.engine.kv.num_reused)
        await second.close()
        return said, reused

    said, reused = asyncio.run(run())
    assert said == [36, 19]
    assert reused["disk"] == 36
    assert sum(reused.values()) == sum(said)


@pytest.mark.parametrize("end", ["release", "reset", "forget"])
def test_ends_while_files_are_read(tmp_path, end):
    """A request that goes, a reset, or a chain that is forgotten, while its prefix comes from
    files."""

    async def run():
        first = ranks_on(tmp_path)
        await first.serve("a", range(37))
        await first.close()
        files = Held()
        second = ranks_on(tmp_path, files)
        files.gate.clear()
        task = second.submit("a", range(37))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert second.engine.tiers.num_under_way == 9
        assert not second.steps  # it waits for its rows
        tiers = second.engine.tiers
        if end == "release":
            second.engine.release("a")
        elif end == "forget":
            chain = second.engine._held["a"].kv.chain
            tiers.forget(chain)
        else:
            assert second.engine.reset_prefix_cache() == {"device": 0, "host": 0, "disk": 9}
        files.gate.set()
        await second.settle()
        if end == "forget":
            assert tiers.num_known(chain, 0, 36) == 0
            assert list(tmp_path.glob("*.unit")) == []
            assert tiers.events()["disk"]["file_refused"] == 0
        if end != "release":
            while not task.done():
                second.answer()
                await second.settle()
            assert second.told["a"] == 0
            second.engine.release("a")
        assert task.cancelled() == (end == "release")
        second.assert_idle()
        assert second.host.counts()["pinned"] == second.host.counts()["written"] == 0
        await second.close()

    asyncio.run(run())


def test_a_reset_while_files_are_written_leaves_none(tmp_path):
    async def run():
        files = Held()
        ranks = ranks_on(tmp_path, files)
        files.gate.clear()
        task = ranks.submit("a", range(37))
        await asyncio.sleep(0)
        for _ in range(4):
            await asyncio.sleep(0)
        ranks.answer()
        await task
        ranks.engine.release("a")
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert ranks.host.counts()["pinned"] == 9  # not given away while they are read
        ranks.engine.reset_prefix_cache()
        files.gate.set()
        await ranks.settle()
        assert list(tmp_path.glob("*.unit")) == []
        assert list(tmp_path.glob(".*")) == []
        assert await ranks.serve("b", range(37)) == 0
        ranks.assert_idle()
        await ranks.close()

    asyncio.run(run())


def test_more_writes_than_may_wait_are_refused_and_requests_are_not(tmp_path):
    async def run():
        files = Held()
        ranks = ranks_on(tmp_path, files, host_units=6)
        files.gate.clear()
        task = ranks.submit("a", range(37))
        for _ in range(4):
            await asyncio.sleep(0)
        ranks.answer()
        await task
        ranks.engine.release("a")
        events = ranks.engine.tiers.events()
        assert events["host"]["store_refused"] == 3
        assert events["disk"]["store_refused"] == 3
        files.gate.set()
        await ranks.settle()
        assert ranks.engine.tiers.units()["disk"] == {"published": 3}
        ranks.assert_idle()
        await ranks.close()

    asyncio.run(run())


def test_a_damaged_file_is_recomputed(tmp_path):
    async def run():
        first = ranks_on(tmp_path)
        await first.serve("a", range(37))
        await first.close()
        second = ranks_on(tmp_path)
        disk = second.engine.tiers.traffic.disk
        chain = second.engine.kv.hasher.chain(range(37))
        file = disk.find(chain, 5, chain.following(5))
        os.truncate(file.path, file.start)
        reused = await second.serve("a", range(37))
        await second.close()
        return reused, disk.num_refused

    assert asyncio.run(run()) == (20, 1)


def test_fault_i06_h11_files_of_other_weights_or_formats_are_misses(tmp_path):
    async def run():
        first = ranks_on(tmp_path)
        await first.serve("a", range(37))
        await first.close()
        second = ranks_on(tmp_path, content={"weights": "newer"})
        reused = await second.serve("a", range(37))
        await second.close()
        return reused

    assert asyncio.run(run()) == 0
    assert unit_nbytes(toy_spec(True), 4) == unit_nbytes(toy_spec(True, weights="newer"), 4)
