"""Prefill and decode on two hosts: separate network, PID, IPC, mount and UTS namespaces, a wire
between them, and every engine started by torchrun or alone. Tokens equal the reference's."""

import os
import re
import signal

import pytest
from netns import WIRE, NoNamespacesError, two_hosts
from two_hosts_world import FRONT, TCP, World, transports

pytestmark = pytest.mark.processes


@pytest.fixture
def world(tmp_path):
    """Builds a world from flags of a deployment; nothing of it is left behind."""
    worlds = []
    try:
        made = two_hosts()
        hosts = made.__enter__()
    except NoNamespacesError as error:
        pytest.skip(f"no namespaces to make hosts of: {error}")

    def build(flags):
        worlds.append(World(hosts, tmp_path, flags))
        return worlds[-1]

    try:
        yield build
    finally:
        for one in worlds:
            one.end()
        made.__exit__(None, None, None)
    assert not any(os.path.exists(f"/proc/{host.pid}") for host in hosts)


def check_tokens(world, prompts):
    """Every program ended well; every token and transfer is right; no process is left."""
    codes = world.wait()
    assert set(codes.values()) == {0}, world.logs()
    served = world.served()
    assert served["tokens"] == {name: tokens for name, (_, tokens) in prompts.items()}
    assert len(served["reports"]) == len(prompts)
    assert all(r["verified"] is True and r["nbytes"] > 0 for r in served["reports"])
    assert world.left() == {"host-a": [], "host-b": []}


def test_a_prefill_engine_across_two_hosts_and_decode_on_the_second(world, prompts):
    """torchrun starts a rank of the engine on each host. Decode reads one rank's rows over the
    network and, to see that the log would tell, the other one's from its own host."""
    w = world("--pcp 2 --dcp 2 --interleave 1 --prefill-block 16 --decode-block 64")
    w.start_front()
    w.start_engine("prefill-0", [w.a, w.b])
    w.start_engine("decode-0", [w.b])
    check_tokens(w, prompts)
    seen = transports(w.log("decode-0").read_text())
    assert seen["inter-node", "remote memory read"] == TCP
    assert seen["inter-node", "active message"] == TCP
    assert seen["intra-node", "remote memory read"] == {"cma/memory"}
    assert transports(w.log("prefill-0@0").read_text())["inter-node", "active message"] == TCP
    both = ", ".join(sorted([w.a.address, w.b.address]))
    assert w.served()["hosts"] == {"prefill-0": both, "decode-0": w.b.address}


@pytest.mark.slow
def test_prefill_on_one_host_and_decode_on_the_other(world, prompts):
    """No link stays on a host, so nothing may go by shared memory."""
    w = world("--pcp 2 --dcp 1 --prefill-block 4 --decode-block 8 --num-drafts 3")
    w.start_front()
    w.start_engine("prefill-0", [w.a], per_host=2)
    w.start_engine("decode-0", [w.b])
    check_tokens(w, prompts)
    seen = transports(w.log("decode-0").read_text())
    assert not [peer for peer, _ in seen if peer == "intra-node"]
    assert seen["inter-node", "remote memory read"] == TCP


@pytest.mark.slow
def test_two_ranks_a_host_and_a_decode_group_across_both(world, prompts):
    w = world("--pcp 2 --tp 2 --dcp 2 --interleave 3 --decode-dcp 2 --hisparse --num-drafts 2")
    w.start_front()
    w.start_engine("prefill-0", [w.a, w.b], per_host=2)
    w.start_engine("decode-0", [w.b, w.a])
    check_tokens(w, prompts)
    for name in "decode-0@0", "decode-0@1":
        assert transports(w.log(name).read_text())["inter-node", "remote memory read"] == TCP


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["rank", "front", "wire"])
def test_a_loss_ends_every_program_with_a_reason(world, loss):
    w = world("--pcp 2 --dcp 2 --prefill-block 16")
    w.start_front(until="lost")
    w.start_engine("prefill-0", [w.a, w.b])
    w.start_engine("decode-0", [w.b])
    w.wait_for("front", "another")
    if loss == "rank":
        os.kill(w.find(w.b, "prefill-0"), signal.SIGKILL)
    elif loss == "front":
        os.kill(w.find(w.a, FRONT), signal.SIGKILL)
    else:
        w.a.run("ip", "link", "set", WIRE, "down")
    codes = w.wait(120)
    assert 0 not in [codes["front"], codes["prefill-0@0"], codes["prefill-0@1"]]
    who, why = {  # the first to notice tells: a collective breaks, or a connection falls silent
        "rank": ("front", r"ranks \['prefill-0\.1'\] are lost|'prefill-0' failed: .*198\.51"),
        "front": ("decode-0", "node: the front is gone"),
        "wire": ("front", r"ranks \[('prefill-0\.1'|'decode-0'|, )+\] are lost"),
    }[loss]
    assert re.search(why, w.log(who).read_text()), w.logs()
    assert w.left() == {"host-a": [], "host-b": []}


@pytest.mark.slow
def test_what_does_not_fit_says_so_and_the_front_names_who_is_missing(world):
    w = world("--pcp 2 --dcp 2")
    w.start_front(timeout=45)
    other = w.scratch / "other-key"
    other.write_bytes(b"0123456789abcdef")
    w.start_engine("prefill-0", [w.a])  # one rank of two
    w.start_engine("decode-0", [w.b], "--key-file", str(other))
    w.start(w.b, "layout", *w.node("decode-0"), "--decode-interleave", "2")
    w.start(w.b, "interface", *w.node("decode-0"), "--interface", "ib7")
    assert set(w.wait().values()) == {1}
    for name, why in (
        ("front", r"front: ranks \['decode-0', 'prefill-0', 'prefill-0\.1'\] did not join"),
        ("prefill-0", r"node: 1 ranks started for engine 'prefill-0', which has 2"),
        ("decode-0", r"node: rank 'decode-0': the front at tcp://\S+ holds another key"),
        ("layout", r"started from another configuration: decode_interleave 2, at the front 1"),
        ("interface", r"interface 'ib7', must be one with an address here: \{.*'eth0'"),
    ):
        assert re.search(why, w.log(name).read_text()), w.logs()
