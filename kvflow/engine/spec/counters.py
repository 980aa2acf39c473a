"""Counters of speculative decoding."""

from attrs import define, field


@define(eq=False)
class SpecCounters:
    """What one rank sampled, counted once per request at the first rank of its home. `proposed`
    and `accepted` are by place of the draft. A run of tokens is counted before a stop inside it
    cuts it."""

    steps: int = 0
    emitted: int = 0
    proposed: dict[int, int] = field(factory=dict)
    accepted: dict[int, int] = field(factory=dict)

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """One request in one target step: `num_accepted` of its drafts, and one token more."""
        self.steps += 1
        self.emitted += num_accepted + 1
        for place in range(num_drafts):
            self.proposed[place] = self.proposed.get(place, 0) + 1
            self.accepted[place] = self.accepted.get(place, 0) + (place < num_accepted)

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per request and target step, the one that no draft gave included; 0
        before the first step."""
        return self.emitted / self.steps if self.steps else 0.0

    def values(self) -> dict[str, float]:
        """Counts that only ever grow. ``spec_accepted_tokens.0`` are first drafts."""
        totals = {
            "spec_steps": self.steps,
            "spec_emitted_tokens": self.emitted,
            "spec_draft_tokens": sum(self.proposed.values()),
            "spec_accepted_tokens": sum(self.accepted.values()),
        }
        places = {f"spec_draft_tokens.{place}": n for place, n in self.proposed.items()}
        places |= {f"spec_accepted_tokens.{place}": n for place, n in self.accepted.items()}
        return {name: float(n) for name, n in (totals | places).items()}
