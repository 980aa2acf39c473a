"""The command line of a rank that joins: what it resolves, and what it refuses before it moves."""

import os

import pytest
from launch_world import TINY, config

from kvflow.engine.curve import Curve
from kvflow.errors import KvflowError, LayoutError
from kvflow.launch.hosts import _TierCheck, engine_ranks, front_host
from kvflow.launch.node import main, parse_node, settle
from kvflow.launch.options import parse_options

FLAGS = f"--model {TINY} --pcp 2 --tp 2 --dcp 2 --decode-ranks 2 --decode-dcp 2"


@pytest.fixture
def words(tmp_path):
    """The words of a lawful command line, with changes."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)

    def build(**changes):
        flags = {"front": "tcp://127.0.0.1:5555", "key_file": key, "engine": "prefill-0"} | changes
        ours = [f"--{n.replace('_', '-')}={v}" for n, v in flags.items() if v is not None]
        return [*ours, *FLAGS.split()]

    return build


def parsed(words, **environ):
    return parse_node(words, {n: str(v) for n, v in environ.items()}, default_model=TINY)


def test_a_rank_has_the_name_that_torchrun_counts_and_the_interface_towards_the_front(words):
    options = parsed(words(), RANK=2, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2)
    assert options.name == engine_ranks(options.launch)["prefill-0"][2]
    assert (options.interface, options.host_name) == ("lo", "127.0.0.1")
    assert options.local_size == 2
    assert options.launch.tp == 2
    decode = parsed(words(engine="decode-1", host_name="rack7"), RANK=1, WORLD_SIZE=2)
    assert decode.name == "decode-1.1"
    assert decode.host_name == "rack7"


@pytest.mark.parametrize(
    ("changes", "environ", "why"),
    [
        ({"engine": "prefill-9"}, {}, r"engine 'prefill-9', must be one of \['prefill-0', 'dec"),
        ({}, {"WORLD_SIZE": "3"}, "3 ranks started for engine 'prefill-0', which has 4"),
        ({"interface": "ib7"}, {}, r"interface 'ib7', must be one with an address here: .*'lo'"),
        ({"front": "192.0.2.1"}, {}, r"front '192\.0\.2\.1', must be tcp://<host>:<port>"),
        ({"front": "tcp://no.such.invalid:5"}, {}, "host 'no.such.invalid' cannot be reached"),
        ({"key_file": "/nowhere"}, {}, "key file '/nowhere' cannot be read: .*No such file"),
        ({"transport": "in-process"}, {}, "transport 'in-process', must be 'nixl' between hosts"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value(words, changes, environ, why, capsys):
    with pytest.raises(KvflowError, match=why):
        _ = parse_node(words(**changes), environ, default_model=TINY).name
    if not environ:
        assert main(words(**changes)) == 1
        assert capsys.readouterr().err.startswith("kvflow.launch.node: ")


def test_a_short_key_is_refused(words, tmp_path):
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(KvflowError, match="must be at least 16 bytes, is 5"):
        parsed(words())


def test_gloo_and_ucx_are_told_the_interface_unless_the_user_did(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that the end of the test takes it away again
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    settle("eth7", 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_the_front_listens_at_an_address_of_its_host_alone():
    assert front_host("tcp://127.0.0.1:5555") == "127.0.0.1"
    for address in ("tcp://127.0.0.1", "ipc://x", "tcp://*:5555", "tcp://127.0.0.1:70000"):
        with pytest.raises(KvflowError, match="must be tcp://<IPv4 of this host>:<port>"):
            front_host(address)
    for address in ("tcp://0.0.0.0:5555", "tcp://192.0.2.77:5555"):
        with pytest.raises(KvflowError, match="must be that of an interface here"):
            front_host(address)


def test_a_host_tier_wants_the_prefill_ranks_on_the_fronts_host():
    launch = config(
        pcp=2, prefix=parse_options(["--host-tier-gib", "1"], default_model=TINY).launch.prefix
    )
    hosts = dict.fromkeys(launch.prefill_names, "10.0.0.1")
    _TierCheck(launch, "10.0.0.1")(hosts)
    last = launch.prefill_names[-1]
    with pytest.raises(LayoutError, match=rf"host tier .* not \{{'{last}': '10\.0\.0\.2'\}}"):
        _TierCheck(launch, "10.0.0.1")(hosts | {last: "10.0.0.2"})
    _TierCheck(config(pcp=2), "10.0.0.1")(hosts | {last: "10.0.0.2"})


def test_listening_needs_a_key_and_a_key_something_to_listen_at():
    for words in (["--listen", "tcp://127.0.0.1:5555"], ["--key-file", "key"]):
        with pytest.raises(LayoutError, match="one needs the other"):
            parse_options(words, default_model=TINY)


def test_a_key_is_not_shown():
    assert "kkkk" not in repr(Curve(b"k" * 32))
