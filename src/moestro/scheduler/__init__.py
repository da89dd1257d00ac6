"""Which sequences compute which tokens in each step."""

from moestro.scheduler.budget import SchedulerLimits
from moestro.scheduler.scheduler import Scheduler
from moestro.scheduler.sequence_update import SequenceUpdate

__all__ = ["Scheduler", "SchedulerLimits", "SequenceUpdate"]
