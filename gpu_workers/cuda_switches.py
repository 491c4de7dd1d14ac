"""Which of a forward pass' smaller kernels on a GPU are FlashInfer's, and which are torch's."""

import os
from dataclasses import dataclass, fields

from gpu_workers.errors import ModelError

SWITCHES = "DISTSERVE_FLASHINFER"


@dataclass(frozen=True, slots=True)
class Switches:
    """Which passes beside attention are FlashInfer's; the others are torch's.

    FlashInfer's norms cannot be compiled without cublasLt's headers, which not every CUDA toolkit
    has; torch's are one kernel, too.
    """

    rope: bool = True
    append: bool = True
    silu: bool = True
    norm: bool = False

    @classmethod
    def from_environment(cls) -> "Switches":
        """As DISTSERVE_FLASHINFER lists them, such as `rope,append`; the defaults without it.

        Raises:
            ModelError: an unknown name.
        """
        text = os.environ.get(SWITCHES)
        if text is None:
            return cls()
        names = {name.strip() for name in text.split(",") if name.strip()}
        known = {field.name for field in fields(cls)}
        if names - known:
            wrong, right = ", ".join(sorted(names - known)), ", ".join(sorted(known))
            raise ModelError(f"{SWITCHES} names {wrong}; there are {right}")
        return cls(**{name: name in names for name in known})
