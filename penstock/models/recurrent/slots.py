"""What a layer that carries a state keeps of every row, by slot."""

from __future__ import annotations

from torch import Tensor


class SlotArrays:
    """Arrays [capacity + 1, ..] by name, made, zeroed, when something is first put there.

    The last entry stands for what is above the first row of a text. It stays zero.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._arrays: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self._arrays.values())

    def grow(self, capacity: int) -> None:
        """Have room for so many slots, those that are there as they are."""
        before, self.capacity = self.capacity, capacity
        for name, array in self._arrays.items():
            self._arrays[name] = array.new_zeros(capacity + 1, *array.shape[1:])
            self._arrays[name][:before] = array[:before]

    def make(self, name: str, like: Tensor) -> None:
        """Have an array of entries like those of ``like`` [N, ..], if it is not there yet."""
        if name not in self._arrays:
            self._arrays[name] = like.new_zeros(self.capacity + 1, *like.shape[1:])

    def put(self, name: str, slots_N: Tensor, values: Tensor) -> None:
        """Store ``values`` [N, ..]. NaN, which a neighbour would catch through a masked sum, becomes 0."""
        self.make(name, values)
        self._arrays[name].index_copy_(0, slots_N, values.nan_to_num())

    def get(self, name: str, slots: Tensor) -> Tensor:
        """[.., ..] for ``slots`` of any shape."""
        array = self._arrays[name]
        return array.index_select(0, slots.reshape(-1)).view(*slots.shape, *array.shape[1:])

    def zero(self) -> None:
        for array in self._arrays.values():
            array.zero_()
