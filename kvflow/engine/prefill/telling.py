"""TellingStep: a forward pass whose rows can be read elsewhere, layer by layer, while it runs."""

from collections.abc import Callable, Sequence

from attrs import define, field
from torch import Tensor

from kvflow.layouts.spec import KVCacheSpec
from kvflow.models.kvstep import IndexQueries, KVStep
from kvflow.models.segment import Segment
from kvflow.models.selection import Selection


def components_of(spec: KVCacheSpec, num_layers: int) -> tuple[str, ...]:
    """What the first layers of the main model store."""
    main = [spec[name] for name in spec.select(part="main")]
    first = set(sorted({c.layer_id for c in main})[:num_layers])
    return tuple(c.name for c in main if c.layer_id in first)


@define(eq=False)
class TellingStep:
    """A `KVStep` that calls `tell` with the number of main layers whose rows are stored, every
    `every` layers but not after the last: then the step itself ends."""

    step: KVStep
    spec: KVCacheSpec
    every: int
    tell: Callable[[int], None]
    _num_layers: int = field(init=False, default=0)

    @property
    def max_context_len(self) -> int:
        return self.step.max_context_len

    def publish(self, component: str, rows: Tensor) -> None:
        self.step.publish(component, rows)

    def topk(
        self, component: str, queries: IndexQueries, segments: Sequence[Segment]
    ) -> list[Tensor]:
        return self.step.topk(component, queries, segments)

    def attend(self, component: str, queries: Tensor, selection: Selection) -> Tensor:
        return self.step.attend(component, queries, selection)

    def release(self, component: str) -> None:
        self.step.release(component)
        latents = self.spec.select(kind="latent", part="main")
        if component in latents:
            self._num_layers += 1
            if self._num_layers % self.every == 0 and self._num_layers < len(latents):
                self.tell(self._num_layers)
