"""The values that a weight in groups represents."""

from __future__ import annotations

import torch

from penstock.checkpoint.tensors import GroupedWeight, in_groups


def test_each_group_has_its_scale_and_minimum() -> None:
    values = torch.tensor([[0, 15, 2, 4], [1, 1, 3, 0]], dtype=torch.uint8)
    scales, minimums = torch.tensor([[0.5, 2.0], [1.0, 3.0]]), torch.tensor([[-1.0, 0.0], [10.0, -9.0]])
    weight = GroupedWeight(values, scales, minimums, bits=4, group=2)
    assert weight.dequantize().tolist() == [[-1.0, 6.5, 4.0, 8.0], [11.0, 11.0, 0.0, -9.0]]
    assert weight.dequantize().dtype == torch.float32
    assert weight.shape == (2, 4)


def test_signed_values_stand_for_themselves_times_the_scale() -> None:
    weight = GroupedWeight(
        torch.tensor([[-127, 0, 64, 1]], dtype=torch.int8), torch.tensor([[0.25]]), None, bits=8, group=4
    )
    assert weight.dequantize().tolist() == [[-31.75, 0.0, 16.0, 0.25]]


def test_groups_are_rounded_from_smallest_to_largest() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 64) * torch.tensor([[1e-3], [1.0], [1.0], [50.0], [0.0]]) + 0.5
    grouped = in_groups(weight, bits=4, group=32)
    assert grouped.values.dtype == torch.uint8
    assert grouped.scales.shape == (5, 2)
    assert grouped.values.unflatten(-1, (2, 32))[:4].amin(-1).max() == 0
    assert grouped.values.unflatten(-1, (2, 32))[:4].amax(-1).min() == 15
    error = (grouped.dequantize() - weight).abs().unflatten(-1, (2, 32)).amax(-1)
    assert (error <= 0.501 * grouped.scales + 1e-6).all()


def test_what_was_rounded_so_before_comes_out_as_it_was() -> None:
    torch.manual_seed(1)
    values = torch.randint(0, 16, (6, 64), dtype=torch.uint8)
    values[:, ::32], values[:, 1::32] = 0, 15
    before = GroupedWeight(values, torch.rand(6, 2).half().float() + 0.01, torch.randn(6, 2).half().float(), 4, 32)
    again = in_groups(before.dequantize(), bits=4, group=32)
    assert torch.equal(again.values, values)
    torch.testing.assert_close(again.dequantize(), before.dequantize())
