"""How many candidates a rule needs until the target takes one: Penstock's rule and the papers', on recordings.

Pure functions of numpy arrays. N tokens, each with the target's distribution p and the draft's q over U tokens ([N, U],
rows summing to 1). A rule is told k candidates and accepts one of them or none; what it accepts, or the token it draws
where it accepts none, follows p exactly: all of these rules are lossless. A rule's result [N, most] is the chance that
one of the first 1, 2, .. most candidates is accepted.

    rule                            candidates are                      used by
    ``noise_ranked``                the draft's, ranked with the        Penstock
                                    target's own Gumbel noise
    ``looked_up``                   q's most probable                   PipeDec, section 3.3.4; trees of most probable
                                                                        nodes (FlowSpec) come to the same, see there
    ``rejection``                   drawn from q independently          SPD, section 3.6 (one candidate); SpecInfer
    ``rejection_without_replacement``  drawn from q, all different      EAGLE's sampled trees

These functions say what a rule would accept. The engine itself verifies in one way only (``engine/commit.py``).
"""

from __future__ import annotations

import numpy as np

from penstock.recording import Recording


def overlap(p_NU: np.ndarray, q_NU: np.ndarray) -> np.ndarray:
    """[N]: sum of min(p, q), the chance that rejection sampling accepts one draft from q; 1 - total variation.

    Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023, theorem 3.5.
    """
    total: np.ndarray = np.minimum(p_NU, q_NU).sum(axis=-1)
    return total


def residual(p_NU: np.ndarray, q_NU: np.ndarray) -> np.ndarray:
    """[N, U]: norm(max(p - q, 0)), what is to be sampled from once a draft from q was rejected.

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
    """The target samples its token from p, which is then looked up among q's k most probable tokens.

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

    The residual of p now depends on which drafts were rejected, so this is a Monte Carlo estimate: the rejected drafts
    are drawn, one sequence per row, from what they are distributed like, norm(max(q - p, 0)), and the chances along
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
    """[N]: min(1, q/p) of the recorded token, from p and q of it."""
    p, q = token_probs_N2[:, 0].astype(np.float64), token_probs_N2[:, 1].astype(np.float64)
    return np.minimum(1.0, np.divide(q, p, out=np.zeros_like(p), where=p > 0))


def distributions(recording: Recording, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """p and q [N, U] of the recorded tokens ``rows`` over the tokens of both lists and two columns for all others.

    One of these two holds the tokens to which the target gives more than the draft, the other the rest, so that
    ``overlap`` is exact. Where further candidates are asked about, each of the two counts as one token, and a little
    more is accepted than would be: on the demo pair at T = 1, where 6% of the mass is in them, at most 0.7 points.

        columns   target_ids | draft_ids that are not among them | more by the target | others
    """
    first = recording.target_ids[rows].astype(np.int64)
    second = recording.draft_ids[rows].astype(np.int64)
    # Each row's ids are shifted by a multiple of its own, so that one isin compares tokens within their row alone.
    line = np.arange(len(first))[:, None] * (recording.header.vocabulary + 1)
    new = ~np.isin(second + line, first + line)
    rest = recording.rest[rows]
    p = (recording.target_probs[rows], recording.target_of_draft[rows] * new, rest[:, :, 0])
    q = (recording.draft_of_target[rows], recording.draft_probs[rows] * new, rest[:, :, 1])
    joined = (np.concatenate(parts, axis=1).astype(np.float64) for parts in (p, q))
    of_target, of_draft = (normalised(mass) for mass in joined)
    return of_target, of_draft
