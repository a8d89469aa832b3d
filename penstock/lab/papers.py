"""Cost models of other ways to spread one sequence over devices: sequence and tensor parallelism, and their kin.

Jupiter (Ye et al.) compares itself with them. Each splits every layer over all devices, which then have to exchange
hidden states in every layer. The numbers exchanged are those of its Table I, and for DT and Galaxy of its section VI-A.

- SP: sequence parallelism. A replica of the model on every device, and an equal part of the prompt; two all-gathers a
  layer. Decodes on one device.
- M-LM: Megatron's tensor parallelism (Shoeybi et al.). Equal shares of every layer; two all-reduces a layer.
- DT: M-LM with half of the layers decoupled, which exchange nothing.
- Galaxy: M-LM's bytes; shares follow the devices' speeds, and exchanges overlap with computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.cluster.spec import Device, Link, ModelPrice
from penstock.cluster.timing import DeviceTiming, Held, chunk, device_timing, held_by


@dataclass(frozen=True, kw_only=True)
class Method:
    """``elements``: hidden states exchanged per layer and token (Table I); each of them is gathered in a round of its
    own. ``by_speed``: shares are in proportion to the devices' memory bandwidths; otherwise they are equal."""

    elements: float
    replicas: bool = False
    by_speed: bool = False
    overlaps: bool = False


METHODS: Final = {
    "SP": Method(elements=2, replicas=True),
    "M-LM": Method(elements=4),
    "DT": Method(elements=2),
    "Galaxy": Method(elements=4, by_speed=True, overlaps=True),
}


USABLE: Final = 0.9
"""Fraction of a device's memory that the model may use."""


class Times(NamedTuple):
    """Seconds of computing and of exchanging hidden states."""

    computing: float
    exchanging: float
    overlaps: bool = False

    @property
    def total(self) -> float:
        return max(self[:2]) if self.overlaps else self.computing + self.exchanging


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that work on every layer together, each on the share that the method gives it.

    ``rings``: whether to count the traffic that really crosses a device's link. A ring gathers with (N - 1) / N of the
    elements in N - 1 messages; an all-reduce, whose elements Table I counts twice, is two such rounds. Otherwise Table
    I's elements count, without latency.
    """

    devices: Sequence[Device]
    model: ModelPrice
    link: Link
    rings: bool
    kv_slots: int

    def pass_times(self, method: Method, rows: int, cached: int) -> Times:
        """Seconds of one pass over ``rows`` tokens after ``cached`` ones."""
        if method.replicas and rows == 1:
            return Times(min(self._whole(device).seconds(1, chunk(1, cached)) for device in self.devices), 0.0)
        computing = [self._share_seconds(method, n, rows, cached) for n in range(len(self.devices))]
        return Times(max(computing), self.exchanging_s(method, rows), method.overlaps)

    def exchanging_s(self, method: Method, rows: int) -> float:
        others = len(self.devices) - 1
        if not others:
            return 0.0
        elements = method.elements * self.model.layers * self.model.hidden_size * rows
        seconds = elements * self.model.activation_bytes * 8 / (self.link.bandwidth_gbit_s * 1e9)
        if not self.rings:
            return seconds
        latency = method.elements * others * self.model.layers * self.link.latency_ms / 1e3
        return seconds * others / len(self.devices) + latency

    def held(self, method: Method, index: int) -> Held:
        """Bytes that a device has to hold. Under tensor parallelism that is its share, and the whole embedding."""
        whole = held_by(self.model, self.model.all_layers, self.kv_slots, embedding=True, head=True)
        if method.replicas:
            return whole
        share = self._share(method, index)
        weights = (whole.weights - self.model.embedding_bytes) * share + self.model.embedding_bytes
        return Held(weights, whole.cache * share, whole.activations)

    def lacking(self, method: Method) -> list[str]:
        """Names of the devices whose usable memory does not suffice."""
        return [
            device.name
            for i, device in enumerate(self.devices)
            if device.memory_gb is not None and self.held(method, i).total > USABLE * device.memory_gb * 1e9
        ]

    def _share(self, method: Method, index: int) -> float:
        if not method.by_speed:
            return 1 / len(self.devices)
        rates = [device.weight_bandwidth_gb_s or 0.0 for device in self.devices]
        return rates[index] / sum(rates)

    def _whole(self, device: Device) -> DeviceTiming:
        return device_timing(device, self.model, self.model.all_layers, 1.0, head=True)

    def _share_seconds(self, method: Method, index: int, rows: int, cached: int) -> float:
        """Seconds of a device's share: a replica computes some rows with all weights, a shard all rows with some
        weights."""
        timing, share, seen = self._whole(self.devices[index]), self._share(method, index), chunk(rows, cached)
        reads = 1.0 if method.replicas else share
        part = DeviceTiming(
            fixed_s=timing.fixed_s,
            weight_s=timing.weight_s * reads,
            row_s=timing.row_s * share,
            pair_s=timing.pair_s * share,
            slot_s=timing.slot_s * reads,
        )
        return part.seconds(rows, seen)


def sequence_s(group: Group, method: Method, prompt: int, tokens: int) -> tuple[float, float]:
    """Seconds of the prompt, and of the tokens that are then decoded one by one."""
    decoding = (group.pass_times(method, 1, prompt + done).total for done in range(tokens))
    return group.pass_times(method, prompt, 0).total, sum(decoding)
