"""The server's own counters of speculation, by the names of vLLM and of Penstock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from penstock.clients.stream import Usage

COUNTERS: Final = {
    f"{engine}:spec_decode_num_{name}_total": name
    for engine in ("vllm", "penstock")
    for name in ("drafts", "draft_tokens", "accepted_tokens")
}


@dataclass(frozen=True)
class Speculation:
    """Counts over a period. ``drafts`` is None where only the replies' usage is known."""

    drafts: int | None
    draft_tokens: int
    accepted_tokens: int

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts, the target's own token included (vLLM's definition)."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


def read_counters(metrics: str) -> Speculation | None:
    """The counters in a Prometheus text, summed over all series of a name; None unless all three are there."""
    counts: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if name := COUNTERS.get(sample.name):
                    counts[name] = counts.get(name, 0.0) + sample.value
    except ValueError:
        return None  # another kind of page is at /metrics
    if len(counts) < 3:
        return None
    return Speculation(int(counts["drafts"]), int(counts["draft_tokens"]), int(counts["accepted_tokens"]))


def between(before: Speculation | None, after: Speculation | None) -> Speculation | None:
    """The counts between two readings; None where either is missing."""
    if before is None or after is None or before.drafts is None or after.drafts is None:
        return None
    return Speculation(
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def of_usages(usages: list[Usage]) -> Speculation | None:
    """The counts from the replies' usage; None where no reply has them."""
    known = [(usage.accepted, usage.rejected or 0) for usage in usages if usage.accepted is not None]
    accepted = sum(some for some, _ in known)
    return Speculation(None, accepted + sum(some for _, some in known), accepted) if known else None
