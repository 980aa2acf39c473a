"""Covering rows: few combinations of options in which every lawful pair of values occurs.

Most faults of an interplay need two options, not all of them (D. R. Kuhn et al., IEEE Transactions
on Software Engineering 30(6), 2004). Rows are built one at a time, each taking the values that meet
the most pairs not met yet (D. M. Cohen et al., The AETG system, ibid. 23(7), 1997), with a search
that never leaves a row without a lawful end.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations

from attrs import define, field, frozen

Row = dict[str, Hashable]
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]

_TRIES = 12  # rows built for each one that is kept


@frozen
class Covering:
    """rows: full assignments. pairs: the lawful pairs of values, all of which occur in them; the
    factors of a pair stand in the order of the factors. unlawful: pairs that no lawful row has."""

    rows: tuple[Row, ...]
    pairs: frozenset[Pair]
    unlawful: frozenset[Pair]


def pairs_of(row: Mapping[str, Hashable]) -> list[Pair]:
    """The pairs of values that a row meets, in the row's order.

    >>> pairs_of({"a": 1, "b": 2})
    [(('a', 1), ('b', 2))]
    """
    return list(combinations(row.items(), 2))


def covering_rows(
    factors: Mapping[str, Sequence[Hashable]],
    rules: Iterable[Callable[..., bool]] = (),
    *,
    include: Iterable[Mapping[str, Hashable]] = (),
) -> Covering:
    """Rows in which every pair of values that some lawful row has occurs; the same for the same
    input. A rule is a function whose parameters are names of factors: a row is lawful if every
    rule holds. `include`: assignments of some factors, each of which must occur too.

    Raises `ValueError` for fewer than two factors, one without values or with the same value
    twice, rules that no row keeps, a rule or an inclusion of what is no factor, and an inclusion
    that no lawful row has.

    >>> covering = covering_rows(
    ...     {"ranks": [1, 2], "dealt": [False, True], "draft": [0, 3]},
    ...     [lambda ranks, dealt: ranks > 1 or not dealt],
    ... )
    >>> for row in covering.rows:
    ...     print(*row.values())
    1 False 0
    2 False 3
    2 True 0
    1 False 3
    2 True 3
    >>> covering.unlawful
    frozenset({(('ranks', 1), ('dealt', True))})
    """
    search = _Search.of(factors, rules)
    everything = [
        ((a, v), (b, w))
        for a, b in combinations(search.factors, 2)
        for v in search.factors[a]
        for w in search.factors[b]
    ]
    lawful = [pair for pair in everything if search.extends(dict(pair))]
    missing = _Missing(lawful, list(search.factors))
    wanted = [_checked(search, one) for one in include]
    rows: list[Row] = []
    for start in wanted:
        if not any(start.items() <= row.items() for row in rows):
            rows.append(missing.take(_best(search, missing, [start])))
    while missing.pairs:
        rows.append(missing.take(_best(search, missing, missing.starts())))
    return Covering(
        tuple(_needed(rows, wanted)), frozenset(lawful), frozenset(everything) - frozenset(lawful)
    )


def _checked(search: "_Search", start: Mapping[str, Hashable]) -> Row:
    for name, value in start.items():
        if name not in search.factors or value not in search.factors[name]:
            raise ValueError(f"include has {name!r} = {value!r}, which is no value of a factor")
    if not search.extends(start):
        raise ValueError(f"include has {dict(start)}, which breaks a rule in every row")
    return dict(start)


def _best(search: "_Search", missing: "_Missing", starts: Sequence[Row]) -> Row:
    """The row that meets the most, of those built from each start in several orders."""
    names = list(search.factors)
    best, most = Row(), -1
    for i in range(_TRIES):
        at = i * len(names) // _TRIES
        row = _built(search, missing, starts[i % len(starts)], names[at:] + names[:at])
        gain = sum(pair in missing.pairs for pair in pairs_of(row))
        if gain > most:
            best, most = row, gain
    return best


def _built(search: "_Search", missing: "_Missing", start: Row, order: Sequence[str]) -> Row:
    row = dict(start)
    for name in order:
        if name in row:
            continue
        options = [v for v in search.factors[name] if search.extends({**row, name: v}, name)]
        row[name] = max(options, key=partial(missing.worth, row, name))
    return {name: row[name] for name in search.factors}


def _needed(rows: Sequence[Row], wanted: Sequence[Row]) -> list[Row]:
    """Without rows all of whose pairs other rows have too, the last ones first."""
    times = Counter(pair for row in rows for pair in pairs_of(row))
    kept = list(rows)
    for row in reversed(rows):
        spare = all(times[pair] > 1 for pair in pairs_of(row))
        others = [other for other in kept if other is not row]
        if spare and all(any(w.items() <= o.items() for o in others) for w in wanted):
            times.subtract(pairs_of(row))
            kept = others
    return kept


class _Missing:
    """The pairs that no row has met yet, and how many of them each value is in."""

    def __init__(self, pairs: Iterable[Pair], names: Sequence[str]) -> None:
        self.pairs = dict.fromkeys(pairs)
        self._at = {name: i for i, name in enumerate(names)}
        self._left = Counter(half for pair in self.pairs for half in pair)

    def worth(self, row: Row, name: str, value: Hashable) -> tuple[int, int]:
        """How many missing pairs the value meets with what the row has, then with anything."""
        mine = (name, value)
        met = 0
        for other in row.items():
            first = self._at[name] < self._at[other[0]]
            met += ((mine, other) if first else (other, mine)) in self.pairs
        return met, self._left[mine]

    def starts(self) -> list[Row]:
        """Missing pairs to begin a row with, evenly out of all of them."""
        step = max(1, len(self.pairs) // _TRIES)
        return [dict(pair) for pair in list(self.pairs)[::step]]

    def take(self, row: Row) -> Row:
        for pair in pairs_of(row):
            if pair in self.pairs:
                del self.pairs[pair]
                self._left.subtract(pair)
        return row


@define(eq=False)
class _Search:
    """Whether a partial row has a lawful end. Only factors that rules tie together, directly or
    through others, have to be looked at together: `tied` has them for each factor."""

    factors: dict[str, tuple[Hashable, ...]]
    rules: list[tuple[tuple[str, ...], Callable[..., bool]]]
    tied: dict[str, tuple[str, ...]]
    _known: dict[tuple[tuple[str, ...], frozenset[tuple[str, Hashable]]], bool] = field(
        factory=dict
    )

    @classmethod
    def of(
        cls, factors: Mapping[str, Sequence[Hashable]], rules: Iterable[Callable[..., bool]]
    ) -> "_Search":
        values = {name: tuple(options) for name, options in factors.items()}
        if len(values) < 2:
            raise ValueError(f"{len(values)} factors have no pairs, must be at least 2")
        for name, options in values.items():
            if not options or len(set(options)) < len(options):
                raise ValueError(f"factor {name!r} has values {options}, must be some, all unequal")
        named = [(tuple(inspect.signature(rule).parameters), rule) for rule in rules]
        for names, _ in named:
            if unknown := set(names) - set(values):
                raise ValueError(f"a rule names {sorted(unknown)}, factors are {list(values)}")
        search = cls(values, named, _tied(values, [names for names, _ in named]))
        for group in set(search.tied.values()):
            if not search._ends({}, group):
                raise ValueError(f"no values of {list(group)} keep every rule")
        return search

    def extends(self, row: Mapping[str, Hashable], *changed: str) -> bool:
        """Whether a lawful row has all of `row`, which without its `changed` factors, by default
        all, is known to."""
        groups = {self.tied[name] for name in changed or row}
        return all(
            self._ends({name: row[name] for name in group if name in row}, group)
            for group in groups
        )

    def _ends(self, row: Row, group: tuple[str, ...]) -> bool:
        key = group, frozenset(row.items())
        if key not in self._known:
            self._known[key] = self._lawful(row) and self._continues(row, group)
        return self._known[key]

    def _continues(self, row: Row, group: tuple[str, ...]) -> bool:
        name = next((n for n in group if n not in row), None)
        return name is None or any(
            self._ends({**row, name: value}, group) for value in self.factors[name]
        )

    def _lawful(self, row: Row) -> bool:
        """Every rule holds all of whose factors are there."""
        return all(
            rule(**{name: row[name] for name in names})
            for names, rule in self.rules
            if row.keys() >= set(names)
        )


def _tied(names: Iterable[str], together: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    groups = {name: {name} for name in names}
    for some in together:
        joined = set[str]().union(*(groups[name] for name in some))
        groups |= dict.fromkeys(joined, joined)
    return {name: tuple(n for n in groups if n in group) for name, group in groups.items()}
