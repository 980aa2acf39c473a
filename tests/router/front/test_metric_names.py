"""K07: a metric's name says of what and in which unit, and what fails is counted."""

import re
from pathlib import Path

from front_servers import routed
from front_world import CachingEngine, log_of
from prometheus_client.parser import text_string_to_metric_families

from kvflow.server.events import log_metrics
from kvflow.server.metrics import ServerMetrics, exposition

SCOPES = {
    "http": "calls of a server",
    "choice": "each choice of a call",
    "choices": "choices of a server",
    "kv_events": "an engine",
    "router_request": "each call of a client",
    "router": "the front",
    "router_server": "each server, by its label",
}
UNITS = "seconds|tokens|requests|choices|blocks|runs|readers|changes|events"
COUNTED = "retries|departures|snapshots|failures|running|in_rotation"
NAME = re.compile(rf"kvflow_(?:{'|'.join(SCOPES)})_?(?:\w+_)?(?:{UNITS}|{COUNTED})?(?:_total)?")


def lawful(name, kind):
    """Whether a family's name has a scope and a unit, and `_total` exactly if it is a counter."""
    unit = re.search(rf"(?:_|^kvflow_)(?:{UNITS}|{COUNTED})(?:_total)?$", name)
    return bool(NAME.fullmatch(name) and unit) and (kind == "counter") == name.endswith("_total")


def test_k07_every_name_has_a_scope_and_a_unit(tokenizer):
    async def scenario(world):
        await world.all_in()
        await world.complete()
        return (await world.client.get("/metrics")).text

    text = routed(tokenizer, scenario, engines=1)
    front = list(text_string_to_metric_families(text))
    server = exposition([*ServerMetrics().snapshot(), *log_metrics(log_of())])
    families = [*front, *text_string_to_metric_families(server)]
    wrong = [
        one.name
        for one in families
        if not lawful(one.name + ("_total" if one.type == "counter" else ""), one.type)
    ]
    assert not wrong
    assert len(families) == 14 + 12
    page = (Path(__file__).parents[3] / "docs" / "router-front.md").read_text()
    assert not [one.name for one in front if f"`{one.name}" not in page]
    for one in front:  # what is said of a server bears its name
        if one.name.startswith("kvflow_router_server_"):
            assert all("server" in sample.labels for sample in one.samples)


def test_k07_names_without_a_scope_a_unit_or_a_kind_are_seen():
    assert lawful("kvflow_router_server_held_blocks", "gauge")
    assert not lawful("kvflow_time_to_first_token_seconds", "histogram")
    assert not lawful("kvflow_router_server_prompt_total", "counter")
    assert not lawful("kvflow_router_server_prompt_tokens", "counter")
    assert not lawful("kvflow_router_hits", "gauge")


def test_k07_failures_are_counted_where_they_happen(tokenizer):
    engine = CachingEngine(tokenizer.vocab_size, fail_at=1)

    async def scenario(world):
        await world.all_in()
        await world.complete(n=2, max_tokens=4)
        from httpx import AsyncClient

        async with AsyncClient(base_url=world.servers[0].url) as direct:
            return (await world.client.get("/metrics")).text, (await direct.get("/metrics")).text

    front, server = routed(tokenizer, scenario, engines=[engine])
    assert 'kvflow_router_requests_total{endpoint="completions",outcome="error"} 1.0' in front
    assert 'outcome="error"} 1.0' in next(
        line for line in front.splitlines() if "server_requests_total{" in line
    )
    assert 'kvflow_http_requests_total{endpoint="completions",outcome="error"} 1.0' in server
    failed = re.search(r'kvflow_choices_total{finish_reason="failed"} (\d)', server)
    assert failed
    assert int(failed[1]) >= 1
