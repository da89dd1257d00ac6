"""What the command line makes of sequences that ended in an error."""

from collections.abc import Iterable

from moestro.core.outputs import RequestOutput
from moestro.core.request import FinishReason
from moestro.errors import GenerationError


def raise_failed(outputs: Iterable[RequestOutput]) -> None:
    """Raise GenerationError when a sequence failed; the engine puts the reason in stop_reason."""
    sequences = [sequence for output in outputs for sequence in output.outputs]
    failed = [s for s in sequences if s.finish_reason is FinishReason.ERROR]
    if failed:
        which = "" if len(sequences) == 1 else f"{len(failed)} of {len(sequences)} sequences: "
        raise GenerationError(f"{which}{failed[0].stop_reason or 'generation failed'}")
