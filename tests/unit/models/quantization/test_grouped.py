"""What a weight in groups stands for."""

from __future__ import annotations

import torch

from penstock.models.quantization.grouped import GroupedWeight


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
