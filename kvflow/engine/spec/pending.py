"""PendingStep: a step whose tokens are chosen but not read: reading is what first waits for it."""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kvflow.engine.messages import StepItem
from kvflow.engine.sampling import Sampled, logprobs
from kvflow.engine.spec.rows import SampledRow


@frozen(eq=False)
class StepTokens:
    """What one rank sampled in a step, by request; those without a token are left out. `failed`
    says why none can follow: such a request is to end, and the others go on."""

    sampled: dict[str, list[Sampled]]
    failed: dict[str, str]


@frozen(eq=False)
class PendingStep:
    """`table` float64 ``[m, 2]`` holds each sampled row's own token and the one sampled there;
    `said` float64 ``[w, 1 + 2 * k]`` the `logprobs` of the rows in `wanting`."""

    items: Sequence[StepItem]
    rows: Sequence[SampledRow]
    vocab_size: int
    table: Tensor
    wanting: tuple[int, ...]
    said: Tensor

    @classmethod
    def of(
        cls,
        items: Sequence[StepItem],
        rows: Sequence[SampledRow],
        own: Tensor,
        chosen: Tensor,
        logits: Tensor,
    ) -> "PendingStep":
        """From the rows' own tokens and those chosen behind them, int64 ``[m]``, and their
        `logits` ``[m, vocab]``."""
        table = torch.stack([own, chosen], 1).to(torch.float64)
        counts = [row.sampling.num_logprobs for row in rows]
        wanting = tuple(i for i, count in enumerate(counts) if count is not None)
        vocab_size = logits.shape[1]
        if not wanting:
            return cls(items, rows, vocab_size, table, (), table.new_empty(0, 1))
        place = torch.tensor(wanting, dtype=torch.int64)
        most = min(max(n for n in counts if n is not None), vocab_size)
        tokens = chosen.index_select(0, place).clamp(max=vocab_size - 1)  # of no token: see `read`
        said = logprobs(logits.index_select(0, place), tokens, most)
        return cls(items, rows, vocab_size, table, wanting, said)

    def read(self) -> StepTokens:
        """By request, the tokens of this step: the one sampled behind the newest token, and one
        behind each draft that came true. A request has failed where it came to logits that are
        not finite, of a row that counts. Waits for the step."""
        flat = torch.cat([self.table.flatten(), self.said.flatten()]).cpu()
        size = self.table.numel()
        pairs = flat[:size].view(-1, 2).to(torch.int64).tolist()
        about = dict(zip(self.wanting, flat[size:].view(self.said.shape).tolist(), strict=True))
        emitted: dict[str, list[Sampled]] = {}
        failed: dict[str, str] = {}
        for i, (row, (own, token)) in enumerate(zip(self.rows, pairs, strict=True)):
            item = self.items[row.item_idx]
            run = emitted.setdefault(item.request_id, [])
            if len(run) != row.position + 1 - item.stop or (run and run[-1].token != own):
                continue
            if token < self.vocab_size:
                run.append(_sampled(row, token, about.get(i)))
            else:
                failed[item.request_id] = f"the logits at position {row.position} are not finite"
        return StepTokens({name: run for name, run in emitted.items() if run}, failed)


def _sampled(row: SampledRow, token: int, said: list[float] | None) -> Sampled:
    position = row.position + 1
    if said is None:
        return Sampled(token, position)
    most, count = len(said) // 2, row.sampling.num_logprobs
    best = zip(map(int, said[1 : 1 + most]), said[1 + most :], strict=True)
    return Sampled(token, position, said[0], tuple(best)[:count])
