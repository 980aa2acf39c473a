"""Pipeline: stages in a row that fit, or a refusal that says why they do not."""

from collections.abc import Sequence

from attrs import field, frozen

from kvflow.errors import LayoutError, PlanError
from kvflow.layouts.layout import Binding, KVLayout
from kvflow.transfers.operators.difference import first_difference
from kvflow.transfers.operators.protocol import Caches, Operator, Tokens, bind


@frozen(eq=False)
class Pipeline:
    """Stages in a row; itself an `Operator` in all but one call: `run` takes a binding and the
    caches of every layout on the way.

    Raises `LayoutError` at construction for two stages that do not fit, naming both layouts and
    the first field that differs, and for a component that a stage claims and the one before it
    does not deliver."""

    stages: tuple[Operator, ...] = field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        if not self.stages:
            raise LayoutError("a pipeline needs one or more stages, got 0")
        for i, (one, two) in enumerate(zip(self.stages, self.stages[1:], strict=False)):
            if difference := first_difference(one.target, two.source):
                raise LayoutError(
                    f"stage {i} ends in [{one.target}], stage {i + 1} starts from "
                    f"[{two.source}]: {difference}"
                )
            if missing := sorted(set(two.components) - set(one.components)):
                raise LayoutError(f"stage {i + 1} claims {missing}, which stage {i} does not move")

    @property
    def source(self) -> KVLayout:
        return self.stages[0].source

    @property
    def target(self) -> KVLayout:
        return self.stages[-1].target

    @property
    def components(self) -> tuple[str, ...]:
        return self.stages[-1].components

    def run(self, tokens: Tokens, bindings: Sequence[Binding], caches: Sequence[Caches]) -> None:
        """Runs every stage on `tokens`; `bindings` and `caches` are one longer than the stages.

        All plans are derived and verified before the first byte moves."""
        if not len(bindings) == len(caches) == len(self.stages) + 1:
            raise PlanError(
                f"{len(self.stages)} stages need {len(self.stages) + 1} bindings and caches, "
                f"got {len(bindings)} and {len(caches)}"
            )
        hops = zip(self.stages, bindings, bindings[1:], strict=False)
        bound = [bind(stage, src, dst, tokens) for stage, src, dst in hops]
        for i, stage in enumerate(self.stages):
            stage.execute(bound[i], caches[i], caches[i + 1])
