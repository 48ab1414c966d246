"""The errors of the server in OpenAI's form: the status and the body of each."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from blockdiff.errors import BlockdiffError, Closed, Full, RequestError, TimedOut
from blockdiff.serving.limits import HEAD_BYTES, HEADERS

RETRY_SECONDS = "1"
KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class Refused(RequestError):
    """The refusal of a request, with an HTTP status and a code (None: bad_request). param: the field at fault."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


HEAD_TOO_LARGE = Refused(
    f"the head has more than {HEAD_BYTES} bytes or {HEADERS} headers; send fewer", 431, "head_too_large"
)


def error_body(error: Exception, id: str | None = None) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON body of an error. An unexpected error reveals no message.

    id: of the request, for the body (None: leave it out).
    """
    message = str(error) if isinstance(error, BlockdiffError) else "the server failed; its log says why"
    status, code = 500, "server_error"
    if isinstance(error, Refused):
        status, code = error.status, error.code or "bad_request"
    elif isinstance(error, RequestError):
        status, code = 400, "bad_request"
    elif isinstance(error, Full):
        status, code = 429, "too_many_requests"
    elif isinstance(error, TimedOut):
        status, code = 504, "timeout"
    elif isinstance(error, Closed):
        status, code = 503, "closing"
    elif isinstance(error, HTTPException):
        status, code, message = (
            error.status_code,
            "not_found" if error.status_code == 404 else "bad_request",
            error.detail,
        )
    kind = "server_error" if status >= 500 else KINDS.get(status, "invalid_request_error")
    fields = {"message": message, "type": kind, "param": getattr(error, "param", None), "code": code}
    return status, {"error": fields | ({} if id is None else {"request_id": id})}


def error_response(error: Exception, id: str | None = None) -> JSONResponse:
    """Return the response to a request that ended with an exception, with headers such as retry-after."""
    status, body = error_body(error, id)
    headers = dict(getattr(error, "headers", None) or {})
    if status in (429, 503):
        headers["retry-after"] = RETRY_SECONDS
    if status == 431:
        headers["connection"] = "close"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body, status, headers=headers)
