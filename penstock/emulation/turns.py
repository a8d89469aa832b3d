"""How a drafter uses a stage's device: it requests a turn, and is told when the device has taken the pass."""

from __future__ import annotations

from penstock.messages import DeviceReserved, Message, ReserveDevice
from penstock.pipeline.base import SideChannel


class DeviceTurns:
    """Turns on the device of one stage of a pipeline, one at a time."""

    def __init__(self, channel: SideChannel, stage: int) -> None:
        self._channel = channel
        self._stage = stage
        self._taken: DeviceReserved | None = None
        channel.listen(self._on_message)

    def ask(self, seconds: float, arrives: float) -> None:
        """Request a turn for a pass of ``seconds``. The message arrives at the moment ``arrives`` of the clock."""
        self._channel.tell(self._stage, ReserveDevice(seconds=seconds), arrives)

    def taken(self) -> DeviceReserved | None:
        """The turn that the device has given to the pass; None before, and None again once it has been returned."""
        taken, self._taken = self._taken, None
        return taken

    def _on_message(self, message: Message) -> bool:
        if not isinstance(message, DeviceReserved):
            return False
        self._taken = message
        return True
