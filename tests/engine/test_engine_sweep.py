"""Any deployment with any options of both engines equals one rank computing each request alone."""

import tempfile
from pathlib import Path

import pytest
from engine_scenes import assert_right, scenes, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CI = max(40, settings.default.max_examples // 20)
THOROUGH = 500


def _check(scene):
    tokens, hits = serve(scene)
    assert_right(scene, tokens)
    return hits


@given(st.data())
@settings(max_examples=CI, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_engines_equal_one_rank(data):
    with tempfile.TemporaryDirectory(prefix="kvflow-tier-") as directory:
        _check(data.draw(scenes(lambda: Path(directory))))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=THOROUGH, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_engines_equal_one_rank_thoroughly(data):
    with tempfile.TemporaryDirectory(prefix="kvflow-tier-") as directory:
        _check(data.draw(scenes(lambda: Path(directory))))
