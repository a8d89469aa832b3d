"""Tables of peers: every entry of the bench beside every peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.markup import escape
from rich.table import Table

from penstock.bench.formats import bounds, markdown, times
from penstock.bench.intervals import CONFIDENCE
from penstock.bench.measure.summary import StrategyRun
from penstock.bench.peers.beside import PeerRun
from penstock.tables import FiguresTable

HEADINGS: Final = ("tokens/s", "peer's", "ratio", f"{CONFIDENCE:.0%}\nbounds", "first\ntoken,\ns", "peer's")


def peers_table(peers: Sequence[PeerRun], entries: Sequence[StrategyRun]) -> Table:
    """One setting's table. A ratio above 1 says that the entry is faster than the peer."""
    table = FiguresTable("strategy / peer", *HEADINGS, title=f"{peers[0].setting}: beside")
    for row in rows_of(peers, entries):
        table.add_row(*map(escape, row))
    return table


def peers_markdown(peers: Sequence[PeerRun], entries: Sequence[StrategyRun]) -> str:
    return markdown(["strategy / peer", *HEADINGS], rows_of(peers, entries))


def rows_of(peers: Sequence[PeerRun], entries: Sequence[StrategyRun]) -> list[list[str]]:
    found = []
    for peer in peers:
        for entry in entries:
            ratio = peer.ratios[entry.strategy]
            speeds = [f"{one.tokens_per_second:.2f}" for one in (entry, peer)]
            firsts = [f"{one.mean_ttft_ms / 1e3:.3f}" for one in (entry, peer)]
            shown = [times(ratio.mean if ratio else None), bounds(ratio.bounds if ratio else None)]
            found.append([f"{entry.strategy} / {peer.peer}", *speeds, *shown, *firsts])
    return found


def peers_remarks(peers: Sequence[PeerRun]) -> list[str]:
    """Remarks on the peers: version, number of threads, and whether their tokens are the same."""
    lines = []
    for name in dict.fromkeys(peer.peer for peer in peers):
        runs = [peer for peer in peers if peer.peer == name]
        threads = f"{runs[0].threads} thread{'s' * (runs[0].threads > 1)}"
        lines.append(
            f"{name}: {runs[0].version} in a process of its own, {threads}, as all stages together; each request right "
            "after the strategies', with as many tokens as plain decoding has."
        )
        lines += [line for run in runs if (line := same_tokens(run))]
    return lines


def same_tokens(run: PeerRun) -> str | None:
    """Whether the peer's tokens are plain decoding's, in words; None where they are not compared."""
    if run.identity == "-":
        return None
    if run.identity == "yes":
        return f"{run.setting}: {run.peer} has plain decoding's tokens, all of them."
    return f"{run.setting}: {run.peer} has plain decoding's tokens {run.identity}: NOT IDENTICAL."
