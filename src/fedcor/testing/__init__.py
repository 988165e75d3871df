"""For tests of selectors, ours and yours: a fake federation, and the rules of every selector.

A test of your own selector:

    from fedcor.testing import check_selector

    def test_my_selector():
        check_selector(MySelector(clients_per_round=3))
"""

from fedcor.testing.fake import FakeFederation
from fedcor.testing.suite import check_selector, round_trip

__all__ = ["FakeFederation", "check_selector", "round_trip"]
