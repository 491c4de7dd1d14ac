"""The faces of FlashInfer's functions that we call: as signatures in a file.

The library is not needed to run the tests; where it is installed, the file is compared with it.
"""

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("flashinfer_faces.json")
CLASSES = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
METHODS = ("__init__", "plan", "reset_workspace_buffer", "run")
FUNCTIONS = (
    "append_paged_kv_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "fused_add_rmsnorm",
    "rmsnorm",
    "silu_and_mul",
)

Face = list[list[str | None]]
"""Name, kind and default (as text) of each parameter."""


def faces_of(library: Any) -> dict[str, Face]:
    """What the installed library looks like."""
    found = {name: _face(getattr(library, name)) for name in FUNCTIONS}
    for name in CLASSES:
        wrapper = getattr(library, name)
        found |= {f"{name}.{method}": _face(getattr(wrapper, method)) for method in METHODS}
        if hasattr(wrapper, "_plan_impl"):  # where `plan` takes names, and hands them on
            found[f"{name}.plan"] = _face(wrapper._plan_impl)
    return found


@cache
def stored() -> dict[str, Any]:
    """`version` and `faces`."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


@cache
def signature(name: str) -> inspect.Signature:
    """To bind calls with, as the library's own."""
    return as_signature(stored()["faces"][name])


def as_signature(face: Face) -> inspect.Signature:
    parameters = []
    for parameter, kind, default in face:
        given = {} if default is None else {"default": default}
        parameters.append(inspect.Parameter(parameter, inspect._ParameterKind[kind], **given))
    return inspect.Signature(parameters)


def _face(function: Any) -> Face:
    return [
        [p.name, p.kind.name, None if p.default is inspect.Parameter.empty else repr(p.default)]
        for p in inspect.signature(function).parameters.values()
    ]


def write(library: Any) -> None:
    """Take over the installed library's faces, after a look at what has changed."""
    content = {"version": library.__version__, "faces": faces_of(library)}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
