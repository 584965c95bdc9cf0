"""The guarded scatter, the resident token pool and the canary: everything that runs on the device."""

from kv_canary.canary import KVCanary
from kv_canary.changes import Sent
from kv_canary.findings import Health, StampViolation
from kv_canary.pool import TokenPool
from kv_canary.reference import scatter_req_token_ids_torch_reference
from kv_canary.report import GuardReport, GuardViolation, Offender
from kv_canary.scatter import launch_scatter_req_token_ids_kernel, scatter
from kv_canary.selftest import selftest
from kv_canary.stamping import KVSource
from kv_canary.verify import verify_tokens
from kv_canary.violations import CanaryViolation, LogFormat, Violation, ViolationLog
from kv_canary.warmup import warmup

__all__ = [
    "CanaryViolation",
    "GuardReport",
    "GuardViolation",
    "Health",
    "KVCanary",
    "KVSource",
    "LogFormat",
    "Offender",
    "Sent",
    "StampViolation",
    "TokenPool",
    "Violation",
    "ViolationLog",
    "launch_scatter_req_token_ids_kernel",
    "scatter",
    "scatter_req_token_ids_torch_reference",
    "selftest",
    "verify_tokens",
    "warmup",
]
