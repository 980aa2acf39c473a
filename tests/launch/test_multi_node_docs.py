"""docs/multi-node.md and the recipes it names: commands run as they stand, YAML and Ray's command
lines are read by the very parsers that would get them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import yaml
from launch_world import ROOT, TINY
from netns import NoNamespacesError, two_hosts
from torch.distributed.run import get_args_parser
from two_hosts_world import World

from kvflow.launch.config import LaunchConfig
from kvflow.launch.file import to_toml
from kvflow.launch.hosts import engine_ranks
from kvflow.launch.keys import tree_of
from kvflow.launch.node import parse_node
from kvflow.launch.options import parse_options

sys.path.append(str(ROOT / "examples"))

import start_with_ray

PAGE = (ROOT / "docs" / "multi-node.md").read_text()
COMMANDS = [
    block.strip() for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
]


def test_the_page_has_the_commands_that_are_run_here():
    key, front, first, second, decode, client = COMMANDS
    assert key.startswith("head -c 32 /dev/urandom > kvflow.key")
    assert front.startswith("python examples/serve_glm.py --listen tcp://198.51.100.1:5555")
    assert first.replace("--node-rank 0", "--node-rank 1") == second
    assert decode.startswith("python -m kvflow.launch.node")
    assert client.startswith("curl http://198.51.100.1:8000/")


@pytest.mark.slow
@pytest.mark.processes
def test_the_commands_of_the_page_run_as_they_stand(tmp_path):
    try:
        made = two_hosts()
        hosts = made.__enter__()
    except NoNamespacesError as error:
        pytest.skip(f"no namespaces to make hosts of: {error}")
    world = World(hosts, tmp_path, "")
    a, b = hosts
    try:
        _play(world, a, b, tmp_path)
    finally:
        world.end()
        made.__exit__(None, None, None)


def _play(world, a, b, scratch):
    """Runs the page in a directory that looks like a checkout."""
    (scratch / "examples").symlink_to(ROOT / "examples")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    key, front, first, second, decode, client = COMMANDS
    subprocess.run(["sh", "-c", key], cwd=scratch, check=True)
    for host, name, line in (
        (a, "front", front),
        (a, "rank 0", first),
        (b, "rank 1", second),
        (b, "decode", decode),
    ):
        world.start_words(host, name, "sh", "-c", f"exec {line}", PATH=path)
    world.wait_for("front", "serving ")
    answer = subprocess.run(
        b.command("sh", "-c", f"{client} --silent --noproxy '*'"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    choice = json.loads(answer.stdout)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"]
    os.kill(world.find(a, "--listen"), signal.SIGTERM)
    assert set(world.wait(120).values()) == {0}, world.logs()
    assert world.left() == {"host-a": [], "host-b": []}


# --- Kubernetes

LAUNCH = LaunchConfig(TINY, pcp=16, dcp=16, prefill_engines=2, decode_ranks=8, max_model_len=512)


@pytest.fixture
def pods(tmp_path, monkeypatch):
    """The objects of the YAML by kind and name, and words of a container with its variables put in
    and its files made."""
    files = tmp_path / "etc"
    files.mkdir()
    (files / "kvflow.toml").write_text(to_toml(tree_of(LAUNCH)))
    (files / "key").write_bytes(b"k" * 32)
    monkeypatch.setattr("kvflow.launch.node.interface_towards", lambda host: "lo")
    monkeypatch.setattr("kvflow.launch.node.address_of", {"eth0": "198.51.100.9"}.__getitem__)

    def words(container, **values):
        named = {variable["name"] for variable in container.get("env", [])}
        lines = []
        for word in [*container["command"], *container["args"]]:
            for name in re.findall(r"\$\((\w+)\)", word):
                assert name in named or name.startswith("LWS_"), f"{word}: nobody sets {name}"
                word = word.replace(f"$({name})", str(values[name]))
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            for place in re.findall(r"=(/etc/\S+)/[^/]+$", word):
                assert place in mounts, f"{word}: nothing is mounted there"
                word = word.replace(place, str(files))
            lines.append(word)
        return lines

    objects = yaml.safe_load_all((ROOT / "examples" / "leaderworkerset.yaml").read_text())
    return {(o["kind"], o["metadata"]["name"]): o["spec"] for o in objects}, words


def _container(template):
    """The one container of a pod, whose mounts its volumes have."""
    (container,) = template["spec"]["containers"]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    return container


def test_the_front_of_the_yaml_listens_where_its_service_leads(pods):
    objects, words = pods
    pod = objects["Deployment", "kvflow-front"]["template"]
    container = _container(pod)
    python, script, *flags = words(container, POD_IP="198.51.100.7")
    assert (python, (ROOT / script).exists()) == ("python", True)
    options = parse_options(flags, default_model=TINY)
    assert options.launch == LAUNCH
    service = objects["Service", "kvflow-front"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"]: port["port"] for port in service["ports"]}
    assert options.listen == f"tcp://198.51.100.7:{ports['ranks']}"
    assert options.server.port == ports["http"]
    assert {p["containerPort"] for p in container["ports"]} == set(ports.values())
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": ports["http"]}


def test_the_pods_of_the_yaml_are_the_ranks_of_the_deployment(pods):
    objects, words = pods
    names = []
    for name in "kvflow-prefill", "kvflow-decode":
        spec = objects["LeaderWorkerSet", name]
        template = spec["leaderWorkerTemplate"]
        container, size = _container(template["workerTemplate"]), template["size"]
        for group in range(spec["replicas"]):
            for pod in range(size):
                values = {"GROUP": group, "LWS_GROUP_SIZE": size, "LWS_WORKER_INDEX": pod}
                values["LWS_LEADER_ADDRESS"] = f"{name}-{group}.{name}"
                names += _ranks(words(container, **values), pod)
    assert sorted(names) == sorted(n for ranks in engine_ranks(LAUNCH).values() for n in ranks)


def _ranks(words, pod):
    """The names of the ranks that a pod's command starts."""
    if words[0] == "python":
        assert words[1:3] == ["-m", "kvflow.launch.node"]
        return [_resolved(words[3:], {})]
    assert words[0] == "torchrun"
    run = get_args_parser().parse_args(words[1:])
    assert (run.module, run.training_script, run.node_rank) == (True, "kvflow.launch.node", pod)
    assert run.master_addr
    here, hosts = int(run.nproc_per_node), int(run.nnodes)
    ranks = [pod * here + local for local in range(here)]
    environ = {"WORLD_SIZE": str(here * hosts), "LOCAL_WORLD_SIZE": str(here)}
    return [_resolved(run.training_script_args, environ | {"RANK": str(r)}) for r in ranks]


def _resolved(words, environ):
    options = parse_node(words, environ, default_model=TINY)
    assert options.launch == LAUNCH
    assert options.front == "tcp://kvflow-front:5555"
    assert options.interface == "eth0"
    return options.name


# --- Ray


def test_rays_command_lines_start_every_rank_once(tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    flags = ["--front", "tcp://127.0.0.1:5555", "--key-file", str(tmp_path / "key")]
    flags += shlex.split(f"--model {TINY} --pcp 4 --dcp 2 --decode-ranks 2 --decode-dcp 2")
    engines = engine_ranks(parse_options(flags[4:], default_model=TINY).launch)
    for engine, names in engines.items():
        hosts, here = start_with_ray.torchrun(len(names), 2)
        found = []
        for host in range(hosts):
            line = start_with_ray.command(host, hosts, here, "127.0.0.1", 29500, engine, flags)
            assert line[1:3] == ["-m", "torch.distributed.run"]
            run = get_args_parser().parse_args(line[3:])
            assert run.training_script == "kvflow.launch.node"
            for local in range(here):
                environ = {"RANK": str(host * here + local), "WORLD_SIZE": str(len(names))}
                found.append(parse_node(run.training_script_args, environ, default_model=TINY).name)
        assert found == list(names)


def test_hosts_that_ranks_do_not_fill_are_refused():
    assert start_with_ray.torchrun(16, 8) == (2, 8)
    assert start_with_ray.torchrun(1, 8) == (1, 1)
    with pytest.raises(ValueError, match="6 ranks fill no hosts of 4"):
        start_with_ray.torchrun(6, 4)
