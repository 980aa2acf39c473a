"""Covering rows against every row listed."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvflow.testing import covering_rows, pairs_of


@st.composite
def models(draw):
    """Up to 5 factors of up to 3 values, and which combinations of up to 3 of them are unlawful."""
    names = "abcde"[: draw(st.integers(2, 5))]
    factors = {name: list(range(draw(st.integers(1, 3)))) for name in names}
    rules = []
    for _ in range(draw(st.integers(0, 3))):
        some = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        combinations = list(itertools.product(*(factors[name] for name in some)))
        bad = draw(st.sets(st.sampled_from(combinations), max_size=len(combinations)))
        rules.append(_rule(some, bad))
    return factors, rules


def _rule(names, bad):
    """A function with these parameters."""
    scope = {"bad": bad}
    args = ", ".join(names)
    return eval(f"lambda {args}: ({args},) not in bad", scope)


def _every_row(factors, rules):
    rows = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    return [row for row in rows if all(_holds(rule, row) for rule in rules)]


def _holds(rule, row):
    return rule(**{name: row[name] for name in rule.__code__.co_varnames})


def _pairs(rows, factors):
    """Read from the definition: two factors and the values that a row gives them."""
    return {
        ((a, row[a]), (b, row[b]))
        for row in rows
        for i, a in enumerate(factors)
        for b in list(factors)[i + 1 :]
    }


@given(models())
def test_every_lawful_pair_occurs_in_lawful_rows(model):
    factors, rules = model
    every = _every_row(factors, rules)
    if not every:
        with pytest.raises(ValueError, match="keep every rule"):
            covering_rows(factors, rules)
        return
    covering = covering_rows(factors, rules)
    assert all(row in every for row in covering.rows)
    assert _pairs(covering.rows, factors) == _pairs(every, factors) == covering.pairs
    unlawful = _pairs(_every_row(factors, []), factors) - covering.pairs
    assert covering.unlawful == unlawful
    assert covering == covering_rows(factors, rules)


@given(models(), st.data())
def test_what_is_included_occurs(model, data):
    factors, rules = model
    every = _every_row(factors, rules)
    assume(every)
    some = data.draw(st.lists(st.sampled_from(sorted(factors)), min_size=1, unique=True))
    wanted = {name: data.draw(st.sampled_from(factors[name])) for name in some}
    if not any(wanted.items() <= row.items() for row in every):
        with pytest.raises(ValueError, match="breaks a rule in every row"):
            covering_rows(factors, rules, include=[wanted])
        return
    covering = covering_rows(factors, rules, include=[wanted])
    assert any(wanted.items() <= row.items() for row in covering.rows)
    assert _pairs(covering.rows, factors) == _pairs(every, factors)


def test_what_is_included_stays_though_its_pairs_are_met_elsewhere():
    factors = {name: [0, 1] for name in "abc"}
    every = _every_row(factors, [])
    assert sorted(map(str, covering_rows(factors, include=every).rows)) == sorted(map(str, every))


@given(models())
def test_no_row_is_spare(model):
    factors, rules = model
    assume(_every_row(factors, rules))
    rows = covering_rows(factors, rules).rows
    for row in rows:
        others = [other for other in rows if other is not row]
        assert _pairs(rows, factors) - _pairs(others, factors)


@pytest.mark.parametrize(
    ("options", "values", "most"), [(4, 3, 9), (13, 3, 21), (10, 2, 9), (24, 3, 27)]
)
def test_rows_are_few(options, values, most):
    """9 is the least for four factors of three values (an orthogonal array); the published
    heuristics give 15 to 20 rows for 13 factors of three."""
    factors = {f"f{i}": list(range(values)) for i in range(options)}
    covering = covering_rows(factors)
    assert len(covering.rows) <= most
    assert len(covering.pairs) == options * (options - 1) // 2 * values**2


def test_pairs_of_a_row():
    row = {"a": 1, "b": "x", "c": None}
    one, two, three = row.items()
    assert pairs_of(row) == [(one, two), (one, three), (two, three)]


@pytest.mark.parametrize(
    ("factors", "rules", "include", "said"),
    [
        ({"a": [1, 2]}, [], [], "1 factors have no pairs, must be at least 2"),
        ({"a": [1], "b": []}, [], [], r"factor 'b' has values \(\), must be some"),
        ({"a": [1], "b": [0, 2, 0]}, [], [], r"factor 'b' has values \(0, 2, 0\)"),
        ({"a": [1], "b": [2]}, [lambda c: c], [], r"a rule names \['c'\], factors are"),
        ({"a": [1], "b": [2]}, [], [{"c": 1}], "include has 'c' = 1, which is no value"),
        ({"a": [1], "b": [2]}, [], [{"b": 3}], "include has 'b' = 3, which is no value"),
    ],
)
def test_what_makes_no_sense_is_refused(factors, rules, include, said):
    with pytest.raises(ValueError, match=said):
        covering_rows(factors, rules, include=include)
