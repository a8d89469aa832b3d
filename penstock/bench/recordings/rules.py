"""``penstock acceptance``: Penstock's acceptance rule and the papers' on recordings, as tables and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock import acceptance
from penstock.bench.looping import is_looping
from penstock.bench.recordings.load import load_recordings
from penstock.core import ConfigError
from penstock.recording import Recording
from penstock.tables import FiguresTable

CANDIDATES: Final = (1, 2, 4, 8, 16)
DEPTHS: Final = (1, 2, 4, 8, 16)
MOST: Final = max(CANDIDATES)
DRAWS: Final = 16
"""Monte Carlo sequences per token where a rule has no closed form."""
SEED: Final = 0
BLOCK: Final = 2048
"""Tokens evaluated together: two distributions of 514 columns in float64 take 16 MiB."""

LABELS: Final = {
    "greedy": "the draft's most probable tokens",
    "shared_noise": "ranked with the target's noise (Penstock)",
    "looked_up": "sampled token looked up in the draft's best (PipeDec)",
    "rejection": "rejection sampling, independent drafts (SPD, SpecInfer)",
    "rejection_without_replacement": "rejection sampling, different drafts (EAGLE)",
}
"""Each rule's name and its label in the tables; penstock/acceptance.py explains the rules."""


@dataclass(frozen=True)
class Figure:
    """A mean over tokens or requests and its standard error; None where it is exact for these contexts."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Every rule's figures on one recording.

    ``rules``: the chance that a candidate is accepted, by rule and number of candidates. ``chains``: the expected
    number of accepted drafts of a chain, by rule and depth; no figure where no request has that many tokens.
    ``left_out``: mean mass of the target's and of the draft's distribution on tokens in neither list. ``tokens`` and
    all acceptance figures leave out the ``looping`` requests.
    """

    file: str
    settings: dict[str, float]
    requests: int
    tokens: int
    looping: int
    undecided: int
    left_out: tuple[float, float]
    rules: dict[str, dict[int, Figure]]
    chains: dict[str, dict[int, Figure]]


def run_acceptance(
    files: Sequence[Path],
    as_json: bool,
    console: Console | None = None,
    model: str | None = None,
    draft_model: str | None = None,
) -> list[Evaluation]:
    """Evaluate and print.

    Raises ConfigError, before anything is evaluated, for a file that is no recording, or that was made with other
    models than those named.
    """
    console = console or Console()
    recordings = load_recordings(files, model, draft_model)
    evaluations = [evaluate(file, recording) for file, recording in zip(files, recordings, strict=True)]
    if as_json:
        console.file.write(json.dumps({"recordings": [asdict(one) for one in evaluations]}, indent=2) + "\n")
        return evaluations
    for evaluation in evaluations:
        for table in tables_of(evaluation):
            console.print(table)
        for line in remarks(evaluation):
            console.print(line, highlight=False)
    return evaluations


# --------------------------------------------------------------------------------------------------------- evaluation


def evaluate(file: Path, recording: Recording) -> Evaluation:
    """All rules on one recording. Raises ConfigError where every output falls into a loop."""
    spans = [recording.rows(request) for request in range(recording.requests)]
    kept = [span for span in spans if not is_looping(recording.tokens[span].tolist())]
    rows = np.concatenate([np.arange(span.start, span.stop) for span in kept]) if kept else np.empty(0, dtype=int)
    if not len(rows):
        raise ConfigError(f"{file}: tokens: none is left without outputs that loop; record longer or sampled ones")
    header = recording.header
    sampled = header.temperature > 0
    return Evaluation(
        file=file.name,
        settings={name: getattr(header, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        requests=recording.requests,
        tokens=len(rows),
        looping=recording.requests - len(kept),
        undecided=header.undecided,
        left_out=left_out(recording, rows),
        rules=sampled_rules(recording, rows) if sampled else {"greedy": ranked(recording, rows, noisy=False)},
        chains=chains(recording, kept),
    )


def left_out(recording: Recording, rows: np.ndarray) -> tuple[float, float]:
    of_target, of_draft = recording.rest[rows].sum(axis=1).mean(axis=0, dtype=np.float64).tolist()
    return of_target, of_draft


def ranked(recording: Recording, rows: np.ndarray, noisy: bool) -> dict[int, Figure]:
    """Fractions of hits; ``noisy`` adds the standard error of one draw of noise per token, rounded up."""
    shares = acceptance.noise_ranked(recording.tokens[rows], recording.candidates[rows], MOST).mean(axis=0)
    return {
        k: Figure(share, math.sqrt(share * (1 - share) / len(rows)) if noisy else None) for k, share in picked(shares)
    }


def sampled_rules(recording: Recording, rows: np.ndarray) -> dict[str, dict[int, Figure]]:
    """Every rule, in blocks of tokens, because the distributions of all of them may not fit in memory."""
    rng = np.random.default_rng(SEED)
    looked_up, rejection, different = [], [], []
    for block in np.array_split(rows, -(-len(rows) // BLOCK)):
        p, q = acceptance.distributions(recording, block)
        looked_up.append(acceptance.looked_up(recording.target_of_draft[block], MOST).sum(axis=0))
        rejection.append(acceptance.rejection(p, q, MOST).sum(axis=0))
        draws = [acceptance.rejection_without_replacement(p, q, MOST, rng).sum(axis=0) for _ in range(DRAWS)]
        different.append(np.stack(draws))
    return {
        "shared_noise": ranked(recording, rows, noisy=True),
        "looked_up": exact(np.sum(looked_up, axis=0) / len(rows)),
        "rejection": exact(np.sum(rejection, axis=0) / len(rows)),
        "rejection_without_replacement": averaged(np.sum(different, axis=0) / len(rows)),
    }


def exact(chances: np.ndarray) -> dict[int, Figure]:
    return {k: Figure(chance) for k, chance in picked(chances)}


def averaged(draws: np.ndarray) -> dict[int, Figure]:
    """Mean and standard error over Monte Carlo draws [DRAWS, MOST]; for one candidate nothing is drawn."""
    errors = dict(picked(draws.std(axis=0, ddof=1) / math.sqrt(len(draws))))
    return {k: Figure(mean, errors[k] if k > 1 else None) for k, mean in picked(draws.mean(axis=0))}


def picked(chances: np.ndarray) -> Iterable[tuple[int, float]]:
    """(k, value) for the numbers of candidates shown; the last value where there are fewer tokens than candidates."""
    return [(k, float(chances[min(k, len(chances)) - 1])) for k in CANDIDATES]


def chains(recording: Recording, kept: Sequence[slice]) -> dict[str, dict[int, Figure]]:
    """Expected number of accepted drafts, by rule and depth; standard errors over requests."""
    hits = acceptance.noise_ranked(recording.tokens, recording.candidates, 1)[:, 0]
    if recording.header.temperature == 0:
        return {"greedy": by_depth(hits, hits, kept)}
    accepted = np.zeros(len(recording.tokens))
    for span in kept:
        p, q = acceptance.distributions(recording, np.arange(span.start, span.stop))
        accepted[span] = acceptance.overlap(p, q)
    followed = acceptance.followed_by_rejection(recording.token_probs)
    return {"shared_noise": by_depth(hits, hits, kept), "rejection": by_depth(accepted, followed, kept)}


def by_depth(accepted: np.ndarray, followed: np.ndarray, kept: Sequence[slice]) -> dict[int, Figure]:
    figures = {}
    for depth in DEPTHS:
        lengths = [acceptance.chain_lengths(accepted[span], followed[span], depth) for span in kept]
        if any(len(one) for one in lengths):
            figures[depth] = mean_over([one for one in lengths if len(one)])
    return figures


def mean_over(groups: Sequence[np.ndarray]) -> Figure:
    """Mean over all values, with the standard error over groups, which are independent of each other.

    It is the linearised error of a ratio of means (Cochran, "Sampling techniques", 1977, section 2.11); None for one
    group.
    """
    sums, counts = np.asarray([one.sum() for one in groups]), np.asarray([len(one) for one in groups])
    mean = float(sums.sum() / counts.sum())
    if len(groups) == 1:
        return Figure(mean)
    spread = float(((sums - mean * counts) ** 2).sum()) * len(groups) / (len(groups) - 1)
    return Figure(mean, math.sqrt(spread) / float(counts.sum()))


# ----------------------------------------------------------------------------------------------------------- printing


def tables_of(evaluation: Evaluation) -> list[Table]:
    settings = ", ".join(f"{name} {value:g}" for name, value in evaluation.settings.items())
    title = f"{evaluation.file}: {evaluation.tokens} tokens, {settings}"
    accepted = FiguresTable("one of k candidates accepted", *(f"k = {k}" for k in CANDIDATES), title=title)
    for rule, figures in evaluation.rules.items():
        accepted.add_row(LABELS[rule], *(shown(figures.get(k), percent=True) for k in CANDIDATES))
    lengths = FiguresTable("expected drafts accepted of a chain", *(f"d = {d}" for d in DEPTHS))
    for rule, figures in evaluation.chains.items():
        lengths.add_row(LABELS[rule], *(shown(figures.get(depth), percent=False) for depth in DEPTHS))
    return [accepted, lengths]


def shown(figure: Figure | None, percent: bool) -> str:
    if figure is None:
        return "-"
    scale, digits = (100, 1) if percent else (1, 2)
    error = "" if figure.error is None else f" ± {scale * figure.error:.2g}"
    return f"{scale * figure.value:.{digits}f}{'%' if percent else ''}{error}"


def remarks(evaluation: Evaluation) -> list[str]:
    """Remarks that a reader needs before quoting the tables."""
    lines = []
    if evaluation.settings["temperature"] > 0:
        lines.append(
            "± is one standard error: of the noise drawn (Penstock), of the Monte Carlo (different drafts), over "
            "requests (chains). Figures without one are exact for the recorded contexts."
        )
    if max(evaluation.left_out) > 0 and evaluation.settings["temperature"] > 0:
        target, draft = evaluation.left_out
        lines.append(
            f"{target:.1%} of the target's and {draft:.1%} of the draft's mass are on tokens that are not recorded one "
            "by one: exact for one candidate; for more, rejection sampling takes them for two tokens, which favours it "
            "(on the demo pair at T = 1 by at most 0.7 points)."
        )
    if evaluation.looping:
        lines.append(f"{evaluation.looping} of {evaluation.requests} outputs fall into a loop and are left out.")
    if evaluation.undecided:
        lines.append(f"{evaluation.undecided} recorded tokens were picked by less than rounding.")
    return lines
