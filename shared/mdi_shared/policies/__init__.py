"""Scheduling policies: small classes that drive the simulator and the engine alike."""

from mdi_shared.policies.base import Key, Policy, View
from mdi_shared.policies.registry import POLICIES, policy_from_spec

__all__ = ["POLICIES", "Key", "Policy", "View", "policy_from_spec"]
