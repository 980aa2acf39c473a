"""How a prefill step's token budget is dealt to the requests that run."""

from collections.abc import Sequence


def deal_budget(remaining: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """(index, tokens) of each request that takes part, the first one always among them.

    `remaining` are the tokens the requests lack, the oldest request's first. Half of the budget is
    the oldest's, so that it always moves on; the rest goes to the shortest remainders, so that
    short prompts do not wait behind a long one; what they leave is the oldest's again.

    >>> deal_budget([100, 30, 5], 40)
    [(0, 20), (2, 5), (1, 15)]
    """
    if not remaining:
        return []
    oldest, *others = remaining
    reserved = min(oldest, max(budget // 2, 1)) if others else oldest
    reserved = min(reserved, budget)
    free, shares = budget - reserved, []
    for index in sorted(range(1, len(remaining)), key=lambda i: remaining[i]):
        count = min(free, remaining[index])
        if count:
            shares.append((index, count))
            free -= count
    return [(0, min(oldest, reserved + free)), *shares]
