"""Is a method faithful? Checks for any policy, built in or installed, which its own tests can call.

::

    from kvkeep.testing import check_policy, shared_checks

    def test_my_policy():
        check_policy(MyPolicy(), reference)  # reference: the formula in plain loops, see Reference

    def test_what_every_policy_must_keep():
        assert not [f for f in shared_checks(MyPolicy()) if f.error]

``python -m kvkeep.testing NAME:option=value`` prints what the shared checks find.
"""

from .fidelity import NEAR, Agreement, Reference, check_policy
from .shared import Finding, shared_checks
from .views import Entries, Made

__all__ = ["NEAR", "Agreement", "Entries", "Finding", "Made", "Reference", "check_policy", "shared_checks"]
