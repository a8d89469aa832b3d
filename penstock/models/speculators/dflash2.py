"""DFlash 2's parts of a block drafter: convolutions around every sublayer, and the selector of candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.attention import Attend
from penstock.models.speculators.spd import SpecLayer

# What inco.ai's DFlash 2 adds to DFlash, as NVIDIA-NeMo/Automodel and llama.cpp compute it. Shapes as in block.py; T is
# the number of taps of a convolution, of which tap 0 is the row itself, tap 1 the row before it, and so on.


class DynamicConvolution(nn.Module):
    """A convolution over a block's rows before a sublayer, and another one after it.

    Each kernel is a learned base and a correction that is computed from the sublayer's input in the same row, for both
    convolutions at once. ``group`` neighbouring channels share a correction.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        self._group = group

    def forward(self, entering_ND: Tensor, places_N: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The output [N, D] of ``sublayer`` between the two convolutions; ``places_N``: see ``convolved``."""
        corrections = self.kernel_projection(entering_ND).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before_NTD, after_NTD = (self.base_kernel + corrections.repeat_interleave(self._group, dim=-1)).unbind(dim=1)
        return convolved(sublayer(convolved(entering_ND, before_NTD, places_N)), after_NTD, places_N)


def convolved(rows_ND: Tensor, kernel_NTD: Tensor, places_N: Tensor) -> Tensor:
    """Each row and those before it in its block, channel by channel weighed by the row's own kernel, [N, D].

    ``places_N`` counts rows from the beginning of each one's block. What would lie before the block counts as zero:

        tap 1   |  0  r0  r1  r2  |  0  s0  s1
        tap 0   | r0  r1  r2  r3  | s0  s1  s2
    """
    total_ND = kernel_NTD[:, 0] * rows_ND
    for tap in range(1, kernel_NTD.shape[1]):
        # Filled rather than multiplied by zero: another block's row may hold anything.
        earlier_ND = rows_ND.roll(tap, dims=0).masked_fill((places_N < tap)[:, None], 0.0)
        total_ND = total_ND + kernel_NTD[:, tap] * earlier_ND
    return total_ND


class ConvolvedLayer(SpecLayer):
    """Qwen3's layer with convolutions around its attention and around its MLP, inside of the residuals."""

    def __init__(self, config: Any, index: int, biased: Collection[str], *, taps: int, group: int) -> None:
        super().__init__(config, index, biased, normed=True)
        self.attention_conv = DynamicConvolution(config.hidden_size, taps, group)
        self.mlp_conv = DynamicConvolution(config.hidden_size, taps, group)

    def forward(  # type: ignore[override]
        self, hidden_ND: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, places_N: Tensor
    ) -> Tensor:
        normed_ND = self.input_layernorm(hidden_ND)
        hidden_ND = hidden_ND + self.attention_conv(
            normed_ND, places_N, lambda rows_ND: self.self_attn(rows_ND, rotation, attend)
        )
        return hidden_ND + self.mlp_conv(self.post_attention_layernorm(hidden_ND), places_N, self.mlp)


class CandidateSelector(nn.Module):
    """Scores a row's few best tokens by the token before: S(a, b) = U(b) + <A[a] * (H h), B[b]>.

    U are the row's logits and h its state; A and B are the codebooks [V, r], and H is the projection [r, D].
    """

    def __init__(self, width: int, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def latent(self, hidden_nD: Tensor, tokens_n: Tensor) -> Tensor:
        """The numbers [n, r] by which the candidates after these tokens are compared: A[a] * (H h)."""
        latent_nr: Tensor = self.predecessor_codebook[tokens_n] * self.hidden_projection(hidden_nD)
        return latent_nr

    def forward(self, latent_nr: Tensor, logits_nV: Tensor, compared: Sequence[Sequence[int]]) -> Tensor:
        """The logits with the scores of the tokens ``compared`` of each row; -inf for others, float32 [n, V].

        A row for which no token is compared stays as it is.
        """
        compares_n = torch.tensor([len(tokens) > 0 for tokens in compared], device=logits_nV.device)
        scores_nV = logits_nV.masked_fill(compares_n[:, None], -torch.inf)
        rows = [row for row, tokens in enumerate(compared) for _ in tokens]
        ids = [token for tokens in compared for token in tokens]
        rows_m, ids_m = torch.tensor([rows, ids], dtype=torch.int64, device=logits_nV.device)
        pairs_m = (latent_nr[rows_m].float() * self.successor_codebook[ids_m].float()).sum(dim=-1)
        scores_nV[rows_m, ids_m] = logits_nV[rows_m, ids_m] + pairs_m
        return scores_nV
