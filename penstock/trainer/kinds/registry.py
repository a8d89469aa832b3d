"""The kinds of drafters that can be trained, by name."""

from __future__ import annotations

from typing import Final

from penstock.trainer.kinds.base import Kind
from penstock.trainer.kinds.draft import DRAFT
from penstock.trainer.kinds.eagle import EAGLE
from penstock.trainer.kinds.eagle3 import EAGLE3
from penstock.trainer.kinds.medusa import MEDUSA
from penstock.trainer.kinds.mtp import MTP
from penstock.trainer.kinds.spd import EARLY_EXIT, SPD

KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in (EAGLE, EAGLE3, MEDUSA, MTP, SPD, EARLY_EXIT, DRAFT)}
