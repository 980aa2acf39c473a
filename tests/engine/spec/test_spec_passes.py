"""The passes of a step: what each opens, writes, chooses and attends to."""

import pytest
import torch
from attrs import evolve
from dense_kv import DenseKV, segment
from engine_world import one_rank_tokens
from spec_world import drive_all, layout_of, one_rank

from kvflow.comm import LocalComm
from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.spec.draft import Drafter
from kvflow.models import Segment
from kvflow.models.mtp import later_selection

GREEDY = SamplingParams(9, 0, ignore_eos=True)
REQUESTS = [Request("long", [3 + 7 * i for i in range(30)], GREEDY), Request("b", [9, 8], GREEDY)]
TOPK = 16


class Watched:
    """A memory that notes every step opened on it and what is called there."""

    def __init__(self, memory):
        self.memory, self.steps = memory, []

    def __getattr__(self, name):
        return getattr(self.memory, name)

    def open(self, requests, write_only):
        self.steps.append(WatchedStep(self.memory.open(requests, write_only), requests))
        return self.steps[-1]


class WatchedStep:
    def __init__(self, step, requests):
        self.step, self.calls, self.selections = step, [], []
        self.spans = [(r.request_id, r.start, r.stop) for r in requests]

    def __getattr__(self, name):
        return getattr(self.step, name)

    def publish(self, component, rows):
        self.calls.append(f"publish {component}")
        self.step.publish(component, rows)

    def topk(self, component, queries, segments):
        self.calls.append(f"topk {component}")
        return self.step.topk(component, queries, segments)

    def attend(self, component, queries, selection):
        self.calls.append(f"attend {component}")
        self.selections.append([chosen.clone() for chosen in selection.chosen])
        return self.step.attend(component, queries, selection)


def third_step(share, drafts):
    """What is opened in a step with these numbers of drafts, by request."""
    layout = layout_of(one_rank("float64", 4, {"kv": 1}).memory.layout.spec, 4)
    driven, num_blocks = drive_all(REQUESTS, layout)
    runner = one_rank("float64", 4, num_blocks)
    model = runner.model
    runner.model = evolve(model, config=evolve(model.config, index_share_for_mtp_iteration=share))
    runner.memory = Watched(runner.memory)
    runner.__attrs_post_init__()
    for step in range(3):
        runner.memory.steps.clear()
        items = [d.item(64, drafts[d.request.request_id] if step else 1) for d in driven]
        emitted = runner.run(items)
        for d, item in zip(driven, items, strict=True):
            d.take(item, emitted[d.request.request_id])
    for d in driven:
        assert d.generated == one_rank_tokens(d.request, "float64")[: len(d.generated)]
    return items, runner.memory.steps


@pytest.mark.parametrize("share", [True, False])
def test_positions_and_components_of_every_pass(share):
    items, steps = third_step(share, {"long": 3, "b": 1})
    at, short = items[0].start, items[1].start
    assert [step.spans for step in steps] == [
        [("long", at - 1, at), ("b", short - 1, short)],
        [("long", at, at + 1)],
        [("long", at + 1, at + 2)],
        [("long", at, at + 4), ("b", short, short + 2)],
    ]
    first = ["publish latent.5", "publish indexer.5", "topk indexer.5", "attend latent.5"]
    later = ["publish latent.5", "attend latent.5"] if share else first
    assert [step.calls for step in steps[:3]] == [first, later, later]
    assert steps[3].calls[-2:] == ["publish latent.5", "publish indexer.5"]


def test_later_passes_attend_to_the_first_ones_choice_and_what_came_since():
    items, steps = third_step(True, {"long": 4, "b": 0})
    at = items[0].start
    (chosen,) = steps[0].selections[0]
    assert chosen.shape == (1, TOPK)
    for number in (1, 2, 3):
        (longer,) = steps[number].selections[0]
        assert longer.tolist() == [chosen[0].tolist() + list(range(at, at + number))]


def test_a_later_selection_of_short_and_long_contexts():
    """Contexts shorter than, equal to and longer than the top-k."""
    segments, chosen = [], []
    for i, first in enumerate((0, 2, TOPK - 1, 40)):
        picked = list(range(first + 1))[-TOPK:]
        chosen.append(torch.tensor([picked]))
        segments.append(Segment(i, torch.tensor([first + 2]), first + 3))
    selection = later_selection(chosen, segments, 2, TOPK)
    for i, first in enumerate((0, 2, TOPK - 1, 40)):
        wanted = [*chosen[i][0].tolist(), first + 1, first + 2]
        assert selection.chosen[i].tolist() == [wanted]
        assert selection.counts[i] == len(wanted)
    assert selection.topk == TOPK + 2


def test_a_step_without_drafts_makes_no_pass():
    _, steps = third_step(True, {"long": 0, "b": 0})
    assert len(steps) == 1


@pytest.mark.parametrize(("length", "share"), [(4, True), (30, False)])
def test_drafts_are_what_the_mtp_module_says(length, share):
    """Against the module over the whole context at once, on a cache of the tests' own: contexts in
    which the first choice holds everything, or every pass chooses anew."""
    request = Request("a", REQUESTS[0].prompt[:length], GREEDY)
    tokens = [*request.prompt, *one_rank_tokens(request, "float64")]
    layout = layout_of(one_rank("float64", 4, {"kv": 1}).memory.layout.spec, 4)
    (driven,), num_blocks = drive_all([request], layout)
    runner = one_rank("float64", 4, num_blocks)
    config = evolve(runner.model.config, index_share_for_mtp_iteration=share)
    runner.model = evolve(runner.model, config=config)
    runner.__attrs_post_init__()
    runner.drafter = Heard(runner.model, runner.memory, runner.comm, runner.tp)
    runner.drafter.said = said = []
    for _ in range(3):
        item = driven.item(64, 3)
        driven.take(item, runner.run([item])["a"])
    for at, (drafts,) in zip((length, length + 1), said[1:], strict=True):
        assert drafts == by_the_module(runner.model, tokens[: at + 1], 3)


class Heard(Drafter):
    """Drafts that are written down."""

    def draft(self, items, passes, kept):
        drafts = super().draft(items, passes, kept)
        self.said.append([tokens.tolist() for tokens in drafts.values()])
        return drafts


def by_the_module(model, tokens, count):
    """`count` drafts behind `tokens`."""
    comm, kv, n = LocalComm(), DenseKV(LocalComm(), model.spec), len(tokens) - 1
    part = [segment(0, range(n), n)]
    kv.begin(part)
    hidden = model.forward(torch.tensor(tokens[:-1]), part, kv, comm)
    following, drafts = list(tokens[1:]), []
    for number in range(count):
        part = [segment(0, range(n + number), n + number)]
        kv.begin(part)
        out, _ = model.mtp_forward(torch.tensor(following), hidden, part, kv, comm)
        drafts.append(int(model.logits(out[-1:]).argmax()))
        hidden, following = torch.cat([hidden, out[-1:]]), [*following, drafts[-1]]
    return drafts
