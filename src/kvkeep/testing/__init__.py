"""Is a method faithful? Checks that a new policy's own tests can call, without a model.

::

    from kvkeep.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy(), reference)  # reference: the formula in plain loops, see Reference
"""

from .fidelity import NEAR, Agreement, Reference, check_policy
from .views import Entries, Made

__all__ = ["NEAR", "Agreement", "Entries", "Made", "Reference", "check_policy"]
