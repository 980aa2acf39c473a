"""Hypothesis profiles: ``quick`` (default), ``thorough`` (make laws) and ``mutants``; and the count
of the pairs of layouts on which a law was checked."""

import pytest
from hypothesis import HealthCheck, Phase, settings

_SLOW_MACHINES = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "quick", max_examples=60, deadline=None, suppress_health_check=_SLOW_MACHINES
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
        self.kept, self.broken, self.distinct = 0, 0, 0
        self._seen: set[int] = set()

    def check(self, case, law) -> None:
        """Runs the law and counts how it ends."""
        key = hash((case.src.layout, case.dst.layout, case.tokens))
        self.distinct += key not in self._seen
        self._seen.add(key)
        self.broken += 1
        law()
        self.broken, self.kept = self.broken - 1, self.kept + 1

    def counts(self) -> list[int]:
        return [self.kept, self.broken, self.distinct]

    def add(self, counts: list[int]) -> None:
        """What another worker has counted."""
        self.kept, self.broken, self.distinct = map(sum, zip(self.counts(), counts, strict=True))


_pairs = pytest.StashKey[LawPairs]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_pairs] = LawPairs()


@pytest.fixture(scope="session")
def law_pairs(pytestconfig: pytest.Config) -> LawPairs:
    return pytestconfig.stash[_pairs]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["law_pairs"] = session.config.stash[_pairs].counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    counts = getattr(node, "workeroutput", {}).get("law_pairs", [0, 0, 0])
    node.config.stash[_pairs].add(counts)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    pairs = config.stash[_pairs]
    if pairs.kept or pairs.broken:
        terminalreporter.write_line(
            f"laws: kept on {pairs.kept} drawn pairs of layouts ({pairs.distinct} distinct), "
            f"broken on {pairs.broken}"
        )
