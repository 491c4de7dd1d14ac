from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from daemon.chat_template import ChatTemplate
from daemon.errors import ConfigError, InvalidRequest
from tests.daemon.small_tokenizers import (
    byte_level,
    byte_level_directory,
)

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTION = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content.strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
DATED = """{% if not date is defined %}{% set date = strftime_now("%Y") %}{% endif %}
{% set ns = namespace(count=0) %}
{% for message in messages %}
  {% set ns.count = ns.count + 1 %}
  {% if message.role == "system" %}{% continue %}{% endif %}
<{{ ns.count }}|{{ message.role }}>{{ message | tojson }}
  {% if ns.count > 2 %}{% break %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
Year {{ date }}
"""
MARKED = """{% for message in messages %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {% else %}
{{ message.content }}
    {% endif %}
{% endfor %}{{ add_generation_prompt }}"""
CHATS = [
    [{"role": "user", "content": "Hi <b>there</b> 世界 🎉 "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ' What\'s "up"?\n'},
        {"role": "assistant", "content": "All & well"},
        {"role": "user", "content": "Good."},
    ],
]
NAMES = {"bos_token": "</s>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [CHATML, INSTRUCTION, DATED, MARKED])
def test_a_chat_is_rendered_as_transformers_does(
    source: str, chat: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **NAMES)  # type: ignore[no-untyped-call]
    expected = reference.apply_chat_template(
        chat,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    template = ChatTemplate(source, NAMES)
    assert template.render(chat, add_generation_prompt=add_generation_prompt) == expected


def test_what_a_template_refuses_is_the_clients_mistake() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(CHATS[0])


def test_a_template_that_reaches_for_what_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages[0].content.none.such }}").render(CHATS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{% for tool in tools %}{{ tool.name }}{% endfor %}",
        "{{ tools + 'x' }}",
        "{{ messages[9].role }}",
        "{{ tools.name.first }}",
        "{{ tools | tojson | int(base=99) }}{{ tools() }}",
        "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(tools) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_cannot_do_with_a_clients_variables_is_the_clients_mistake(
    source: str,
) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ChatTemplate(source).render(CHATS[0], extra={"tools": 5})


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        template.render(CHATS[0])


def test_a_template_cannot_change_the_messages() -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages.clear() }}").render(list(CHATS[0]))


def test_a_template_that_is_none_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError):
        ChatTemplate("{% if %}")


@pytest.fixture
def template_of(tmp_path: Path) -> Callable[..., ChatTemplate | None]:
    """Loads a directory that holds such settings and, perhaps, such a template file."""

    def load_template(file: str | None = None, **settings: object) -> ChatTemplate | None:
        directory = byte_level_directory(tmp_path / "m", **settings)
        if file is not None:
            (directory / "chat_template.jinja").write_text(file, encoding="utf-8")
        return ChatTemplate.from_directory(directory)

    return load_template


def rendered(template: ChatTemplate | None) -> str:
    assert template is not None
    return template.render(CHATS[0])


def test_a_template_may_stand_in_the_settings(
    template_of: Callable[..., ChatTemplate | None],
) -> None:
    assert rendered(template_of(chat_template="{{ eos_token }}")) == "<|im_end|>"


def test_a_file_of_its_own_counts_more(template_of: Callable[..., ChatTemplate | None]) -> None:
    assert rendered(template_of("file", chat_template="settings")) == "file"


def test_of_several_templates_the_default_is_taken(
    template_of: Callable[..., ChatTemplate | None],
) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    assert rendered(template_of(chat_template=named)) == "plain"


def test_a_model_may_have_no_template(template_of: Callable[..., ChatTemplate | None]) -> None:
    assert template_of() is None


def test_a_template_that_cannot_be_read_is_refused_with_its_file(
    template_of: Callable[..., ChatTemplate | None], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"_config\.json: chat_template\[0\]: it must be"):
        template_of(chat_template=[1])
    (tmp_path / "m" / "chat_template.jinja").write_bytes(b"\x80")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read: it is no text"):
        ChatTemplate.from_directory(tmp_path / "m")
