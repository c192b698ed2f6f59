"""What the executor can find wrong beyond the mistakes `mdi_shared.errors` names."""

from mdi_shared.errors import MiniDeepInferError


class NumericsError(MiniDeepInferError):
    """A request's logits are not finite; the engine has stopped."""

    def __init__(self, req_id: str, where: str) -> None:
        super().__init__(req_id, where)
        self.req_id = req_id
        self.where = where

    @property
    def message(self) -> str:
        return (
            f"request {self.req_id!r}: its logits are not finite; the first values that are not "
            f"come out of {self.where}"
        )


class EngineStoppedError(MiniDeepInferError):
    """The engine was closed, or an error before this call has stopped it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def message(self) -> str:
        return f"the engine has stopped: {self.reason}"


class GroupError(MiniDeepInferError):
    """Another rank of the group has failed or died, and this one has stopped with it.

    `is_quoted` says that another rank raises the reason itself, as its own error.
    """

    def __init__(self, reason: str, is_quoted: bool = False) -> None:
        super().__init__(reason, is_quoted)
        self.reason = reason
        self.is_quoted = is_quoted

    @property
    def message(self) -> str:
        return f"the group of ranks has stopped: {self.reason}"
