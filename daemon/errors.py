"""Everything that can go wrong on purpose. The class carries the meaning, the message the numbers.

`ServeError`s reach clients as `{"error": {message, type, param, code}}` with the class's status;
`ExitError`s end a command with the class's exit code (sysexits) and one sentence on stderr.
"""


class ServeError(Exception):
    """A request that ends without its answer."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI-shaped error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(ServeError):
    """The client asked for something that cannot be; the same request will never succeed."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class InvalidJson(InvalidRequest):
    """The body is not JSON."""

    code = "invalid_json"


class UnsupportedParameter(InvalidRequest):
    """A known field of the API that this service does not offer."""

    code = "unsupported_parameter"


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer: in the model's context, or in a KV pool."""

    code = "context_length_exceeded"

    def __init__(self, *, num_prompt: int, num_output: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt + num_output} tokens ({num_prompt} in the prompt, {num_output} for the "
            "completion). Please shorten the prompt or ask for a shorter completion.",
            param="prompt",
        )


class InvalidApiKey(ServeError):
    """No key came with the request, or none that is known here."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class ModelNotFound(ServeError):
    """Another model was asked for than the one that is served."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class RouteNotFound(ServeError):
    """No such path."""

    status = 404
    kind = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(ServeError):
    """The path exists, the verb does not."""

    status = 405
    kind = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooLarge(ServeError):
    """The body passes the configured size."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class MalformedHttp(ServeError):
    """What arrived is not HTTP as it may be read."""

    status = 400
    kind = "invalid_request_error"
    code = "malformed_http"


class RequestTooSlow(ServeError):
    """The request did not arrive in time."""

    status = 408
    kind = "timeout"
    code = "request_timeout"


class UrlTooLong(ServeError):
    """No URL of this service is that long."""

    status = 414
    kind = "invalid_request_error"
    code = "url_too_long"


class HeadTooLarge(ServeError):
    """The request's head passes its size or its number of headers."""

    status = 431
    kind = "invalid_request_error"
    code = "head_too_large"


class QueueFull(ServeError):
    """The house is full; the same request may succeed after `retry_after_s`.

    OpenAI's clients do not try again at all where they are told to wait for more than two minutes.
    """

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = min(max(0.001, retry_after_s), 120.0)


class SloMissed(QueueFull):
    """What waits before it would make the request miss its target for the first token."""

    code = "slo"


class KeyLimit(QueueFull):
    """As many requests as its key may have are under way, or wait, already."""

    code = "key_limit"


class QueueTimeout(QueueFull):
    """It has waited for its prefill for as long as a request may."""

    code = "queue_timeout"


class RequestTimeout(ServeError):
    """It has taken as long as a request may in all."""

    status = 504
    kind = "timeout"
    code = "deadline_exceeded"


class NotReady(ServeError):
    """Nothing can be served now: starting, draining, or without a usable instance."""

    status = 503
    kind = "service_unavailable_error"
    code = "not_ready"
    retry_after_s = 2


class Draining(NotReady):
    """The daemon is about to end; it finishes what it has and takes nothing new."""

    code = "draining"

    def __init__(self, message: str = "the service is draining and takes no new requests") -> None:
        super().__init__(message)


class TooManyConnections(NotReady):
    """No place for one more connection, from this peer or from anybody."""

    code = "too_many_connections"


class AbortedByOperator(ServeError):
    """Ended on purpose. No status that clients take as an invitation to try again."""

    status = 403
    kind = "permission_error"
    code = "aborted_by_operator"

    def __init__(self) -> None:
        super().__init__("This request was ended by the service's operator.")


class ServiceFailed(ServeError):
    """A mistake of our own; what it was stands in the log, not in the answer."""

    def __init__(self) -> None:
        super().__init__("The service failed.")


class WorkerFailed(ServeError):
    """The worker that held this request died or refused it."""

    code = "worker_failed"


class ExitError(Exception):
    """Ends a command: one sentence for people, one exit code for scripts."""

    exit_code = 70


class ConfigError(ExitError):
    """The configuration, the model directory or the placement cannot work."""

    exit_code = 78


class AlreadyRunning(ExitError):
    """Another daemon holds this run directory or this port."""

    exit_code = 75


class DeviceTaken(AlreadyRunning):
    """Another daemon has a device that this one was to use."""


class Unreachable(ExitError):
    """No daemon answers on this run directory."""

    exit_code = 3


class StoppedEarly(ExitError):
    """A signal came before there was anything to drain: stopped on request."""

    exit_code = 0


class StartFailed(ExitError):
    """The workers could not be brought up."""

    exit_code = 69
