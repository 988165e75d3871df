"""What a federation does against clients that err or lie: one table for every engine."""

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
    """How a federation guards itself against clients that err or lie.

    Args:
        clip_norms: An update longer than this many times the usual length is scaled down to it; 0
            for never. The usual length is a median of this round's updates and of those of the
            last 20 rounds. The default is more than honest clients reached in any run that we
            made, so it changes nothing while nobody errs.
        refuse_norms: An update longer than this many times the usual length is refused; 0 for
            never. Where only one or two clients say what is usual, it is scaled down instead.
        clip_reports: Losses and loss changes that a selector is told are clipped to the median of
            the answers to the same question, plus and minus this many standard deviations (taken
            from the median absolute deviation); 0 for never. Fewer than five answers stay as they
            are.
        most_share: The most rounds for which one client is chosen, in multiples of its fair share
            C / N, in every window of 4 N / C rounds; at least 1, or 0 for no limit. Who has had
            them is not offered to the selector, unless fewer than C clients were left.

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
        self.norm_limits  # noqa: B018  it is checked when it is made
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
    """`given`, or the defence of a table of settings; the default one for None."""
    if isinstance(given, Defence):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError("defence", given, "must be fedcor.Defence, or a table of settings")
    try:
        return build_dataclass(Defence, given or {})
    except ConfigError as error:
        raise error.under("defence") from None
