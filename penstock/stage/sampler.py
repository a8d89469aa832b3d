"""The last stage's picks, and a drafter's ranking: processors of logits, then an argmax over scores and noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from penstock.core import PipelineError
from penstock.messages import Candidates, SampledToken, Sampling
from penstock.noise import draws, gumbel, to_gumbel
from penstock.stage.grammar import Allowed, GrammarMasks, GrammarRow
from penstock.stage.visibility import BatchView

# ----------------------------------------------------------------------------------------------------------- processors
# Changes to a row's logits before temperature and filters: masks, bias and penalties, all of the row's own path.
#
# The order is vLLM's: the grammar's mask and the allowed tokens, barred tokens, bias, repetition penalty, frequency and
# presence penalty. A row's path is the prompt, the committed output, the row's ancestors and the row itself. It does
# not depend on what the request has come to since, so that a token stays a function of the text before it.


@dataclass(frozen=True)
class Context:
    """The tokens before a pick, and what they allow, for the processors of one row.

    ``path`` holds the token ids up to the row, prompt included. ``allowed_V``, bool [V], is what the grammar allows
    next; None without a grammar. ``problem`` says why the grammar allows nothing.
    """

    path: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    allowed_V: np.ndarray | None = None
    problem: str = ""


NO_CONTEXT: Final = Context()


def contexts_of(
    view: BatchView, rows: Sequence[int], samplings: Sequence[Sampling], grammars: GrammarMasks | None
) -> list[Context]:
    """The contexts of some of a batch's rows; nothing is looked up for a request whose sampling does not need it."""
    paths = [view.path(row) if needs_path(sampling) else None for row, sampling in zip(rows, samplings, strict=True)]
    asked = {
        at: GrammarRow(int(view.requests[row]), sampling.grammar, path[sampling.prompt_length :])
        for at, (row, sampling, path) in enumerate(zip(rows, samplings, paths, strict=True))
        if sampling.grammar and path is not None
    }
    allowed: dict[int, Allowed] = {}
    if asked:
        assert grammars is not None, "this stage was made without a tokenizer"
        allowed = dict(zip(asked, grammars.allowed(list(asked.values())), strict=True))
    return [context_of(path, asked.get(at), allowed.get(at)) for at, path in enumerate(paths)]


def needs_path(sampling: Sampling) -> bool:
    """Whether a pick depends on more of the text than its position: penalties count tokens, grammars read them."""
    return bool(sampling.grammar) or is_penalizing(sampling)


def context_of(path: np.ndarray | None, asked: GrammarRow | None, allowed: Allowed | None) -> Context:
    """The context of one row: its path, if that was looked up, and what its grammar allows, if it has one."""
    if path is None:
        return NO_CONTEXT
    if asked is None or allowed is None:
        return Context(path)
    problem = f"structured_outputs: after {len(asked.output)} tokens {allowed.problem}" if allowed.problem else ""
    return Context(path, allowed.mask_V, problem)


def is_processing(sampling: Sampling, position: int) -> bool:
    """Whether the processors change the logits of the token at ``position`` at all."""
    masked = bool(sampling.grammar or sampling.allowed_token_ids or sampling.logit_bias)
    return masked or is_barring(sampling, position) or is_penalizing(sampling)


def is_barring(sampling: Sampling, position: int) -> bool:
    """Whether the token at ``position`` may be none of the barred ones."""
    return bool(sampling.barred) and position < sampling.barred_before


def is_penalizing(sampling: Sampling) -> bool:
    """Whether any of the three penalties is set."""
    added = sampling.presence_penalty, sampling.frequency_penalty
    return sampling.repetition_penalty != 1 or added != (0, 0)


def processed(logits_V: np.ndarray, sampling: Sampling, position: int, context: Context) -> np.ndarray:
    """A copy of the logits with all processors applied. Barred tokens are allowed again where no other is left.

    A text that its grammar ends therefore ends, even before ``min_tokens``. Tokens that a grammar or
    ``allowed_token_ids`` masks stay out in any case: ``refusal`` says which rows have nothing left.
    """
    scores_V = logits_V.copy()
    allowed_V = allowed_tokens(sampling, context, len(scores_V))
    if allowed_V is not None:
        scores_V[~allowed_V] = -np.inf
    if is_barring(sampling, position):
        scores_V = without_barred(scores_V, sampling.barred)
    for token, bias in sampling.logit_bias:
        scores_V[token] += bias
    if is_penalizing(sampling):
        penalize(scores_V, sampling, context.path)
    return scores_V


def allowed_tokens(sampling: Sampling, context: Context, vocabulary: int) -> np.ndarray | None:
    """The tokens that can be picked at all, bool [V]; None for all of them."""
    if not sampling.allowed_token_ids:
        return context.allowed_V
    allowed_V = np.zeros(vocabulary, dtype=bool)
    allowed_V[list(sampling.allowed_token_ids)] = True
    return allowed_V


def refusal(logits_V: np.ndarray, sampling: Sampling, context: Context) -> str:
    """Why no token can be picked, beginning with the field at fault; empty if one can.

    Either the row is dead, or its grammar can say nothing more, or the model gives no allowed token a chance, as may
    happen with a drafter.
    """
    allowed_V = allowed_tokens(sampling, context, len(logits_V))
    if allowed_V is None or np.isfinite(logits_V[allowed_V]).any():
        return ""
    field = "structured_outputs" if sampling.grammar else "allowed_token_ids"
    return context.problem or f"{field}: the model gives no allowed token a chance"


def without_barred(scores_V: np.ndarray, barred: Sequence[int]) -> np.ndarray:
    """The scores with these token ids at -inf, or as they are if no other is left."""
    left_V = scores_V.copy()
    left_V[[token for token in barred if token < len(scores_V)]] = -np.inf  # a client may send any number
    return left_V if np.isfinite(left_V.max()) else scores_V


def penalize(scores_V: np.ndarray, sampling: Sampling, path: np.ndarray) -> None:
    """Apply the penalties in place.

    The repetition penalty concerns every token on the path (Keskar et al., CTRL, arXiv 1909.05858, section 4.1). The
    frequency penalty, once per occurrence, and the presence penalty, once, concern tokens of the output.
    """
    if (factor := sampling.repetition_penalty) != 1:
        seen = np.bincount(path, minlength=len(scores_V)) > 0
        scores = scores_V[seen]
        scores_V[seen] = np.where(scores > 0, scores / factor, scores * factor)
    # Tokens of the prompt count for the repetition penalty alone, as in vLLM.
    counts_V = np.bincount(path[sampling.prompt_length :], minlength=len(scores_V))
    scores_V -= sampling.frequency_penalty * counts_V
    scores_V -= sampling.presence_penalty * (counts_V > 0)


# -------------------------------------------------------------------------------------------------------------- sampler
# From logits to tokens: the target's pick after each row, and a drafter's ranking of what the target may pick.
#
# A sampled token is the argmax of filtered scores logits/T + Gumbel noise (penstock.noise); greedy is the same without
# noise. Both are functions of (logits, sampling, path) alone, computed row by row in float64, so that a row's token
# does not depend on the rows beside it. Masks, bias and penalties come first (above).
#
# Filters mean what they mean in Hugging Face transformers and vLLM, in this order, after the temperature:
#     top-k   in if fewer than k tokens score strictly higher: all ties at the threshold stay
#     top-p   in if the mass above it, of the renormalised top-k set, is below p; among ties the lower id stands above
#     min-p   in if its probability is at least p times the highest
# Each keeps an upper set of the order (score, then lower id), so that their intersection is one too.

OUTSIDE_PENALTY: Final = 3.0
"""Nats that a drafter's ranking takes off the scores of tokens that its filters exclude: the target's filters may let
them pass.

Leaving them out, or ranking them after all others, loses tokens that a weak drafter puts just outside: on a drafter of
0.9M parameters 7 to 33% of the target's picks. With 3 taken off, the best candidate is right as often (within half a
percent), and the target's pick is among the best 16 in 1 to 6% more of the steps; a perfect drafter would lose up to
exp(-3) of the excluded mass.
"""

SLACK: Final = 1e-9
"""Margin in scores, in nats: more than rounding can take from the largest noise."""

MOST_FEW: Final = 4096
"""Upper limit of the tokens per row, on average, that leave the device so that picks are decided among them alone.
Where they would be more, whole rows leave. A row of 256,000 tokens has 60 times as many."""

FIRST_WIDTH: Final = 128
"""Number of the best tokens that ``nucleus`` sorts at first; a top-p set is seldom larger."""


def pick_tokens(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    nodes: Sequence[int],
    contexts: Sequence[Context] | None = None,
) -> list[SampledToken]:
    """The target's next token after each row.

    ``logits`` [n, V], any float type and device; ``positions`` are those of the tokens to be picked. ``contexts`` are
    needed where a sampling penalizes or has a grammar. Plain greedy rows stay on the device. A row for which no token
    is left has an ``error`` instead of one. Raises PipelineError when a row has a NaN or no finite maximum: no token
    picked from it would mean anything.
    """
    best, tokens = highest(logits)
    check_finite(best, nodes)
    picks = [SampledToken(int(node), token) for node, token in zip(nodes, tokens, strict=True)]
    rest = [i for i, sampling in enumerate(samplings) if not is_plain(sampling, positions[i])]
    if rest and logits.device.type != "cpu":
        found = dict(zip(rest, narrowed(logits, rest, samplings, positions), strict=True))
        for i, few in found.items():
            if few is not None:
                picks[i] = SampledToken(int(nodes[i]), few.pick(samplings[i], int(positions[i])))
        rest = [i for i, few in found.items() if few is None]
    # Only the rows that need it leave the device.
    if rest:
        for i, logits_V in zip(rest, to_float64(logits[rest]), strict=True):
            context = contexts[i] if contexts else NO_CONTEXT
            picks[i] = pick_one(logits_V, samplings[i], int(positions[i]), int(nodes[i]), context)
    return picks


def rank_candidates(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    nodes: Sequence[int],
    count: int,
    contexts: Sequence[Context] | None = None,
) -> list[Candidates]:
    """A drafter's ``count`` best guesses, best first, of what the target picks after each row.

    ``logits`` [n, V] are the drafter's; ``positions`` are those of the tokens to be guessed. The request's own
    processors, temperature, filters and noise rank them, since the target will use the same. Scores are the log of the
    chance that the target picks the token: log_softmax(logits) when greedy; else, given the noise, log_softmax(log q /
    T + noise) with OUTSIDE_PENALTY taken off the tokens that do not pass the filters. Tokens that cannot be picked are
    left out, so that a row may have fewer than ``count``, and one that is dead has none. Raises PipelineError like
    ``pick_tokens``.
    """
    check_finite(logits.amax(dim=-1), nodes)
    if logits.device.type != "cpu" and all(map(is_plain, samplings, positions)):
        return ranked_there(logits, nodes, count)
    return [
        rank_one(
            logits_V, samplings[i], int(positions[i]), int(nodes[i]), count, contexts[i] if contexts else NO_CONTEXT
        )
        for i, logits_V in enumerate(to_float64(logits))
    ]


@dataclass(frozen=True)
class Few:
    """The tokens of a row that the pick can be: their ``ids`` in rising order, and their scaled ``scores``.

    ``vocabulary`` is the length of the whole row. ``whole`` is the sum of exp(scores) over all tokens that count for
    top-p; None where these are just the tokens here.
    """

    vocabulary: int
    ids: np.ndarray
    scores: np.ndarray
    whole: float | None

    def pick(self, sampling: Sampling, position: int) -> int:
        """The token that ``pick_noisy`` finds in the whole row."""
        # Drawn for the whole row and then indexed, so that each token has the noise that it would have there.
        own = draws(sampling.seed, sampling.sample, position, self.vocabulary)[self.ids]
        return int(self.ids[pick_above_floor(self.scores, own, sampling, self.whole)])


def narrowed(
    logits: torch.Tensor, rows: Sequence[int], samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[Few | None]:
    """For each of ``rows`` the few tokens that its pick can be, found on the device of the ``logits`` [n, V].

    The noise of a position is known before the logits are, and so is the largest. The best token wins unless another's
    score comes closer to its own than the largest noise is above the best token's noise. With top-k those that pass it
    are the few. None where the whole row is needed: where something else changes scores, logprobs are wanted, or the
    few are more than ``MOST_FEW``.
    """
    able = [i for i in rows if is_narrow(samplings[i], positions[i])]
    if not able:
        return [None] * len(rows)
    logits_nV, vocabulary = logits[able].double(), logits.shape[-1]
    best_n = logits_nV.amax(dim=-1)
    most = min(vocabulary, max(samplings[i].top_k for i in able))
    top_nk = logits_nV.topk(most, dim=-1).values.tolist() if most > 0 else [[]] * len(able)
    least_n = [
        _least(samplings[i], int(positions[i]), vocabulary, best, token, top)
        for i, best, token, top in zip(able, best_n.tolist(), logits_nV.argmax(dim=-1).tolist(), top_nk, strict=True)
    ]
    heat_n = logits_nV.new_tensor([samplings[i].temperature for i in able])
    whole_n = ((logits_nV - best_n[:, None]) / heat_n[:, None]).exp().sum(dim=-1).tolist()
    # ``nonzero`` goes row by row in rising order of ids, which ties between tokens depend on.
    places = (logits_nV >= logits_nV.new_tensor(least_n)[:, None]).nonzero()
    if len(places) > MOST_FEW * len(able):
        return [None] * len(rows)
    values, (which, ids) = logits_nV[places[:, 0], places[:, 1]].cpu().numpy(), places.cpu().numpy().T
    found = {}
    for number, i in enumerate(able):
        mine, sampling = which == number, samplings[i]
        with np.errstate(over="ignore"):  # to -inf, as in ``scaled_scores``
            scores = (values[mine] - values[mine].max()) / sampling.temperature
        found[i] = Few(vocabulary, ids[mine], scores, None if sampling.top_k > 0 else whole_n[number])
    return [found.get(i) for i in rows]


def is_narrow(sampling: Sampling, position: int) -> bool:
    """Whether the pick is decided by logits, temperature, filters and noise alone, and no logprobs are wanted."""
    return sampling.temperature > 0 and sampling.logprobs < 0 and not is_processing(sampling, position)


def _least(sampling: Sampling, position: int, vocabulary: int, best: float, token: int, top: Sequence[float]) -> float:
    """The logit below which no token can be picked, given the best logit, its token, and the highest logits."""
    if sampling.top_k > 0:
        return top[min(sampling.top_k, vocabulary) - 1]
    draws_V = draws(sampling.seed, sampling.sample, position, vocabulary)
    highest_noise, own = to_gumbel(np.array([draws_V.min(), draws_V[token]]))
    # A token beats the best one only if logit / T + noise >= best / T + own, and no noise exceeds ``highest_noise``:
    # its logit is then at least best - T (highest_noise - own).
    reach = sampling.temperature * (highest_noise - own + SLACK)
    return float(best - reach - SLACK * (abs(best) + reach))


def ranked_there(logits: torch.Tensor, nodes: Sequence[int], count: int) -> list[Candidates]:
    """The greedy candidates after each row, ranked on the device of the logits, of which few numbers then leave it."""
    best = logits.double().log_softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    found = []
    for node, chances, ids in zip(nodes, best.values.tolist(), best.indices.tolist(), strict=True):
        able = sum(chance > -math.inf for chance in chances)
        found.append(Candidates(int(node), ids[:able], chances[:able]))
    return found


def is_plain(sampling: Sampling, position: int) -> bool:
    """Whether the pick is the argmax of the unchanged logits, and no logprobs are wanted."""
    return sampling.temperature == 0 and sampling.logprobs < 0 and not is_processing(sampling, position)


def highest(logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Each row's largest logit [n], where a NaN counts as largest, and its id, the lowest among ties."""
    # numpy and torch alike take a NaN for the largest, so that ``check_finite`` finds it in these few numbers.
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        ids = logits.numpy().argmax(axis=-1)  # a tenth of the time of torch's max and argmax
        return logits[torch.arange(len(ids)), torch.from_numpy(ids)], ids.tolist()
    best, tokens = logits.max(dim=-1)
    return best, tokens.tolist()


def check_finite(best: torch.Tensor, nodes: Sequence[int]) -> None:
    """Raise PipelineError unless the largest logit of every row, ``best`` [n], is finite (a NaN counts as largest)."""
    finite = torch.isfinite(best)
    if not finite.all():
        broken = [int(node) for node, good in zip(nodes, finite.tolist(), strict=True) if not good]
        raise PipelineError(f"the model's logits after nodes {broken} are not finite")


def to_float64(logits: torch.Tensor) -> np.ndarray:
    """The logits as float64 [n, V] on the CPU; they leave the device in the type that they have there."""
    array: np.ndarray = logits.detach().cpu().double().numpy()
    return array


def pick_one(
    logits_V: np.ndarray, sampling: Sampling, position: int, node: int, context: Context = NO_CONTEXT
) -> SampledToken:
    """The target's next token after one row, by its whole logits, float64 [V].

    ``position`` is the token's own. The pick has an ``error`` where no token can be picked.
    """
    if problem := refusal(logits_V, sampling, context):
        return SampledToken(node, 0, error=problem)
    scores_V = scaled_scores(logits_V, sampling, position, context)
    if sampling.temperature == 0:
        token = int(scores_V.argmax())
    else:
        token = pick_noisy(scores_V, draws(sampling.seed, sampling.sample, position, len(scores_V)), sampling)
    if sampling.logprobs < 0:
        return SampledToken(node, token)
    return with_logprobs(logits_V, token, sampling.logprobs, node)


def scaled_scores(logits_V: np.ndarray, sampling: Sampling, position: int, context: Context = NO_CONTEXT) -> np.ndarray:
    """(logits - max) / T of the processed logits, T = 1 when greedy: the highest is exactly 0.

    Taking the maximum off first keeps a tiny T from overflowing, and exp(scores) between 0 and 1.
    """
    scores_V = processed(logits_V, sampling, position, context)
    scores_V -= scores_V.max()
    if sampling.temperature > 0:
        with np.errstate(over="ignore"):  # to -inf, which has the right meaning
            scores_V /= sampling.temperature
    return scores_V


def distribution(logits_V: np.ndarray, sampling: Sampling, position: int) -> np.ndarray:
    """The distribution from which a token is sampled: float64 [V], summing to 1, zero where barred or filtered out.

    At temperature 0, where nothing is sampled, it is the model's own distribution without barred tokens.
    """
    scores_V = scaled_scores(logits_V, sampling, position)
    if sampling.temperature > 0:
        kept_V = np.full(len(scores_V), -np.inf)
        kept = passing(scores_V, sampling)
        kept_V[kept] = scores_V[kept]
        scores_V = kept_V
    mass_V = np.exp(scores_V)
    share_V: np.ndarray = mass_V / mass_V.sum()
    return share_V


def pick_noisy(scores_V: np.ndarray, draws_V: np.ndarray, sampling: Sampling) -> int:
    """The argmax of scores + noise among the tokens that pass the filters, found without sorting.

    Only the noisy argmax is tested against top-p: it passes if the mass above it is below p. If it does not, neither
    does any token that does not stand above it, and the noisy argmax of those above is tested next.
    """
    if sampling.top_k > 0:
        kept = np.flatnonzero(scores_V >= kth_highest(scores_V, sampling.top_k))
        return int(kept[pick_above_floor(scores_V[kept], draws_V[kept], sampling)])
    return pick_above_floor(scores_V, draws_V, sampling)


def pick_above_floor(scores_V: np.ndarray, draws_V: np.ndarray, sampling: Sampling, whole: float | None = None) -> int:
    """``pick_noisy`` for tokens that have all passed top-k.

    ``whole`` is the sum of exp(scores) where more tokens count for top-p than are here.
    """
    left_V = np.where(scores_V < np.log(sampling.min_p), -np.inf, scores_V) if sampling.min_p > 0 else scores_V
    token = noisy_argmax(left_V, draws_V)
    if sampling.top_p >= 1:
        return token
    # Mass counts over all tokens that passed top-k: min-p is applied to the same set independently of top-p.
    mass_V = np.exp(scores_V)
    limit = sampling.top_p * (mass_V.sum() if whole is None else whole)
    while left_V[token] > -np.inf:  # every turn removes at least one token
        above_V = standing_above(scores_V, token)
        if (mass_V * above_V).sum() < limit:
            return token
        # The token fails top-p, and so does every token that does not stand above it.
        left_V = np.where(above_V, left_V, -np.inf)
        token = noisy_argmax(left_V, draws_V)
    return int(scores_V.argmax())


def noisy_argmax(scores_V: np.ndarray, draws_V: np.ndarray) -> int:
    """The argmax of ``scores_V + to_gumbel(draws_V)``, the lowest id on ties; most tokens' noise is never computed.

    Two sums are computed first, for the highest score and for the largest noise. Only a token whose score plus the
    largest noise reaches the better of them can be the argmax, and few scores are that high.
    """
    # The smallest draw gives the largest noise.
    known = np.array([scores_V.argmax(), draws_V.argmin()])
    noise = to_gumbel(draws_V[known])
    able = np.flatnonzero(scores_V + (noise[1] + SLACK) >= (scores_V[known] + noise).max())
    return int(able[(scores_V[able] + to_gumbel(draws_V[able])).argmax()])


def standing_above(scores_V: np.ndarray, token: int) -> np.ndarray:
    """bool [V]: the tokens that score higher, or as high with a lower id."""
    above_V: np.ndarray = scores_V > scores_V[token]
    above_V[:token] |= scores_V[:token] == scores_V[token]
    return above_V


def kth_highest(scores_V: np.ndarray, k: int) -> float:
    """The k-th highest score, the lowest when there are fewer."""
    place = max(len(scores_V) - k, 0)
    return float(np.partition(scores_V, place)[place])


def best_tokens(scores_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the ``count`` highest scores, best first, the lower id first among ties."""
    ids = np.flatnonzero(scores_V >= kth_highest(scores_V, count))
    return ids[np.argsort(-scores_V[ids], kind="stable")[:count]]


def log_softmax(scores_V: np.ndarray) -> np.ndarray:
    """Natural logs of the softmax of scores, float64 [V]; a score of -inf stays -inf."""
    shifted = scores_V - scores_V.max()
    chance_V: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return chance_V


def with_logprobs(logits_V: np.ndarray, token: int, count: int, node: int) -> SampledToken:
    """A pick with vLLM's raw_logprobs: of the model's own distribution, before processors, temperature and filters.

    Rank 1 is the most probable token; tied tokens share the best rank among them.
    """
    logprobs_V = log_softmax(logits_V)
    rank = 1 + int((logits_V > logits_V[token]).sum())
    best = best_tokens(logits_V, count) if count else ()
    return SampledToken(node, token, float(logprobs_V[token]), rank, [(int(i), float(logprobs_V[i])) for i in best])


def rank_one(
    logits_V: np.ndarray, sampling: Sampling, position: int, node: int, count: int, context: Context = NO_CONTEXT
) -> Candidates:
    """A drafter's ``count`` best guesses after one row, by its whole logits, float64 [V]: see ``rank_candidates``.

    There are none where no token can be picked, and fewer than ``count`` where fewer can.
    """
    if refusal(logits_V, sampling, context):
        return Candidates(node, [], [])
    scores_V = scaled_scores(logits_V, sampling, position, context)
    able_v = np.flatnonzero(scores_V > -np.inf)  # only few where a drafter has a smaller vocabulary than the target
    scores_v = scores_V[able_v]
    if sampling.temperature > 0:
        penalty_v = np.full(len(able_v), OUTSIDE_PENALTY)
        penalty_v[passing(scores_v, sampling)] = 0.0
        # Noise is drawn for the whole vocabulary, so that a token's noise is that of the target.
        scores_v += gumbel(sampling.seed, sampling.sample, position, len(scores_V))[able_v] - penalty_v
    chance_v = log_softmax(scores_v)
    best = best_tokens(chance_v, count)
    return Candidates(node, able_v[best].tolist(), chance_v[best].tolist())


def passing(scores_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Ids of the tokens that pass all filters."""
    floor = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
    kept = np.arange(len(scores_V))
    if sampling.top_k > 0:
        kept = np.flatnonzero(scores_V >= kth_highest(scores_V, sampling.top_k))
    if sampling.top_p < 1:
        kept = kept[nucleus(scores_V[kept], sampling.top_p)]
    return kept[scores_V[kept] >= floor]


def nucleus(scores_V: np.ndarray, top_p: float) -> np.ndarray:
    """Ids of the top-p set, best first. Sorts only as many of the best tokens as the set needs."""
    mass_V = np.exp(scores_V)
    limit = top_p * mass_V.sum()
    width = FIRST_WIDTH
    while True:
        ids = best_tokens(scores_V, width)
        above = np.concatenate([[0.0], np.cumsum(mass_V[ids])[:-1]])
        if above[-1] >= limit or len(ids) == len(scores_V):
            # [i] is the mass above the i-th best token: the set ends where that reaches the limit.
            members: np.ndarray = ids[above < limit]
            return members
        width *= 8
