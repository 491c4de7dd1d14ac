"""The daemon's configuration: frozen, checked once, the same keys in the TOML file and as flags.

A flag wins over the file, the file over the default. Unknown keys are errors, and every message
carries the path to its field. All that is wrong is found at once: whoever starts a daemon is told
the first of it, `distserve config check` tells the rest.
"""

import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from daemon.config_errors import reason_of, sentence_of, unknown
from daemon.devices import read_devices
from daemon.errors import ConfigError
from daemon.exposure import check_exposure, is_loopback
from daemon.tokenizer_files import read_json
from ipc.messages import LoadFormat
from ipc.vocabulary import DeviceKind, DType, PrefillPolicy, Role

Count = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Gibibytes = Annotated[float, msgspec.Meta(gt=0, le=1 << 20)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e7)]
_ORIGIN = re.compile(r"\*|https?://[^\s/,]+")
_TCP = r"^tcp://(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):[0-9]{1,5}$"
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

VERSION = 1
"""Of the file: `version = 1` may stand in it, so that another program's is not misread."""

AUTO = "auto"  # a placement that the planner is to find ...
SEARCHED = ("workload", "rate", "ttft", "tpot", "profile")  # ... for these
TARGETS = ("ttft", "tpot")  # ... of which these are the SLO that metrics are judged by in any case
SLO = "slo"  # an admission that refuses who would miss the target `ttft`, by `profile`
NO_LISTENER = "none"

RELOADABLE = ("log_level", "drain_s")  # by SIGHUP; all others take a restart

# What a placement says instead.
COUNTED = (
    *("prefill", "prefill_tp", "prefill_pp"),
    *("decode", "decode_tp", "decode_pp"),
    *("mixed", "mixed_tp", "mixed_pp"),
    "chunk_tokens",
)


class NodeAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a node's daemon listens for the others, such as `tcp://10.0.0.1:7400`."""

    address: Annotated[str, msgspec.Meta(pattern=r"^tcp://[^\s:/*]+:[0-9]{1,5}$")]

    @property
    def host(self) -> str:
        return self.address.removeprefix("tcp://").rsplit(":", 1)[0]


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that an operator may set; one line each, shown by `distserve serve --help`."""

    model: str = "models/smollm2"
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 9470
    otlp_endpoint: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/]+")] | None = None
    max_connections: Positive | None = None
    max_connections_per_peer: Positive | None = None
    cors_origins: tuple[str, ...] = ()
    api_keys: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    insecure: bool = False
    placement: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    node: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    nodes: dict[str, NodeAddress] = {}
    link_keys: str | None = None
    link_timeout_s: Annotated[float, msgspec.Meta(ge=0.5, le=3600)] = 5.0
    workload: str | None = None
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    ttft: str | None = None
    tpot: str | None = None
    profile: str | None = None
    prefill: Count = 1
    prefill_tp: Degree = 1
    prefill_pp: Degree = 1
    decode: Count = 1
    decode_tp: Degree = 1
    decode_pp: Degree = 1
    mixed: Count = 0
    mixed_tp: Degree = 1
    mixed_pp: Degree = 1
    dtype: DType = DType.BF16
    load_format: LoadFormat = LoadFormat.SAFETENSORS
    max_context_tokens: Annotated[int, msgspec.Meta(ge=2)] | None = None  # one in, one out
    kv_cache_gib: Gibibytes = 1.0
    prefill_kv_cache_gib: Gibibytes | None = None
    decode_kv_cache_gib: Gibibytes | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    prefill_tokens: Positive = 512
    prefill_policy: PrefillPolicy = PrefillPolicy.FCFS
    max_batch: Annotated[int, msgspec.Meta(ge=16)] = 256  # a request may have 16 choices
    chunk_tokens: Positive | None = None
    max_queued: Positive = 1024
    admission: Literal["full", "slo"] = "full"
    queue_timeout_s: Seconds = 300.0
    request_timeout_s: Seconds = 3600.0
    outage_timeout_s: Seconds = 60.0
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 3
    quarantine_deaths: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 3
    device: DeviceKind = DeviceKind.AUTO
    share_gpus: bool = False
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    threads_per_worker: Degree | None = None
    devices: tuple[str, ...] = ()
    drain_s: Seconds = 30.0
    start_timeout_s: Seconds = 600.0
    wedged_after_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 10.0
    run_dir: str | None = None
    admin_address: Annotated[str, msgspec.Meta(pattern=_TCP)] | None = None
    admin_keys: str | None = None
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    @property
    def model_dir(self) -> Path:
        return Path(self.model)

    @property
    def model_id(self) -> str:
        return self.served_model_name or self.model_dir.resolve().name

    def kv_bytes(self, role: Role) -> int:
        """The pool of each worker of such an instance."""
        by_role = {Role.PREFILL: self.prefill_kv_cache_gib, Role.DECODE: self.decode_kv_cache_gib}
        return int((by_role.get(role) or self.kv_cache_gib) * 2**30)


class Settings(msgspec.Struct, frozen=True):
    """What was set and not checked yet, and by whom: a file, or a flag by its name."""

    values: dict[str, Any]
    origins: dict[str, str]


def read_config(config_file: Path | None, flags: dict[str, Any]) -> DaemonConfig:
    """Raises ConfigError: the file or a value cannot be used."""
    config, troubles = checked(read_settings(config_file, flags))
    if troubles:
        others = len(troubles) - 1
        more = f" (and {others} more; `distserve config check` tells all)" if others else ""
        raise ConfigError(f"{troubles[0]}{more}")
    return config


def read_settings(config_file: Path | None, flags: dict[str, Any]) -> Settings:
    """Raises ConfigError: the file cannot be read, or is of another version."""
    values = _read_toml(config_file) if config_file else {}
    _check_version(config_file, values.pop("version", VERSION))
    origins = dict.fromkeys(values, str(config_file))
    for key, value in flags.items():
        if value is not None:
            values[key], origins[key] = value, f"--{key.replace('_', '-')}"
    return Settings(values, origins)


def checked(settings: Settings) -> tuple[DaemonConfig, list[str]]:
    """The configuration, and all that is wrong with it; if anything is, it is the default one."""
    values = settings.values
    troubles = [*_wrong_values(settings), *_source_troubles(values)]
    if troubles:
        return DaemonConfig(), troubles
    config = msgspec.convert(values, DaemonConfig)
    troubles = list(_troubles(config))
    return (DaemonConfig() if troubles else config), troubles


def model_context(config: DaemonConfig) -> int:
    """The longest sequence to serve: as configured, but never more than the model was made for.

    Raises:
        ConfigError: the directory is not a model, or the configured length passes the model's.
    """
    config_file = config.model_dir / "config.json"
    if not config_file.exists():
        raise ConfigError(
            f"{config.model}: no config.json there; a model is a local Hugging Face directory "
            "(`distserve models fetch smollm2` makes one)"
        )
    limit = read_json(config_file).get("max_position_embeddings")
    if type(limit) is not int or limit < 2:
        raise ConfigError(f"{config_file} gives no max_position_embeddings of 2 or more")
    if config.max_context_tokens is not None and config.max_context_tokens > limit:
        raise ConfigError(
            f"max_context_tokens is {config.max_context_tokens}, the model was made for {limit}"
        )
    return config.max_context_tokens or limit


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark first
    except (OSError, ValueError, RecursionError) as error:
        # tomllib lets out more than its own error: numbers of thousands of digits, deep nesting.
        raise ConfigError(f"{path}: {reason_of(error)}") from error


def _check_version(config_file: Path | None, version: object) -> None:
    """Before anything else: another version may have other keys."""
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{config_file}: version: the file has version {version!r}, this daemon reads version "
            f"{VERSION}"
        )


def _wrong_values(settings: Settings) -> Iterator[str]:
    """Keys that there are not, and values of a wrong type or out of range."""
    kinds = typing.get_type_hints(DaemonConfig, include_extras=True)
    for key, value in settings.values.items():
        origin = settings.origins[key]
        if key not in kinds:
            yield f"{origin}: {unknown(key, kinds)}"
            continue
        try:
            msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            is_flag = origin.startswith("--")
            yield sentence_of(error, kinds[key], origin if is_flag else f"{origin}: {key}")


def _source_troubles(values: dict[str, Any]) -> Iterator[str]:
    """Instances are counted out here or come from a placement, never both."""
    counted = [key for key in COUNTED if key in values]
    if "placement" in values and counted:
        yield (
            f"placement and {counted[0]} exclude each other: a placement says which instances "
            "there are and in which shapes"
        )
    is_slo = values.get("admission") == SLO
    elsewhere = (*TARGETS, "profile") if is_slo else TARGETS
    searched = [key for key in SEARCHED if key in values and key not in elsewhere]
    if searched and values.get("placement") != AUTO:
        is_profile = searched[0] == "profile"
        or_slo = ", or an admission by target: admission = slo" if is_profile else ""
        yield f"{searched[0]} is for a placement that is searched: placement = auto{or_slo}"


def _troubles(config: DaemonConfig) -> Iterator[str]:
    """What cannot be together."""
    yield from _address_troubles(config)
    yield from _role_troubles(config)
    if config.admission == SLO and config.ttft is None:
        yield "admission = slo needs a target for the time to first token: set ttft"
    try:
        read_devices(config.devices, config.device)
    except ConfigError as error:
        yield str(error)


def _address_troubles(config: DaemonConfig) -> Iterator[str]:
    """Who may come from where."""
    for origin in config.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            yield (
                f"cors_origins: {origin!r} is none; an origin is https://HOST[:PORT], or * for any"
            )
    try:
        check_exposure(
            config.host, has_keys=config.api_keys is not None, is_insecure=config.insecure
        )
    except ConfigError as error:
        yield str(error)
    if config.admin_host != NO_LISTENER and not is_loopback(config.admin_host):
        yield (
            f"admin_host: {config.admin_host!r} is no loopback address, and nobody is asked for a "
            "key there; scrape /metrics on the service's own port, or tunnel (ssh -L)"
        )
    if config.admin_address is not None and config.admin_keys is None:
        yield (
            "admin_address: consoles come over TCP with keys only: set admin_keys "
            "(`distserve console keygen DIR` makes them)"
        )


def _role_troubles(config: DaemonConfig) -> Iterator[str]:
    """Somebody does each phase, and by a policy that its steps have."""
    if not config.prefill + config.mixed:
        yield "nobody prefills: set prefill or mixed to 1 or more"
    if not config.decode + config.mixed:
        yield "nobody decodes: set decode or mixed to 1 or more"
    is_fcfs = config.prefill_policy is PrefillPolicy.FCFS
    if config.chunk_tokens is not None and not config.prefill and not is_fcfs:
        yield (
            f"prefill_policy {config.prefill_policy} is for steps of prompts alone, and with "
            "chunk_tokens and no prefill instances there are none"
        )
