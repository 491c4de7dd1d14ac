"""Requests made from the API's own description, good and bad ones: never a failure of ours.

Every answer has to be one that the description tells of. Bodies go through the real application
to a fake engine; what is below HTTP is fuzzed elsewhere.
"""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from daemon.frontend.bodies import Limits
from daemon.frontend.openapi import OPERATIONS, Operation
from daemon.text import Tokenizer
from tests.daemon.frontend.http_calls import REPLY
from tests.daemon.frontend.http_service import Service

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
NUM_EXAMPLES = 60


@pytest.fixture(scope="module")
def described(tokenizer: Tokenizer) -> Any:
    """The application, asked for its description."""
    service = Service(tokenizer, reply=REPLY, limits=Limits())
    return schemathesis.openapi.from_asgi("/openapi.json", service.app)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(
    "operation", [each for each in OPERATIONS if each.body], ids=lambda each: each.name
)
def test_every_request_has_an_answer_that_is_described(
    described: Any, operation: Operation, mode: GenerationMode
) -> None:
    cases = described[operation.public_path][operation.method].as_strategy(generation_mode=mode)
    checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS

    @given(case=cases)
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        response = case.call()
        is_too_large = response.status_code == 413  # refused before anybody looks at its fields
        case.validate_response(response, checks=CHECKS if is_too_large else checks)

    ask()
