"""Acceptance rules on recordings: the chance that the target takes one of k candidates, under each rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.core import ConfigError
from penstock.lab.record import Recording, load_recordings
from penstock.lab.report import Report, indented, is_looping
from penstock.terminal import FiguresTable

# ----------------------------------------------------------------------------------------------------------- acceptance
# The chance that the target takes one of k candidates: under Penstock's rule and those of papers, on recordings.
#
# Pure functions of numpy arrays. N tokens, each with the target's distribution p and the draft's q over U tokens ([N,
# U], rows summing to 1). A rule is told k candidates and accepts one of them or none; what it accepts, or the token it
# draws where it accepts none, follows p exactly: all of these rules are lossless. A rule's result [N, most] is the
# chance that one of the first 1, 2, .. most candidates is accepted.
#
#     rule                            candidates are                      used by
#     ``noise_ranked``                the draft's, ranked with the        Penstock
#                                     target's own Gumbel noise
#     ``looked_up``                   q's most probable                   PipeDec, section 3.3.4; trees of most probable
#                                                                         nodes (FlowSpec) come to the same, see there
#     ``rejection``                   drawn from q independently          SPD, section 3.6 (one candidate); SpecInfer
#     ``rejection_without_replacement``  drawn from q, all different      EAGLE's sampled trees
#
# These functions say what a rule would accept. The engine itself verifies in one way only (``engine/scheduler.py``).


def overlap(p_NU: np.ndarray, q_NU: np.ndarray) -> np.ndarray:
    """[N]: sum of min(p, q), the chance that rejection sampling accepts one draft from q; 1 - total variation.

    Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023, theorem 3.5.
    """
    total: np.ndarray = np.minimum(p_NU, q_NU).sum(axis=-1)
    return total


def residual(p_NU: np.ndarray, q_NU: np.ndarray) -> np.ndarray:
    """[N, U]: norm(max(p - q, 0)), the distribution to sample from after a draft from q was rejected.

    A row where p is nowhere above q, so that no draft is ever rejected, is zero.
    """
    return normalised(np.maximum(p_NU - q_NU, 0.0))


def normalised(mass_NU: np.ndarray) -> np.ndarray:
    """The rows, each scaled to the sum 1; a row of zeros stays as it is."""
    total = mass_NU.sum(axis=-1, keepdims=True)
    shares: np.ndarray = np.divide(mass_NU, total, out=np.zeros_like(mass_NU), where=total > 0)
    return shares


def noise_ranked(tokens_N: np.ndarray, candidates_NK: np.ndarray, most: int) -> np.ndarray:
    """1 where the token is among the first k candidates, else 0. At temperature 0 there is no noise: greedy top-k.

    The result is one draw of the noise per token; the other rules give an expectation over it. The gain of shared noise
    for a single candidate is derived by Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant
    speculative decoding", 2024.
    """
    hits = candidates_NK[:, :most] == tokens_N[:, None]
    return np.logical_or.accumulate(hits, axis=1).astype(np.float64)


def looked_up(target_of_draft_NM: np.ndarray, most: int) -> np.ndarray:
    """The chance that a token sampled from p is among q's k most probable tokens, [N, most].

    Rejection sampling comes to the same where candidates are taken, not drawn, as in the trees of EAGLE-2 and
    FlowSpec: a candidate's q is then 1, it is accepted with chance p, and p loses it and is normalised when it is
    not; the chances to accept add up to the sum of p over the candidates.
    """
    return np.cumsum(target_of_draft_NM[:, :most], axis=1, dtype=np.float64)


def rejection(p_NU: np.ndarray, q_NU: np.ndarray, most: int) -> np.ndarray:
    """Multi-step rejection sampling of independent drafts: accept x with min(1, p/q), else p becomes the residual.

    Exact: the residual does not depend on the draft that was rejected. Miao et al., "SpecInfer", ASPLOS 2024,
    multi-step speculative sampling; for k = 1 Leviathan et al., ICML 2023.
    """
    rejected = np.ones(len(p_NU))
    # Chances of rejection multiply: the residual is the same whichever draft was rejected.
    chances = []
    for _ in range(most):
        rejected = rejected * (1.0 - overlap(p_NU, q_NU))
        chances.append(1.0 - rejected)
        p_NU = residual(p_NU, q_NU)
    return np.stack(chances, axis=1)


def rejection_without_replacement(
    p_NU: np.ndarray, q_NU: np.ndarray, most: int, rng: np.random.Generator
) -> np.ndarray:
    """Multi-step rejection of drafts that all differ: after a rejection q loses the rejected token and is normalised.

    The residual of p now depends on which drafts were rejected, so that this is a Monte Carlo estimate: the rejected
    drafts are drawn, one sequence per row, from their distribution, norm(max(q - p, 0)), and the chances along
    that sequence are exact. The estimate is unbiased, and exact for k = 1. Jeon et al., "Recursive speculative
    decoding: accelerating LLM inference via sampling without replacement", 2024; EAGLE's code (Li et al., ICML 2024)
    does the same.
    """
    rejected = np.ones(len(p_NU))
    chances = []
    for _ in range(most):
        rejected = rejected * (1.0 - overlap(p_NU, q_NU))
        chances.append(1.0 - rejected)
        # The rejected token is drawn before p and q are replaced: its distribution is that of this round.
        tokens = draw(np.maximum(q_NU - p_NU, 0.0), rng)
        p_NU = residual(p_NU, q_NU)
        q_NU = without(q_NU, tokens)
    return np.stack(chances, axis=1)


def draw(mass_NU: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[N]: one column per row, drawn in proportion to its mass; any column of a row of zeros."""
    below = np.cumsum(mass_NU, axis=1)
    drawn = rng.random((len(mass_NU), 1)) * below[:, -1:]
    # Rounding must not draw the last column where it has no mass: the first column that reaches the total does.
    columns: np.ndarray = np.minimum((below <= drawn).sum(axis=1), (below < below[:, -1:]).sum(axis=1))
    return columns


def without(q_NU: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    """q without each row's token, normalised; a row of zeros where no other token can be drawn."""
    left = q_NU.copy()
    left[np.arange(len(left)), tokens_N] = 0.0
    return normalised(left)


def chain_lengths(accepted_N: np.ndarray, followed_N: np.ndarray, depth: int) -> np.ndarray:
    """[N - depth + 1]: expected number of accepted drafts of a chain of ``depth``, begun at each token in turn.

    Tokens are one request's, sampled from p. ``accepted`` is the chance that the draft at a token is accepted,
    ``followed`` the chance that this happens and leads on to the recorded token, over the chance p of that token:
    min(1, q/p) for rejection sampling. (For a rule that knows the token both are 1 or 0.) A chain goes on from what
    it accepted, which is not distributed like p; the product of ``followed`` is the weight that makes up for it:

        E[length] = sum over j < depth of E[ followed(x_0) .. followed(x_j-1) accepted(j) ],  x sampled from p
    """
    starts = max(len(accepted_N) - depth + 1, 0)
    reached, length = np.ones(starts), np.zeros(starts)
    for j in range(depth):
        length += reached * accepted_N[j : j + starts]
        reached = reached * followed_N[j : j + starts]
    return length


def followed_by_rejection(token_probs_N2: np.ndarray) -> np.ndarray:
    """[N]: min(1, q/p) of the recorded token, given its p and q, [N, 2]."""
    p, q = token_probs_N2[:, 0].astype(np.float64), token_probs_N2[:, 1].astype(np.float64)
    return np.minimum(1.0, np.divide(q, p, out=np.zeros_like(p), where=p > 0))


def distributions(recording: Recording, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """p and q, [N, U], of the recorded tokens ``rows``, over the tokens of both lists and two columns for all others.

    One of these two holds the tokens to which the target gives more than the draft, the other the rest, so that
    ``overlap`` is exact. Where further candidates are asked about, each of the two counts as one token, and a little
    more is accepted than would be: on the demo pair at T = 1, where 6% of the mass is in them, at most 0.7 points.

        columns   target_ids | draft_ids that are not among them | more by the target | others
    """
    first = recording.target_ids[rows].astype(np.int64)
    second = recording.draft_ids[rows].astype(np.int64)
    # Tokens are compared only within their row: each row's ids are shifted by a multiple of the row's number.
    line = np.arange(len(first))[:, None] * (recording.header.vocabulary + 1)
    new = ~np.isin(second + line, first + line)
    rest = recording.rest[rows]
    p = (recording.target_probs[rows], recording.target_of_draft[rows] * new, rest[:, :, 0])
    q = (recording.draft_of_target[rows], recording.draft_probs[rows] * new, rest[:, :, 1])
    joined = (np.concatenate(parts, axis=1).astype(np.float64) for parts in (p, q))
    of_target, of_draft = (normalised(mass) for mass in joined)
    return of_target, of_draft


# ---------------------------------------------------------------------------------------------------------------- rules
# ``penstock acceptance``: the acceptance rules on recordings, as tables and as JSON.

CANDIDATES: Final = (1, 2, 4, 8, 16)
"""Numbers of candidates that the tables show."""
DEPTHS: Final = (1, 2, 4, 8, 16)
"""Depths of chains, in drafts, that the tables show."""
MOST: Final = max(CANDIDATES)
"""Most candidates that a rule is given."""
DRAWS: Final = 16
"""Monte Carlo sequences per token where a rule has no closed form. Their mean varies a quarter as much as one."""
SEED: Final = 0
"""Seed of the Monte Carlo sequences."""
BLOCK: Final = 2048
"""Tokens evaluated together: two distributions of 514 columns in float64 take 16 MiB."""

LABELS: Final = {
    "greedy": "the draft's most probable tokens",
    "shared_noise": "ranked with the target's noise (Penstock)",
    "looked_up": "sampled token looked up in the draft's best (PipeDec)",
    "rejection": "rejection sampling, independent drafts (SPD, SpecInfer)",
    "rejection_without_replacement": "rejection sampling, different drafts (EAGLE)",
}
"""Each rule's name and its label in the tables; penstock/lab/acceptance.py explains the rules."""


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
    """Evaluate the recordings and print the result.

    Raises ConfigError, before anything is evaluated, for a file that is no recording, or that was made with other
    models than those named.
    """
    console = console or Console()
    recordings = load_recordings(files, model, draft_model)
    evaluations = [evaluate(file, recording) for file, recording in zip(files, recordings, strict=True)]
    reports = [Report(asdict(one), tables_of(one), remarks(one)) for one in evaluations]
    if as_json:
        console.file.write(indented({"recordings": [report.document for report in reports]}))
        return evaluations
    for report in reports:
        report.show(console)
    return evaluations


# --------------------------------------------------------------------------------------------------------- evaluation
# All rules on one recording, without the outputs that repeat themselves.


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
    """The mean mass, 0 to 1, of the target's and of the draft's distribution on tokens in neither list."""
    of_target, of_draft = recording.rest[rows].sum(axis=1).mean(axis=0, dtype=np.float64).tolist()
    return of_target, of_draft


def ranked(recording: Recording, rows: np.ndarray, noisy: bool) -> dict[int, Figure]:
    """Shares of tokens among the first k candidates; ``noisy`` adds the standard error of one draw, rounded up."""
    shares = noise_ranked(recording.tokens[rows], recording.candidates[rows], MOST).mean(axis=0)
    return {
        k: Figure(share, math.sqrt(share * (1 - share) / len(rows)) if noisy else None) for k, share in picked(shares)
    }


def sampled_rules(recording: Recording, rows: np.ndarray) -> dict[str, dict[int, Figure]]:
    """Every rule that samples, in blocks of tokens: the distributions of all tokens might not fit in memory."""
    rng = np.random.default_rng(SEED)
    by_lookup, by_rejection, different = [], [], []
    for block in np.array_split(rows, -(-len(rows) // BLOCK)):
        p, q = distributions(recording, block)
        by_lookup.append(looked_up(recording.target_of_draft[block], MOST).sum(axis=0))
        by_rejection.append(rejection(p, q, MOST).sum(axis=0))
        draws = [rejection_without_replacement(p, q, MOST, rng).sum(axis=0) for _ in range(DRAWS)]
        different.append(np.stack(draws))
    return {
        "shared_noise": ranked(recording, rows, noisy=True),
        "looked_up": exact(np.sum(by_lookup, axis=0) / len(rows)),
        "rejection": exact(np.sum(by_rejection, axis=0) / len(rows)),
        "rejection_without_replacement": averaged(np.sum(different, axis=0) / len(rows)),
    }


def exact(chances: np.ndarray) -> dict[int, Figure]:
    """The figures of chances that have no error for these contexts."""
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
    hits = noise_ranked(recording.tokens, recording.candidates, 1)[:, 0]
    if recording.header.temperature == 0:
        return {"greedy": by_depth(hits, hits, kept)}
    accepted = np.zeros(len(recording.tokens))
    for span in kept:
        p, q = distributions(recording, np.arange(span.start, span.stop))
        accepted[span] = overlap(p, q)
    followed = followed_by_rejection(recording.token_probs)
    return {"shared_noise": by_depth(hits, hits, kept), "rejection": by_depth(accepted, followed, kept)}


def by_depth(accepted: np.ndarray, followed: np.ndarray, kept: Sequence[slice]) -> dict[int, Figure]:
    """The mean length of chains of each depth; requests that are shorter than a chain do not count."""
    figures = {}
    for depth in DEPTHS:
        lengths = [chain_lengths(accepted[span], followed[span], depth) for span in kept]
        if any(len(one) for one in lengths):
            figures[depth] = mean_over([one for one in lengths if len(one)])
    return figures


def mean_over(groups: Sequence[np.ndarray]) -> Figure:
    """Mean over all values, with the standard error over the groups, which are independent of each other.

    The error is the linearised one of a ratio of means (Cochran, "Sampling techniques", 1977, section 2.11); None for
    one group.
    """
    sums, counts = np.asarray([one.sum() for one in groups]), np.asarray([len(one) for one in groups])
    mean = float(sums.sum() / counts.sum())
    if len(groups) == 1:
        return Figure(mean)
    spread = float(((sums - mean * counts) ** 2).sum()) * len(groups) / (len(groups) - 1)
    return Figure(mean, math.sqrt(spread) / float(counts.sum()))


# ----------------------------------------------------------------------------------------------------------- printing
# The tables of an evaluation, and the remarks below them.


def tables_of(evaluation: Evaluation) -> list[Table]:
    """The table of accepted candidates and that of the lengths of chains."""
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
    """A figure with its error, in per cent or as a number."""
    if figure is None:
        return "-"
    scale, digits = (100, 1) if percent else (1, 2)
    error = "" if figure.error is None else f" ± {scale * figure.error:.2g}"
    return f"{scale * figure.value:.{digits}f}{'%' if percent else ''}{error}"


def remarks(evaluation: Evaluation) -> list[str]:
    """The remarks that a reader needs before quoting the tables."""
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
