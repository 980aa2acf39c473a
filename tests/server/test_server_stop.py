"""The law of the stop holder, against an oracle that reads character by character."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.server.stop import StopHolder

few = st.text(alphabet="aab🙂", max_size=30)
stop_sets = st.lists(st.text(alphabet="aab🙂", min_size=1, max_size=5), max_size=4)


def expected(text, stops):
    """Grow the text by one character; the first time a stop ends it, cut the longest one off."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            longest = max(endings, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces_of(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(few, stop_sets, st.lists(st.integers(0, 40), max_size=8))
@example("aab", ["aab", "ab"], [1, 2])
@example("aaab", ["aab"], [1, 2, 3])
@example("ab🙂", ["b🙂a", "🙂🙂"], [])
def test_any_cut_gives_the_text_before_the_first_stop(text, stops, cuts):
    holder = StopHolder(tuple(stops))
    shown = ""
    for piece in pieces_of(text, cuts):
        shown += holder.push(piece)
        rest, _ = expected(text, stops)
        assert rest.startswith(shown)
    shown += holder.flush()
    assert (shown, holder.matched) == expected(text, stops)


@given(few, stop_sets)
def test_nothing_is_held_without_need(text, stops):
    holder = StopHolder(tuple(stops))
    shown = "".join(holder.push(char) for char in text)
    if holder.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_after_a_match_nothing_is_shown():
    holder = StopHolder(("END",))
    assert [holder.push("xE"), holder.push("ND tail"), holder.push("more")] == ["x", "", ""]
    assert holder.flush() == ""
    assert holder.matched == "END"
