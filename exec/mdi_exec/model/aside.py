"""Work beside other work: a second stream inside the captured graphs of small steps.

With few rows a kernel has few blocks, and a chain of such leaves most of a GPU idle. What does not
wait for one another can then run side by side; results are the same bits. Larger steps fill the
device anyway, and outside a graph another stream costs the host more than it saves.
"""

import torch

MOST_ROWS = 64


class Aside:
    """`with aside:` puts what is launched inside on the second stream; `join` waits for that.

    What is made there may be read behind the `join`; what is read there must be kept until then.
    Where there is no second stream, both do nothing.
    """

    def __init__(self, device: torch.device, num_rows: int) -> None:
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._stream: torch.cuda.Stream | None = None
        if is_captured and num_rows <= MOST_ROWS:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._main: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._main = torch.cuda.current_stream()
            self._stream.wait_stream(self._main)
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        if self._main is not None:
            torch.cuda.set_stream(self._main)

    def join(self) -> None:
        """Let what is launched from now on wait for what was put aside."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
