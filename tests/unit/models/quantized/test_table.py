"""Embeddings and heads of int8 rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.models.linear import weight_bytes, works
from penstock.models.packing import Table, TableEmbedding, TableHead
from tests.linears import as_multiplied

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")
VOCAB, WIDTH = 90, 48


class Doubling(nn.Embedding):
    """Does something else with what it has looked up, as gemma's does."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


def head_of(weight: Tensor, bias: Tensor | None = None) -> TableHead:
    linear = nn.Linear(WIDTH, VOCAB, bias=bias is not None)
    linear.weight, linear.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
    return TableHead(linear.requires_grad_(False))


def weight() -> Tensor:
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_gives_its_rows(dtype: torch.dtype) -> None:
    embedding = nn.Embedding.from_pretrained(weight().to(dtype), padding_idx=7)
    ids = torch.tensor([[3, 7], [89, 3]])
    expected = embedding(ids).clone()
    found = TableEmbedding(Table(embedding.weight), embedding)(ids)
    assert (found.dtype, found.shape) == (dtype, (2, 2, WIDTH))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    assert torch.equal(found[0, 0], found[1, 1])


def test_what_a_derived_embedding_does_is_done() -> None:
    embedding = Doubling.from_pretrained(weight(), padding_idx=80)
    ids = torch.tensor([[3, 80, 89]])
    expected = embedding(ids).clone()
    found = TableEmbedding(Table(embedding.weight), embedding)(ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.04)


@settings(max_examples=40, deadline=None)
@given(beside=st.integers(0, 40), place=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_logits_are_those_of_the_rows_and_a_rows_own(beside: int, place: int, seed: int) -> None:
    table, head = Table(weight()), head_of(weight())
    hidden = torch.randn(beside + 1, WIDTH, generator=torch.Generator().manual_seed(seed))
    place = min(place, beside)
    logits = head(hidden[None])
    assert logits.shape == (1, beside + 1, VOCAB)
    assert torch.equal(logits[0, place], head(hidden[place : place + 1])[0])
    expected = as_multiplied(hidden) @ table.rows(torch.arange(VOCAB)).double().t()
    torch.testing.assert_close(logits[0].double(), expected, rtol=1e-5, atol=1e-4)


def test_a_bias_is_added_and_logits_are_not_rounded() -> None:
    bias = torch.linspace(-5, 5, VOCAB)
    hidden = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    with_bias, without = (head_of(weight(), one)(hidden) for one in (bias, None))
    assert with_bias.dtype == torch.float32
    assert torch.equal(with_bias, without + bias)


def test_a_heads_rows_are_read_from_it_and_counted_once() -> None:
    head, ids = head_of(weight()), torch.tensor([[3, 7], [89, 3]])
    assert torch.equal(head.rows(ids), Table(weight()).rows(ids))
    embedding = TableEmbedding(head, nn.Embedding.from_pretrained(weight()))
    assert torch.equal(embedding(ids), head.rows(ids))
    assert weight_bytes(nn.ModuleList([embedding, head])) == head.weight_bytes
