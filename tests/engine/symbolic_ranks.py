"""Prefill ranks whose cache rows are words: row t of a request is what it depends on, namely the
salt, the tokens up to t and, where there is an MTP layer, the token behind. Carries out the steps
of a real `PrefillEngine` by the slow and obvious arithmetic, and complains about every row that is
read and is not the right one. No model runs, no planner is asked."""

import asyncio

from kvflow.engine.api import Request, SamplingParams
from kvflow.engine.messages import StepDone
from kvflow.engine.prefill import PrefillEngine
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.sampling import Sampled
from kvflow.engine.tiers.manager import Tiers
from kvflow.engine.tiers.memory import unit_nbytes
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh, Placement
from kvflow.layouts.paging import Paged
from kvflow.layouts.sharding import Replicated, RoundRobin
from kvflow.layouts.spec import KVCacheSpec

CONFIG = {
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "index_head_dim": 4,
    "indexer_types": ["full"],
}
CONTENT = {"model": "toy", "weights": "ours"}
WORDS = [None]
"""Rows that lie in units or files, by the number that lies there for them."""


def toy_spec(mtp, kv_dtype="float32", **content):
    config = CONFIG | {"num_nextn_predict_layers": int(mtp)}
    return KVCacheSpec.from_config(config, kv_dtype=kv_dtype, content=CONTENT | content)


def sampled_for(prompt):
    """The token that follows a prompt."""
    return 1000 + sum(prompt) % 3


class SymbolicRanks:
    """An engine and the ranks that carry out its steps."""

    def __init__(
        self,
        pcp=1,
        dcp=1,
        interleave=1,
        block=4,
        num_blocks=16,
        *,
        mtp=False,
        unit=None,
        host_units=0,
        files=None,
        directory=None,
        disk_nbytes=1 << 22,
        content=None,
        **changes,
    ):
        self.shape = pcp, dcp, interleave, block
        self.mtp = mtp
        spec = toy_spec(mtp, **(content or {}))
        mesh = Mesh((Axis("pcp", pcp), Axis("dcp", dcp, over=("pcp",))))
        placement = mesh.place(RoundRobin(dcp, interleave), "dcp")
        layout = KVLayout.uniform(spec, placement, Paged(block))
        self.unit = unit or block
        host_nbytes = host_units and host_units * (unit_nbytes(spec, self.unit) + 32) + 4096
        config = PrefixConfig(
            block_size=self.unit,
            host_nbytes=host_nbytes,
            disk_directory=directory,
            disk_nbytes=disk_nbytes if directory else 0,
        )
        self.steps, self.rows, self.answered = [], {}, 0
        self.told = {}
        self.engine = PrefillEngine(
            layout,
            pcp,
            {"kv": num_blocks},
            KVLayout.uniform(spec, Placement.simple(Replicated()), Paged(8)),
            self.steps.append,
            prefix=config,
            tiers=Tiers.create(config, layout, files),
            **changes,
        )

    @property
    def pool(self):
        return self.engine.pools["kv"]

    @property
    def host(self):
        return self.engine.tiers.host

    # --- rows

    def row(self, work, t):
        prompt, salt = work.request.prompt, work.request.cache_salt
        behind = (*prompt, sampled_for(prompt))[t + 1] if self.mtp else None
        return salt, prompt[: t + 1], behind

    def slots(self, table, t):
        """(rank, block id, offset) of every replica of a position."""
        pcp, dcp, interleave, block = self.shape
        shard = (t // interleave) % dcp
        local = (t // (interleave * dcp)) * interleave + t % interleave
        ids = table[local // block]
        return [(rank, ids, local % block) for rank in range(pcp) if rank % dcp == shard]

    def expect(self, work, table, t):
        for slot in self.slots(table, t):
            assert self.rows.get(slot) == self.row(work, t), (
                f"{work.request.request_id}: position {t} at {slot} holds {self.rows.get(slot)}"
            )

    # --- steps

    def run_step(self, step):
        """Copies, loads, computes, stores, as ranks do; returns the refused requests."""
        works = {i.request_id: self.engine._held[i.request_id] for i in step.items}
        for item in step.items:
            self._copy(item)
        loads = [item for item in step.items if item.load is not None]
        refused = [item.request_id for item in loads if not self._load(item)]
        for item in step.items:
            work = works[item.request_id]
            if item.request_id not in refused:
                for t in range(item.start):
                    self.expect(work, item.tables["kv"], t)
            for t in range(item.start, item.stop):
                for slot in self.slots(item.tables["kv"], t):
                    self.rows[slot] = self.row(work, t)
        for item in step.items:
            self._store(item)
        return refused

    def _copy(self, item):
        if item.copy is None:
            return
        for start, stop in item.copy.spans["kv"]:
            for t in range(start, stop):
                here = self.slots(item.copy.tables["kv"], t)
                for slot, source in zip(self.slots(item.tables["kv"], t), here, strict=True):
                    assert slot[1] != source[1], "a copy onto itself"
                    self.rows[slot] = self.rows.get(source)

    def _load(self, item):
        for t in range(item.load.start, item.load.stop):
            which, offset = divmod(t - item.load.start, self.unit)
            word = int(self._words(item.load.units[which])[offset])
            for slot in self.slots(item.tables["kv"], t):
                self.rows[slot] = WORDS[word]
        return [self.host.memory.label(u) for u in item.load.units] == item.load.labels

    def _store(self, item):
        for rows in item.store:
            assert (rows.stop - rows.start) == len(rows.units) * self.unit
            for t in range(rows.start, rows.stop):
                which, offset = divmod(t - rows.start, self.unit)
                slot = self.slots(item.tables["kv"], t)[0]
                self._words(rows.units[which])[offset] = len(WORDS)
                WORDS.append(self.rows[slot])

    def _words(self, unit):
        """The first bytes of a unit of the real host memory, a number for each of its rows."""
        return self.host.memory.units[unit][: 8 * self.unit].numpy().view("int64")

    def answer(self):
        """Carries out the running step and answers for every rank; checks what is held after."""
        step = self.steps[-1]
        assert self.answered == step.step_id - 1, "this step is answered already"
        self.answered = step.step_id
        refused = self.run_step(step)
        last = [i for i in step.items if i.sampling is not None]
        for rank in range(self.shape[0]):
            prompts = {i.request_id: self.engine._held[i.request_id].request.prompt for i in last}
            sampled = {n: Sampled(sampled_for(p), len(p)) for n, p in prompts.items()}
            self.engine.on_step_done(
                StepDone(step.step_id, rank, sampled if rank == 0 else {}, 0.0, refused)
            )
        self.check_held()

    def check_held(self):
        """Every row that is computed or reused is there, whatever others did."""
        for work in self.engine._held.values():
            begun = work.kv.begun and not work.in_step
            for t in range(work.done if begun else 0):
                self.expect(work, work.kv.tables["kv"], t)

    @property
    def is_running(self):
        return self.answered < len(self.steps)

    # --- requests

    def submit(self, name, prompt, salt=None):
        one = Request(name, tuple(prompt), SamplingParams(4, 0), salt)
        task = asyncio.ensure_future(self.engine.prefill(one))
        task.add_done_callback(lambda done: self._hear(name, done))
        return task

    def _hear(self, name, task):
        if not task.cancelled() and task.exception() is None:
            self.told[name] = self.engine.cached_tokens(name)

    async def settle(self):
        """Lets everything happen that waits for no step: until a while after files were last read
        or written, for whoever waited for one goes on some rounds later."""
        tiers, quiet = self.engine.tiers, 0
        while quiet < 12:
            is_busy = tiers is not None and tiers.num_under_way
            quiet = 0 if is_busy else quiet + 1
            await asyncio.sleep(0.001 if is_busy else 0)

    async def serve(self, name, prompt, salt=None):
        """Runs a request to its end; returns how many of its tokens were reused."""
        task = self.submit(name, prompt, salt)
        await self.settle()
        while not task.done():
            self.answer()
            await self.settle()
        await task
        self.engine.release(name)
        await self.settle()
        return self.told[name]

    async def close(self):
        """Gives the host tier's memory back."""
        await self.engine.close()

    def assert_idle(self):
        self.engine.audit()
        assert self.pool.num_available == self.pool.num_blocks
        assert not self.engine._held
