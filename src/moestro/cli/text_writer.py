"""Writing a growing text to the terminal as it comes."""

from moestro.cli.console import write_text
from moestro.core.outputs import RequestOutput


class TextWriter:
    """Writes what is new of the first sequence; several sequences are written when complete."""

    def __init__(self) -> None:
        self._written = 0

    def show(self, output: RequestOutput) -> None:
        """Write what came since the last call."""
        if len(output.outputs) > 1:
            if output.finished:
                for sequence in output.outputs:
                    write_text(f"[{sequence.index}] {sequence.text}\n")
            return
        text = output.outputs[0].text
        write_text(text[self._written :])
        self._written = len(text)
        if output.finished and not text.endswith("\n"):
            write_text("\n")
