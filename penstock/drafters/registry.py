"""All drafters by the name that users give, the method. A new one is a file of the package and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.registry import Registry

if TYPE_CHECKING:
    from penstock.drafters.options import DrafterOptions

DRAFTERS: Final[Registry[DrafterOptions]] = Registry(
    "penstock.drafters",
    {
        "draft_model": "small_model:SmallModelOptions",
        "eagle": "learned:FollowingOptions",
        "eagle3": "learned:FollowingOptions",
        "early_exit": "spd:EarlyExitOptions",
        "medusa": "learned:FollowingOptions",
        "mtp": "learned:MtpOptions",
        "ngram": "ngram:NgramOptions",
        "spd": "spd:SpdOptions",
        "synthetic": "synthetic:SyntheticOptions",
    },
)
