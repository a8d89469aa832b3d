"""The kinds of drafters that can be trained, by name."""

from __future__ import annotations

from typing import Final

from penstock.trainer.draft import DRAFT
from penstock.trainer.eagle import EAGLE
from penstock.trainer.eagle3 import EAGLE3
from penstock.trainer.kind import Kind
from penstock.trainer.medusa import MEDUSA
from penstock.trainer.spd import EARLY_EXIT, SPD

KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in (EAGLE, EAGLE3, MEDUSA, SPD, EARLY_EXIT, DRAFT)}
