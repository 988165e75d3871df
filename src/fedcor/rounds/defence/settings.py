"""`Defence`: the settings against faulty and malicious clients, the same on every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcor.core.config import build_dataclass, check_between, plain_keywords
from fedcor.core.errors import ConfigError
from fedcor.rounds.defence.update_norms import LARGEST, NormLimits


@plain_keywords
@dataclass(frozen=True)
class Defence:
    """How a federation defends itself against faulty and malicious clients.

    Args:
        clip_norms: An update longer than this many times the usual length is scaled down to it; 0
            for never. The usual length is a median over the updates of this round and of the last
            20 rounds. The default is more than honest clients reached in any of our runs, so it
            changes nothing while all clients work correctly.
        refuse_norms: An update longer than this many times the usual length is refused; 0 for
            never. Where the usual length rests on one or two clients, it is scaled down instead.
        clip_reports: Losses and loss changes that a selector reads are clipped to the median of the
            answers to the same question, plus and minus this many standard deviations (estimated
            from the median absolute deviation); 0 for never. Fewer than five answers stay as they
            are.
        most_share: The most rounds for which one client is chosen, in multiples of its fair share
            C / N, in every window of 4 N / C rounds; at least 1, or 0 for no limit. A client that
            has had them is not offered to the selector, unless fewer than C clients would be left.

    Example:
        >>> from fedcor import Defence
        >>> Defence(clip_norms=3.0).describe()
        {'clip_norms': 3.0}
    """

    clip_norms: float = 30.0
    refuse_norms: float = 1000.0
    clip_reports: float = 0.0
    most_share: float = 0.0

    def __post_init__(self) -> None:
        self.norm_limits  # noqa: B018  its constructor checks both
        check_between("clip_reports", self.clip_reports, 0.0, LARGEST)
        if self.most_share != 0.0 or isinstance(self.most_share, bool):
            check_between("most_share", self.most_share, 1.0, LARGEST)

    @property
    def norm_limits(self) -> NormLimits:
        """How long an update may be."""
        try:
            return NormLimits(self.clip_norms, self.refuse_norms)
        except ConfigError as error:
            raise error.renamed(f"{error.key}_norms") from None

    def describe(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as a record keeps them."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def as_defence(given: Any) -> Defence:
    """A `Defence` from an object, a table of settings, or None for the default."""
    if isinstance(given, Defence):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError("defence", given, "must be fedcor.Defence, or a table of settings")
    try:
        return build_dataclass(Defence, given or {})
    except ConfigError as error:
        raise error.under("defence") from None
