"""The text of one request's output as its tokens come, up to a stop string.

Text that was shown is never taken back: bytes that may become a character are held, at most three,
and so is an end of the text that may become a stop string. Each token is decoded once. Read next:
`weights/tokenizer.py` (tokens to text), `request_state.py` (who shows it).
"""

from collections.abc import Sequence

from mdi_exec.weights.tokenizer import TextStream, Tokenizer


class OutputText:
    """Grows by `push`; without a tokenizer all text is empty.

    It ends before the stop string that is complete first, whatever tokens spell it. `is_stopped`
    says that it has: further tokens add nothing.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stop = stop
        self._pieces: list[str] = []  # what each token made certain
        self._held = ""
        self._rest: str | None = None  # what the end made certain, once it was asked for
        self.is_stopped = False

    @property
    def num_tokens(self) -> int:
        return len(self._pieces)

    def push(self, token_ids: Sequence[int]) -> None:
        """Add tokens."""
        for token in token_ids:
            text = "" if self._stream is None else self._stream.push(token)
            self._pieces.append(self._until_stop(text) if self._stop else text)

    def between(self, start: int, stop: int) -> str:
        """Return what output tokens start .. stop-1 made certain."""
        return "".join(self._pieces[start:stop])

    def rest(self) -> str:
        """Return what was held when the output ended; nothing may be pushed afterwards."""
        if self._rest is None:
            last = "" if self._stream is None else self._stream.flush()
            certain = self._until_stop(last) if self._stop else last
            self._rest = certain if self.is_stopped else certain + self._held
        return self._rest

    def _until_stop(self, text: str) -> str:
        """Return what is certain of the held end and `text` behind it, and hold the rest."""
        if self.is_stopped:
            return ""
        window = self._held + text
        found = [(window.find(stop) + len(stop), -len(stop)) for stop in self._stop
                 if stop in window]  # fmt: skip
        if found:
            end, minus_length = min(found)
            self.is_stopped = True
            return window[: end + minus_length]
        certain = len(window) - self._num_held(window)
        self._held = window[certain:]
        return window[:certain]

    def _num_held(self, window: str) -> int:
        """Return the length of the longest end of `window` with which a stop string begins."""
        longest = min(max(map(len, self._stop)) - 1, len(window))
        return next(
            (n for n in range(longest, 0, -1)
             if any(stop.startswith(window[-n:]) for stop in self._stop)), 0,
        )  # fmt: skip
