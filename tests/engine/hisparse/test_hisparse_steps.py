"""Any interleaving of steps over requests gives the attention that pages of everything give."""

import numpy as np
import torch
from attrs import define, field
from hisparse_world import Blocks, bare_step, hisparse_memory, paged_memory, request_of, small_spec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvflow.engine.hisparse import HiSparseSizes

torch.set_num_threads(1)
SPEC = small_spec()
LONGEST = 72


@define(eq=False)
class Side:
    """One memory and where it keeps the requests."""

    blocks: Blocks
    tables: dict = field(factory=dict)

    @classmethod
    def of(cls, memory):
        return cls(Blocks(memory, 7))

    def seat(self, name):
        if name not in self.tables:
            self.tables[name] = self.blocks.take(LONGEST)

    def drop(self, name):
        if (tables := self.tables.pop(name, None)) is not None:
            self.blocks.memory.forget(name)
            self.blocks.give_back(tables)

    def run(self, parts, topk, seed):
        memory = self.blocks.memory
        requests = [request_of(name, start, n, self.tables[name]) for name, start, n in parts]
        return bare_step(memory, requests, topk, seed)


@st.composite
def scripts(draw):
    """Sizes, and steps of some of three requests: each computes 1 to 6 positions or a whole part of
    a prompt, of which the next step keeps at least one; now and then one leaves and comes back."""
    topk = draw(st.sampled_from([3, 4, 8]))
    sizes = HiSparseSizes(
        topk, 3, draw(st.sampled_from([topk, topk + 3, 3 * topk])), draw(st.sampled_from([2, 3]))
    )
    steps, at = [], {}
    for _ in range(draw(st.integers(3, 9))):
        parts = []
        for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
            if draw(st.integers(0, 9)) == 0 or name not in at:
                at[name] = (0, 0)
            first, stop = at[name]
            start = draw(st.integers(min(first + 1, stop), stop))
            count = draw(st.one_of(st.integers(1, 6), st.integers(1, 30)))
            count = min(count, LONGEST - start)
            if count > 0:
                at[name] = (start, start + count)
                parts.append((name, start, count))
        steps.append(parts)
    return sizes, draw(st.sampled_from([1, 4, 5, 8])), steps


@settings(max_examples=10, phases=[Phase.generate])
@given(case=scripts())
def test_any_steps_attend_as_pages_do(case):
    sizes, block, steps = case
    count = 3 * -(-LONGEST // block)
    paged = Side.of(paged_memory(SPEC, block, count))
    hot = Side.of(hisparse_memory(sizes, SPEC, block, count))
    for seed, parts in enumerate(steps):
        for name, start, _ in parts:
            for side in (paged, hot):
                if start == 0:
                    side.drop(name)
                side.seat(name)
        wanted = paged.run(parts, sizes.topk, seed)
        found = hot.run(parts, sizes.topk, seed)
        for name, out in wanted.items():
            assert torch.equal(out, found[name]), (seed, name)
    memory = hot.blocks.memory
    for name in hot.tables:
        memory.flush(name)
    _same_pages(paged, hot)
    assert memory.gauges["tail_pages_dirty"] == 0


def _same_pages(paged, hot):
    """Every row that a request holds, of every component."""
    for name in hot.tables:
        held = hot.blocks.memory._requests[name].binding.lengths["latent.0"]
        for component in SPEC.names:
            rows = []
            for side in (paged, hot):
                memory = side.blocks.memory
                group = memory.layout.group_of(component).name
                binding = side.blocks.bind(side.tables[name], held)
                slots = binding.slots(group, np.arange(held), 0)
                rows.append(_rows(memory.cache.pages[component], slots))
            assert torch.equal(*rows), (name, component)


def _rows(view, slots):
    from kvflow.kernels.rows import gather_rows

    return gather_rows(view, torch.from_numpy(slots))
