"""Says which tiers a run leaves out, and how to run them."""

import pytest

_TIERS = ("slow", "gpu")
_left_out = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_left_out] = dict.fromkeys(_TIERS, 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    before = list(items)
    result = yield
    kept = set(items)
    for item in before:
        for tier in _TIERS:
            if item not in kept and item.get_closest_marker(tier):
                config.stash[_left_out][tier] += 1
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells what it left out; all of them leave out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[_left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    node.config.stash[_left_out].update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for tier, number in config.stash[_left_out].items():
        if number:
            terminalreporter.write_line(
                f"tier left out: {tier}, {number} tests (make test-{tier})", yellow=True
            )
