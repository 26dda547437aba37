"""What a manager whose entries may be in host memory has in place of its usual parts."""

from __future__ import annotations

from dsv4.cache.residency.admission import ResidentAdmission
from dsv4.cache.residency.handle import ResidentHandle
from dsv4.cache.residency.residency import Residency
from dsv4.cache.residency.steps import ResidentSteps

__all__ = ["Residency", "ResidentAdmission", "ResidentHandle", "ResidentSteps"]
