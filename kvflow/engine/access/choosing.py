"""Which positions index queries choose, when the keys lie on several ranks.

Either keys come to the queries, range by range, or queries go to the keys and every shard answers
with its best. Both merge candidates exactly, so both choose the same positions.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from kvflow.comm import Comm
from kvflow.engine.access.counters import Counters
from kvflow.engine.access.facts import StepFacts
from kvflow.engine.access.shard import ShardRows
from kvflow.models.candidates import Candidates, Keys, candidates, merged
from kvflow.models.indexer import first_positions
from kvflow.models.kvstep import IndexQueries
from kvflow.models.segment import Segment


@define(eq=False)
class Asking:
    """The index queries of this rank that need scores: those that see more than topk positions.
    The others take all they see."""

    queries: IndexQueries
    segments: Sequence[Segment]
    best: dict[int, list[Candidates]] = field(init=False, factory=dict)

    def scored(self) -> Iterator[tuple[int, Segment, slice, slice]]:
        """(segment index, segment, its scored queries within it, and among all rows)."""
        start = 0
        for i, s in enumerate(self.segments):
            first = int(torch.searchsorted(s.positions, self.queries.topk))
            if first < len(s):
                yield i, s, slice(first, len(s)), slice(start + first, start + len(s))
            start += len(s)

    def offer(self, request: int, keys: Keys) -> None:
        """Scores keys of a request against its queries."""
        q, k = self.queries, self.queries.topk
        for i, s, part, rows in self.scored():
            if s.request_idx == request:
                new = candidates(keys, q.queries[rows], q.weights[rows], s.positions[part], k)
                self.best[i] = [merged([*self.best.get(i, []), new], k)]

    def chosen(self) -> list[Tensor]:
        """What `KVStep.topk` returns, when all keys have been offered."""
        k = self.queries.topk
        chosen = [first_positions(s.positions, min(k, s.context_len)) for s in self.segments]
        for i, _, part, _ in self.scored():
            chosen[i][part] = merged(self.best[i], k).positions
        return chosen


@define(eq=False)
class ShardedChoice:
    """Sends index queries to the shards. `part_size` queries of each rank at a time."""

    facts: StepFacts
    shard: ShardRows
    part_size: int
    counters: Counters

    def topk(
        self, comm: Comm, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        """A collective, as `KVStep.topk`."""
        asking = Asking(queries, segments)
        rows = [np.arange(r.start, r.stop) for _, _, _, r in asking.scored()]
        mine = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *rows]))
        vectors = torch.cat([queries.queries.flatten(1), queries.weights], 1).index_select(0, mine)
        answers = [
            self._part(comm, component, vectors[lo : lo + self.part_size], lo, queries)
            for lo in range(0, self._most(queries.topk), self.part_size)
        ]
        self._collect(asking, answers)
        return asking.chosen()

    def _scored(self, rank: int, topk: int) -> list[np.ndarray]:
        """By request, the positions of a rank's queries that need scores."""
        return [p[np.searchsorted(p, topk) :] for p in self.facts.positions(rank)]

    def _most(self, topk: int) -> int:
        return max(sum(map(len, self._scored(r, topk))) for r in range(self.facts.size))

    def _runs(self, rank: int, topk: int, lo: int) -> list[tuple[int, np.ndarray]]:
        """(request, positions) of a rank's scored queries [lo, lo + part_size)."""
        runs, start = [], 0
        for request, positions in enumerate(self._scored(rank, topk)):
            part = positions[max(lo - start, 0) : max(lo + self.part_size - start, 0)]
            if len(part):
                runs.append((request, part))
            start += len(positions)
        return runs

    def _part(
        self, comm: Comm, component: str, vectors: Tensor, lo: int, queries: IndexQueries
    ) -> list[list[tuple[int, Candidates]]]:
        """By shard: (request, candidates) of each run of this rank's queries."""
        facts, k = self.facts, queries.topk
        runs = {r: self._runs(r, k, lo) for r in {*facts.askers, facts.rank}}
        to_shards, from_askers = [0] * comm.size, [0] * comm.size
        for rank in facts.members:
            to_shards[rank] = len(vectors)
        for rank in facts.askers:
            from_askers[rank] = sum(len(p) for _, p in runs[rank])
        sent = vectors.repeat(len(facts.members), 1)
        arrived, _ = comm.all_to_all(sent, to_shards, from_askers)
        others = len(arrived) - from_askers[facts.rank]
        self.counters.received("queries", others * arrived.shape[1] * arrived.element_size())
        scores, local = self._answer(component, arrived, runs, queries)
        back = {r: self._num_answers(runs[r], facts.shard, k) for r in facts.askers}
        due = {
            r: self._num_answers(runs[facts.rank], shard, k)
            for shard, r in enumerate(facts.members)
        }
        counts, received = ([m.get(r, 0) for r in range(comm.size)] for m in (back, due))
        got_scores, _ = comm.all_to_all(scores, counts, received)
        got_local, _ = comm.all_to_all(local, counts, received)
        mine = len(got_scores) - received[facts.rank]
        row = got_scores.element_size() + got_local.element_size()
        self.counters.received("partials", mine * row)
        held = arrived.numel() * arrived.element_size() + (len(scores) + len(got_scores)) * row
        self.counters.hold(held)
        self.counters.free(held)
        return self._read(got_scores, got_local, runs[facts.rank], received, k)

    def _num_best(self, request: int, shard: int, topk: int) -> int:
        return min(topk, self.facts.local_len(request, shard))

    def _num_answers(self, runs: list[tuple[int, np.ndarray]], shard: int, topk: int) -> int:
        return sum(len(p) * self._num_best(request, shard, topk) for request, p in runs)

    def _answer(
        self,
        component: str,
        arrived: Tensor,
        runs: dict[int, list[tuple[int, np.ndarray]]],
        queries: IndexQueries,
    ) -> tuple[Tensor, Tensor]:
        """Scores and local indices of the best of this shard, for each query that has arrived."""
        heads, dim = queries.queries.shape[1:]
        facts, keys = self.facts, {}
        record = facts.layout.spec[component].record
        scores, local, start = [], [], 0
        for rank in facts.askers:
            for request, positions in runs[rank]:
                if request not in keys:
                    held = np.arange(facts.local_len(request, facts.shard))
                    packed = self.shard.read(component, [(request, held)])
                    token = facts.placement.sharding.token(facts.shard, held)
                    keys[request] = Keys.decode(
                        record, packed, torch.from_numpy(token), arrived.dtype
                    )
                rows = arrived[start : start + len(positions)]
                start += len(positions)
                q, w = rows[:, : heads * dim].reshape(-1, heads, dim), rows[:, heads * dim :]
                at = torch.from_numpy(np.ascontiguousarray(positions))
                best = candidates(keys[request], q.contiguous(), w.contiguous(), at, queries.topk)
                scores.append(best.scores.flatten())
                local.append(best.positions.flatten())
        if not scores:
            return arrived.new_empty(0), torch.empty(0, dtype=facts.index_dtype)
        indices = facts.placement.sharding.local(torch.cat(local).numpy())
        return torch.cat(scores), torch.from_numpy(indices).to(facts.index_dtype)

    def _read(
        self,
        scores: Tensor,
        local: Tensor,
        runs: list[tuple[int, np.ndarray]],
        received: Sequence[int],
        topk: int,
    ) -> list[list[tuple[int, Candidates]]]:
        starts = np.cumsum([0, *received])
        by_shard = []
        for shard, rank in enumerate(self.facts.members):
            at, found = int(starts[rank]), []
            for request, positions in runs:
                k = self._num_best(request, shard, topk)
                part = slice(at, at + len(positions) * k)
                at = part.stop
                token = self.facts.placement.sharding.token(shard, local[part].numpy())
                shape = (len(positions), k)
                found.append(
                    (
                        request,
                        Candidates(scores[part].view(shape), torch.from_numpy(token).view(shape)),
                    )
                )
            by_shard.append(found)
        return by_shard

    def _collect(
        self, asking: Asking, answers: Sequence[Sequence[Sequence[tuple[int, Candidates]]]]
    ) -> None:
        """Joins the runs of a request over parts, shard by shard."""
        for i, s, _, _ in asking.scored():
            by_shard = []
            for shard in range(self.facts.num_shards):
                found = [c for part in answers for r, c in part[shard] if r == s.request_idx]
                by_shard.append(
                    Candidates(
                        torch.cat([c.scores for c in found]),
                        torch.cat([c.positions for c in found]),
                    )
                )
            asking.best[i] = by_shard
