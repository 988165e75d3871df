"""For tests of selectors and federated optimisers, ours and yours: the rules that each keeps.

A test of your own selector, and of your own optimiser:

    from fedcor.testing import check_optimiser, check_selector

    def test_my_selector():
        check_selector(MySelector(clients_per_round=3))

    def test_my_optimiser():
        check_optimiser(MyOptimiser())
"""

from fedcor.testing.conformance import round_trip
from fedcor.testing.fake_federation import FakeFederation
from fedcor.testing.optimiser_checks import check_optimiser
from fedcor.testing.selector_checks import check_selector

__all__ = ["FakeFederation", "check_optimiser", "check_selector", "round_trip"]
