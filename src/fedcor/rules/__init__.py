"""Who may be chosen: eligibility, numbers per group of clients, and clients per round over time.

The selectors decide as they always do; `fedcor.selection.decide` keeps their choice within the
rules.
"""

from fedcor.rules.fixed import FixedRules, fix_rules
from fedcor.rules.groups import Groups, make_groups
from fedcor.rules.seats import Seats, fill, seated, seats_of
from fedcor.rules.settings import (
    Bounds,
    ClientsPerRound,
    Eligible,
    Rules,
    as_rules,
    check_can_ask,
    check_rules_for,
    with_clients,
)
from fedcor.rules.tags import TagTable, as_tags, describe_tags, tag_columns, tag_text

__all__ = [
    "Bounds",
    "ClientsPerRound",
    "Eligible",
    "FixedRules",
    "Groups",
    "Rules",
    "Seats",
    "TagTable",
    "as_rules",
    "as_tags",
    "check_can_ask",
    "check_rules_for",
    "describe_tags",
    "fill",
    "fix_rules",
    "make_groups",
    "seated",
    "seats_of",
    "tag_columns",
    "tag_text",
    "with_clients",
]
