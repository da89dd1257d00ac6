"""Which sequences compute which tokens in each step."""

from moestro.scheduler.budget import SchedulerLimits
from moestro.scheduler.drafting import DraftPolicy, FixedDrafts
from moestro.scheduler.scheduler import Scheduler
from moestro.scheduler.sequence_update import SequenceUpdate

__all__ = ["DraftPolicy", "FixedDrafts", "Scheduler", "SchedulerLimits", "SequenceUpdate"]
