"""Every exception termgen raises on purpose.

    TermgenError                 base; its message is one plain line a person can act on
    ├── ConfigError              a flag, a config-file entry or an environment variable is wrong
    ├── ModelError               a model cannot be found, fetched, read or run here
    │   ├── ModelNotFoundError   no such name, folder or file
    │   ├── UnsupportedModelError  an architecture, dtype or tensor type that is not supported
    │   ├── CorruptFileError     a file is truncated, inconsistent or hostile
    │   └── DownloadError        fetching failed; nothing half-written is left behind
    ├── RequestError             one request is wrong: HTTP status, `code` slug and `param` name
    │   ├── ContextLengthError   the prompt (plus what it asks for) does not fit the model
    │   ├── LoadingError         the model is still loading; says which phase it is in
    │   └── OverloadedError      too many requests wait; says when to retry
    ├── ChatStoreError           the chats on disk cannot be read or written
    └── EngineError              the engine failed, not the request
        ├── StepError            one step failed; the requests in it are failed with this cause
        ├── CorruptedLogitsError  the model gave one request NaN or infinite logits
        └── EngineDeadError      the engine thread is gone

The command line prints `TermgenError` as one line and exits with code 2; the server turns
`RequestError` into its HTTP status. A failing `assert` elsewhere is a bug in termgen.
"""

from __future__ import annotations

import re

MAX_MESSAGE_CHARS = 1000
"""Longer messages of a ModelError are cut."""


class TermgenError(Exception):
    """Base class of everything raised on purpose."""


class ConfigError(TermgenError):
    """A setting is wrong; `param` names the flag or key."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelError(TermgenError):
    """A model cannot be found, fetched, read or run.

    The message may quote untrusted files, so it is reduced to one line of printable text.
    """

    def __init__(self, message: str) -> None:
        line = "".join(c if c.isprintable() else "?" for c in re.sub(r"\s*\n\s*", " ", message))
        is_long = len(line) > MAX_MESSAGE_CHARS
        super().__init__(line[:MAX_MESSAGE_CHARS] + "..." if is_long else line)


class ModelNotFoundError(ModelError):
    """No such model name, folder or file."""


class UnsupportedModelError(ModelError):
    """The file is well formed, but termgen cannot run the model in it."""


class CorruptFileError(ModelError):
    """A model file is truncated, inconsistent or hostile."""


class DownloadError(ModelError):
    """Fetching a model failed. Nothing half-written is left in the cache."""


class CacheError(DownloadError):
    """The local cache cannot store the file: another source would not help."""


class RequestError(TermgenError):
    """One request is wrong. `param` names the field, `code` is a slug clients match on."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        self.type = type


class ContextLengthError(RequestError):
    """The prompt, or the prompt plus the tokens asked for, exceeds the model's context."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class LoadingError(RequestError):
    """The model is still loading. `progress`: completed share of `phase`, 0 to 1."""

    def __init__(self, phase: str, progress: float) -> None:
        what = (
            f"The model is still loading ({phase}, {progress:.0%})"
            if phase
            else ("The model is still loading")
        )
        super().__init__(f"{what}; try again soon", code="loading", status=503, type="server_error")
        self.phase = phase
        self.progress = progress


class OverloadedError(RequestError):
    """The queue is full. The same request may be accepted `retry_after_s` later."""

    def __init__(
        self, message: str, *, code: str, retry_after_s: float, param: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code, status=429, type="rate_limit_error")
        self.retry_after_s = retry_after_s


class ChatStoreError(TermgenError):
    """The chats on disk cannot be read or written, or a file of a chat is not one."""


class EngineError(TermgenError):
    """The engine failed, not the request. `code` is a slug clients match on."""

    code = "engine_error"


class StepError(EngineError):
    """One engine step failed. Every request in it fails with this error, once."""

    def __init__(self, message: str, *, step_id: int, request_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.step_id = step_id
        self.request_ids = request_ids


class CorruptedLogitsError(EngineError):
    """The model gave one request NaN or infinite logits. Others in its batch continue."""

    code = "corrupted_logits"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the model's logits for request {request_id} are not finite numbers: its activations"
            " overflowed, or its weights are damaged; with dtype float16, try bfloat16 or float32"
        )


class EngineDeadError(EngineError):
    """The engine thread has ended; no request can be served any more."""

    def again(self) -> EngineDeadError:
        """A fresh copy: re-raising one exception object accumulates tracebacks and their frames."""
        again = EngineDeadError(*self.args)
        again.__cause__ = self.__cause__
        return again
