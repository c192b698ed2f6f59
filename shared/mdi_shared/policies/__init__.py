"""Scheduling policies: small classes that drive the simulator and the engine alike."""

from mdi_shared.policies.base import Key, Policy, View
from mdi_shared.policies.registry import (
    NO_POLICY,
    POLICIES,
    new_policy,
    policy_from_spec,
    policy_name,
)

__all__ = [
    "NO_POLICY", "POLICIES", "Key", "Policy", "View", "new_policy", "policy_from_spec",
    "policy_name",
]  # fmt: skip
