"""The words of scheduling that are more than a configuration value."""

from __future__ import annotations

WORK_BASES = ("compute", "items", "requests")
"""What a request in flight may be measured by; `load.work` says what each means."""
ALL = -1
"""As a number of replicas: one on every worker."""
