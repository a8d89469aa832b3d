"""Arrays of everything that a state-carrying layer stores for each row, by slot."""

from __future__ import annotations

from torch import Tensor


class SlotArrays:
    """Arrays [capacity + 1, ..] by name, made, zeroed, when first needed.

    The last entry stands for the place above the first row of a text. It stays zero.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._arrays: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self._arrays.values())

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` slots. Slots that exist keep their contents."""
        before, self.capacity = self.capacity, capacity
        for name, array in self._arrays.items():
            self._arrays[name] = array.new_zeros(capacity + 1, *array.shape[1:])
            self._arrays[name][:before] = array[:before]

    def make(self, name: str, like: Tensor) -> None:
        """Make an array with entries like those of ``like`` [N, ..], unless it exists."""
        if name not in self._arrays:
            self._arrays[name] = like.new_zeros(self.capacity + 1, *like.shape[1:])

    def put(self, name: str, slots_N: Tensor, values: Tensor) -> None:
        """Store ``values`` [N, ..]. NaN becomes 0: it would reach other rows through masked sums."""
        self.make(name, values)
        self._arrays[name].index_copy_(0, slots_N, values.nan_to_num())

    def get(self, name: str, slots: Tensor) -> Tensor:
        """The entries of ``slots``, which may have any shape: [*slots.shape, ..]."""
        array = self._arrays[name]
        return array.index_select(0, slots.reshape(-1)).view(*slots.shape, *array.shape[1:])

    def zero(self) -> None:
        for array in self._arrays.values():
            array.zero_()
