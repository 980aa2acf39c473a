"""Which component a forward pass reads after which."""

from itertools import pairwise

from attrs import define, field

from kvflow.layouts.spec import KVCacheSpec


@define(eq=False)
class LayerOrder:
    """The latent components of a model, layer after layer, and their indexers. Nothing follows an
    MTP layer: each is a pass of its own."""

    spec: KVCacheSpec
    _next: dict[str, str] = field(init=False, factory=dict)
    _indexer: dict[str, str] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._next = dict(pairwise(self.spec.select(part="main", kind="latent")))
        by_layer = {c.layer_id: c.name for c in self.spec.components if c.kind == "indexer"}
        for c in self.spec.components:
            if c.kind == "latent" and c.layer_id in by_layer:
                self._indexer[c.name] = by_layer[c.layer_id]

    def after(self, latent: str) -> str | None:
        """The latent component of the next layer."""
        return self._next.get(latent)

    def indexer(self, latent: str | None) -> str | None:
        """The indexer of a latent component's layer, if it chooses for itself."""
        return self._indexer.get(latent) if latent else None

    def sharing(self, latent: str) -> str | None:
        """The next layer, where it reuses this layer's choice."""
        after = self.after(latent)
        return after if after and self.indexer(after) is None else None

    @property
    def layers_per_choice(self) -> float:
        """How many layers of the main part share a choice, on average."""
        latent = self.spec.select(part="main", kind="latent")
        return len(latent) / max(1, len(self.spec.select(part="main", kind="indexer")))
