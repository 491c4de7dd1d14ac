"""Whether requests are traced, and by what: the optional part is loaded here, or asked for."""

import importlib
from typing import Protocol

from daemon.config import DaemonConfig
from daemon.errors import ConfigError
from daemon.request import Request
from daemon.timelines import RequestTimeline


class Tracer(Protocol):
    """What is told of each request that has ended."""

    def ended(self, request: Request, timeline: RequestTimeline) -> None: ...

    def close(self) -> None: ...


class NoTracer:
    """Where no endpoint is configured."""

    def ended(self, request: Request, timeline: RequestTimeline) -> None:
        """Nobody wants to know."""

    def close(self) -> None:
        """Nothing is held."""


def tracer_of(config: DaemonConfig, version: str) -> Tracer:
    """Raises ConfigError: traces are configured, and what they need is not installed."""
    if config.otlp_endpoint is None:
        return NoTracer()
    try:
        tracing = importlib.import_module("daemon.tracing")
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry: pip install 'distserved[otel]' ({error})"
        ) from error
    processor = tracing.batching_exporter(config.otlp_endpoint)
    tracer: Tracer = tracing.RequestTracer(processor, config.model_id, version)
    return tracer
