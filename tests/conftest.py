"""Hypothesis profiles: ``quick`` (default), ``ci`` (a little less, drawing the same examples each
time), ``thorough`` (make laws) and ``mutants``; and the count of the pairs of layouts on which a
law was checked."""

import hashlib

import pytest
from hypothesis import HealthCheck, Phase, settings

_SLOW_MACHINES = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "quick", max_examples=60, deadline=None, suppress_health_check=_SLOW_MACHINES
)
settings.register_profile(
    "ci", settings.get_profile("quick"), max_examples=40, derandomize=True, database=None
)
settings.register_profile(
    "thorough", max_examples=1300, deadline=None, suppress_health_check=_SLOW_MACHINES
)
settings.register_profile(
    "mutants",
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=_SLOW_MACHINES,
)
settings.load_profile("quick")


class LawPairs:
    """Counts the drawn pairs of layouts that a law was checked on, in all workers together."""

    def __init__(self) -> None:
        self.kept, self.broken = 0, 0
        self.seen: set[bytes] = set()
        """Digests of the pairs and their token ranges: a pair that two workers draw is one."""

    def check(self, case, law) -> None:
        """Runs the law and counts how it ends."""
        said = repr((case.src.layout, case.dst.layout, case.tokens))
        self.seen.add(hashlib.blake2b(said.encode(), digest_size=8).digest())
        self.broken += 1
        law()
        self.broken, self.kept = self.broken - 1, self.kept + 1

    def told(self) -> tuple[int, int, bytes]:
        """What one worker tells the first process."""
        return self.kept, self.broken, b"".join(self.seen)

    def add(self, kept: int, broken: int, seen: bytes) -> None:
        """What another worker has counted."""
        self.kept, self.broken = self.kept + kept, self.broken + broken
        self.seen |= {seen[at : at + 8] for at in range(0, len(seen), 8)}


_pairs = pytest.StashKey[LawPairs]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_pairs] = LawPairs()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What has a longer time limit of its own comes first: a worker that met it last would let the
    others wait."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


@pytest.fixture(scope="session")
def law_pairs(pytestconfig: pytest.Config) -> LawPairs:
    return pytestconfig.stash[_pairs]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["law_pairs"] = session.config.stash[_pairs].told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    told = getattr(node, "workeroutput", {}).get("law_pairs", (0, 0, b""))
    node.config.stash[_pairs].add(*told)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    pairs = config.stash[_pairs]
    if pairs.kept or pairs.broken:
        terminalreporter.write_line(
            f"laws: kept on {pairs.kept} drawn pairs of layouts ({len(pairs.seen)} distinct), "
            f"broken on {pairs.broken}"
        )
