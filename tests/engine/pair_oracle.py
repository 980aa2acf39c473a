"""Which pairs of values some lawful row has, by listing every row: shares nothing with the
generator of rows. What no rule ties together is listed apart."""

import inspect
import itertools


def lawful_pairs(factors, rules):
    """Pairs of (factor, value) as frozensets."""
    listed = [_rows(factors, names, rules) for names in _islands(factors, rules)]
    found = set()
    for rows in listed:
        for row in rows:
            found.update(frozenset(pair) for pair in itertools.combinations(row, 2))
    for some, others in itertools.combinations(listed, 2):
        here, there = ({half for row in rows for half in row} for rows in (some, others))
        found.update(frozenset(pair) for pair in itertools.product(here, there))
    return found


def met(rows):
    """The pairs of values that rows have."""
    return {
        frozenset([(a, row[a]), (b, row[b])])
        for row in rows
        for a, b in itertools.permutations(row, 2)
    }


def is_lawful(row, rules):
    return all(rule(*(row[name] for name in _named(rule))) for rule in rules)


def _named(rule):
    return list(inspect.signature(rule).parameters)


def _islands(factors, rules):
    islands = [{name} for name in factors]
    for rule in rules:
        touched = [island for island in islands if island & set(_named(rule))]
        islands = [i for i in islands if i not in touched] + [set().union(*touched)]
    return [sorted(island) for island in islands if island]


def _rows(factors, names, rules):
    """Every lawful assignment of these factors: each value in turn, as an odometer does; a rule is
    asked as soon as all that it names is there."""
    rows = [()]
    for count, name in enumerate(names, 1):
        asked = [r for r in rules if name in _named(r) and set(_named(r)) <= set(names[:count])]
        longer = [(*row, (name, value)) for row in rows for value in factors[name]]
        rows = [row for row in longer if is_lawful(dict(row), asked)]
    return rows
