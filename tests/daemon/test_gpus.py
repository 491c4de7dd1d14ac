"""GPUs by name: what a word means, whatever CUDA's variables say, and what a worker is told."""

import inspect
import sys
from pathlib import Path

import msgspec
import psutil
import pynvml
import pytest

from daemon import worker_configs
from daemon.config import DaemonConfig, read_config
from daemon.devices import Devices, read_devices
from daemon.errors import ConfigError
from daemon.feasibility import check_placement
from daemon.gpus import list_gpus, named
from daemon.meeting_points import MeetingPoints
from daemon.model_sizes import read_outline
from daemon.placement import counted_out
from daemon.worker_process import WorkerProcess, gpu_environment
from ipc.messages import WorkerConfig
from ipc.vocabulary import DeviceKind, WorkerName
from tests.daemon.stage import MakeStage
from tests.gpu_workers.checkpoints import llama_gqa
from tests.gpu_workers.cuda_exchange.fake_nvml import FakeNvml

UUIDS = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932aaaa-1111-4106-c12f-20bd9faed9f6",
    "GPU-b0c1d2e3-2222-4106-c12f-20bd9faed9f6",
    "GPU-c9d8e7f6-3333-4106-c12f-20bd9faed9f6",
)
PARTS = ("MIG-11111111-d72c-4106-c12f-20bd9faed9f6", "MIG-22222222-d72c-4106-c12f-20bd9faed9f6")
ALL = list_gpus(FakeNvml(UUIDS))
SPLIT_MACHINE = FakeNvml(UUIDS[:2], instances={UUIDS[0]: PARTS})
SPLIT = list_gpus(SPLIT_MACHINE)
MIXED = list_gpus(FakeNvml(UUIDS[:2], names=("NVIDIA T4", "NVIDIA H200")))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["0"], [0]),
        (["2", "0"], [2, 0]),
        (["1-3"], [1, 2, 3]),
        (["0", "2-3"], [0, 2, 3]),
        ([UUIDS[2]], [2]),
        (["GPU-b", "GPU-8932f"], [2, 0]),
        (["GPU-c", "0"], [3, 0]),
    ],
)
def test_a_gpu_is_a_number_a_range_or_a_uuid_or_its_beginning(
    words: list[str], expected: list[int]
) -> None:
    assert named(words, ALL, {}) == tuple(UUIDS[number] for number in expected)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["4"], "4: there is no GPU 4 here, but GPU 0 \\(GPU-8932f937-.*, NVIDIA H200\\), GPU 1"),
        (["2-9"], "2-9: there is no GPU 9 here"),
        (["3-1"], "3-1 is no range of GPUs"),
        (["GPU-8932"], "GPU-8932: 2 GPUs begin like that here, but"),
        (["GPU-dead"], "GPU-dead: there is no such GPU here, but GPU 0"),
        (["MIG-1"], "MIG-1: there is no such GPU here"),
        (["0", "GPU-8932f"], f"0 and GPU-8932f are both {UUIDS[0]}"),
        (["0+1"], "'0\\+1' is no GPU: a number such as 0"),
        (["-1"], "'-1' is no GPU"),
        ([""], "'' is no GPU"),
    ],
)
def test_what_names_no_gpu_is_refused_with_those_that_there_are(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=f"devices: {why}"):
        named(words, ALL, {})


def test_a_machine_without_gpus_says_so() -> None:
    with pytest.raises(ConfigError, match="there is no GPU 0 here, but none at all"):
        named(["0"], [], {})


@pytest.mark.parametrize(
    ("variable", "words", "expected"),
    [
        ("2,0", ["0", "1"], [2, 0]),
        (f"{UUIDS[3]},GPU-b", ["0-1"], [3, 2]),
        ("3, 1", ["GPU-8932a"], [1]),
        ("1,9,2", ["0"], [1]),
    ],
)
def test_numbers_count_what_cuda_visible_devices_leaves(
    variable: str, words: list[str], expected: list[int]
) -> None:
    found = named(words, ALL, {"CUDA_VISIBLE_DEVICES": variable})
    assert found == tuple(UUIDS[number] for number in expected)


@pytest.mark.parametrize("variable", ["", "-1", "NoDevFiles", "9", "GPU-dead", "1,9,0"])
def test_what_cuda_visible_devices_leaves_out_cannot_be_named(variable: str) -> None:
    with pytest.raises(
        ConfigError, match=r"GPU-8932f: there is no such GPU here, but (none|GPU 0)"
    ):
        named(["GPU-8932f"], ALL, {"CUDA_VISIBLE_DEVICES": variable})


def test_numbers_of_different_models_mean_nothing_while_cuda_counts_by_speed() -> None:
    by_number = {"CUDA_VISIBLE_DEVICES": "1"}
    with pytest.raises(ConfigError, match="counts GPUs of different models by their speed"):
        named(["0"], MIXED, by_number)
    assert named(["0"], MIXED, by_number | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == (UUIDS[1],)
    assert named(["0"], MIXED, {"CUDA_VISIBLE_DEVICES": UUIDS[1]}) == (UUIDS[1],)
    assert named(["1"], MIXED, {}) == (UUIDS[1],)


def test_instances_of_mig_are_named_by_uuid() -> None:
    assert named(["MIG-2", "1"], SPLIT, {}) == (PARTS[1], UUIDS[1])
    only = {"CUDA_VISIBLE_DEVICES": PARTS[1]}
    assert named(["0"], SPLIT, only) == named(["MIG-2"], SPLIT, only) == (PARTS[1],)


@pytest.mark.parametrize("word", ["0", "GPU-8932f"])
def test_a_gpu_that_is_split_cannot_be_had_whole(word: str) -> None:
    with pytest.raises(ConfigError, match=f"{word}: GPU 0 .*split into {PARTS[0]}, {PARTS[1]}"):
        named([word], SPLIT, {})


def test_a_driver_that_does_not_answer_is_told_in_its_words() -> None:
    with pytest.raises(ConfigError, match="NVIDIA's driver says: Driver Not Loaded"):
        list_gpus(FakeNvml((), fails=True))


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match=r"nvidia-ml-py is not installed.*distserved\[cuda\]"):
        read_config(None, {"device": "cuda", "devices": ["0"]})


def test_the_library_that_is_played_has_the_face_of_the_real_one() -> None:
    for name, value in inspect.getmembers(FakeNvml):
        if name.startswith("NVML_"):
            assert getattr(pynvml, name) == value, name
        elif name.startswith("nvml"):
            ours = list(inspect.signature(value).parameters)[1:]
            assert len(ours) == len(inspect.signature(getattr(pynvml, name)).parameters), name


def test_numbers_are_gpus_where_workers_compute_on_gpus() -> None:
    on_gpus = read_devices(["0-1"], DeviceKind.CUDA, lambda: ALL)
    assert on_gpus == Devices(gpus=UUIDS[:2])
    assert read_devices(["GPU-b"], DeviceKind.AUTO, lambda: ALL) == Devices(gpus=(UUIDS[2],))
    assert read_devices(["0"], DeviceKind.CPU, lambda: ALL) == Devices(cores=((0,),))


def test_two_names_of_one_gpu_are_the_same_thing_to_hold() -> None:
    by_number = read_devices(["0"], DeviceKind.CUDA, lambda: ALL)
    by_uuid = read_devices(["GPU-8932f"], DeviceKind.CUDA, lambda: ALL)
    assert by_number.things == by_uuid.things == [f"GPU {UUIDS[0]}"]


def told(config: DaemonConfig, tmp_path: Path) -> list[WorkerConfig]:
    """What each worker is told."""
    placement = counted_out(config)
    check_placement(config, placement, read_outline(config))
    configs = worker_configs.WorkerConfigs(
        config,
        placement,
        endpoint="ipc://x",
        meeting_points=MeetingPoints(tmp_path),
        max_context_tokens=64,
        num_token_ids=100,
    )
    return [configs.of(spec, 1, WorkerName(spec.name)) for spec in placement.instances]


def gpu_config(tmp_path: Path, *words: str, shares: bool = False) -> DaemonConfig:
    model = str(llama_gqa(tmp_path / "m"))
    return DaemonConfig(model=model, device=DeviceKind.CUDA, devices=words, share_gpus=shares)


def test_workers_see_the_named_gpus_by_uuid_in_their_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(UUIDS))
    first, second = told(gpu_config(tmp_path, "GPU-c", "0"), tmp_path)
    assert (first.device, second.device) == (0, 1)
    expected = {"CUDA_VISIBLE_DEVICES": f"{UUIDS[3]},{UUIDS[0]}"}
    assert gpu_environment(first) == gpu_environment(second) == expected


async def test_cuda_hears_of_them_before_anything_else_in_a_worker(make_stage: MakeStage) -> None:
    stage = await make_stage()
    config = stage.configs.of(stage.ward.spec, 1, WorkerName("mixed-0"))
    named_gpus = msgspec.structs.replace(config, visible_gpus=UUIDS[:2])
    process = await WorkerProcess.start(named_gpus)
    try:
        environment = psutil.Process(process.pid).environ()
        assert environment["CUDA_VISIBLE_DEVICES"] == f"{UUIDS[0]},{UUIDS[1]}"
    finally:
        process.kill()
        await process.ended()
        process.close()


def test_a_worker_on_an_instance_of_mig_sees_that_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SPLIT_MACHINE)
    workers = told(gpu_config(tmp_path, "MIG-2", "MIG-1"), tmp_path)
    assert [worker.device for worker in workers] == [0, 0]
    assert [worker.visible_gpus for worker in workers] == [(PARTS[1],), (PARTS[0],)]


def test_workers_may_share_fewer_gpus_than_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(UUIDS))
    with pytest.raises(ConfigError, match="1 are named, and the placement needs number 1"):
        told(gpu_config(tmp_path, "2"), tmp_path)
    workers = told(gpu_config(tmp_path, "2", shares=True), tmp_path)
    assert [(w.device, w.visible_gpus) for w in workers] == [(0, (UUIDS[2],))] * 2


def test_a_worker_without_named_gpus_sees_what_the_daemon_sees(tmp_path: Path) -> None:
    first, second = told(gpu_config(tmp_path), tmp_path)
    assert (first.device, second.device) == (0, 1)
    assert gpu_environment(second) == {}
