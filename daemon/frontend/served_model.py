"""The one model that this service offers, as the frontend needs to know it."""

import msgspec

from daemon.chat_template import ChatTemplate
from daemon.errors import ModelNotFound
from daemon.frontend.quoting import quoted
from daemon.text import Tokenizer


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Its name in the API, its text side, and its limits. `created` is in Unix seconds."""

    id: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_context: int
    created: int

    @property
    def card(self) -> dict[str, str | int]:
        """The model as `/v1/models` lists it."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "distserved",
            "root": self.id,
            "max_model_len": self.max_context,
        }

    def check_name(self, name: str | None) -> None:
        """A client may leave the name out, but not ask for another model.

        Raises:
            ModelNotFound: it did.
        """
        if name is not None and name != self.id:
            raise ModelNotFound(
                f"The model '{quoted(name)}' does not exist; this service offers '{self.id}'.",
                param="model",
            )
