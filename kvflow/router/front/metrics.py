"""What the router's front counts. A name says of what (a request of a client, or a server) and in
which unit; the label `server` is the server's address."""

from functools import partial

from attrs import define, field

from kvflow.engine.api import Metric
from kvflow.server.metrics import Histogram, Total

_ROUTE_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_FIRST_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SERVER = ("server",)


@define(eq=False)
class FrontMetrics:
    """Counters and histograms of one front."""

    requests: Total = field(
        factory=partial(
            Total,
            "kvflow_router_requests_total",
            "Calls of clients by outcome, each counted once.",
            ("endpoint", "outcome"),
        )
    )
    retries: Total = field(
        factory=partial(
            Total,
            "kvflow_router_request_retries_total",
            "Calls that went to a second server because the first was lost before it answered.",
        )
    )
    forwarded: Total = field(
        factory=partial(
            Total,
            "kvflow_router_server_requests_total",
            "Calls given to a server, by outcome; a retried call is counted on both.",
            ("server", "outcome"),
        )
    )
    running: Total = field(
        factory=partial(
            Total,
            "kvflow_router_server_running_requests",
            "Calls that a server has now.",
            _SERVER,
            "gauge",
        )
    )
    prompt_tokens: Total = field(
        factory=partial(
            Total,
            "kvflow_router_server_prompt_tokens_total",
            "Tokens of prompts given to a server; of several prompts of a call, the longest's.",
            _SERVER,
        )
    )
    hit_tokens: Total = field(
        factory=partial(
            Total,
            "kvflow_router_server_hit_tokens_total",
            "Those of these tokens that the server held on some tier, as its events told.",
            _SERVER,
        )
    )
    departures: Total = field(
        factory=partial(
            Total,
            "kvflow_router_server_departures_total",
            "Times that a server was taken out of the rotation.",
            _SERVER,
        )
    )
    snapshots: Total = field(
        factory=partial(
            Total,
            "kvflow_router_server_snapshots_total",
            "Snapshots of KV events that were read to the end.",
            _SERVER,
        )
    )
    feed_failures: Total = field(
        factory=partial(
            Total,
            "kvflow_router_server_feed_failures_total",
            "Streams of KV events that ended or could not be relied on.",
            _SERVER,
        )
    )
    route: Histogram = field(
        factory=partial(
            Histogram,
            "kvflow_router_request_route_seconds",
            "Of a call: from its body to the choice of a server, tokenizing included.",
            _ROUTE_BOUNDS,
        )
    )
    first_byte: Histogram = field(
        factory=partial(
            Histogram,
            "kvflow_router_request_first_byte_seconds",
            "Of a call: from its arrival to the first byte of the server's answer.",
            _FIRST_BOUNDS,
        )
    )

    def know(self, server: str) -> None:
        """Numbers of a server are there from the start, as 0."""
        for one in (self.running, self.prompt_tokens, self.hit_tokens, self.departures):
            one.add(0, server)
        for one in (self.snapshots, self.feed_failures):
            one.add(0, server)
        for outcome in ("ok", "lost"):
            self.forwarded.add(0, server, outcome)

    def snapshot(self) -> list[Metric]:
        """Every family, in a fixed order."""
        totals = [self.requests, self.retries, self.forwarded, self.running, self.prompt_tokens]
        totals += [self.hit_tokens, self.departures, self.snapshots, self.feed_failures]
        times = [self.route, self.first_byte]
        return [total.metric() for total in totals] + [one.metric() for one in times]
