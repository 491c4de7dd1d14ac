"""What the fake library takes is what the real one takes, where that is installed."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from gpu_workers.cuda_switches import SWITCHES
from tests.gpu_workers.checkpoints import llama_gqa
from tests.gpu_workers.cuda import faces
from tests.gpu_workers.cuda.rig import CudaDriver

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's import


@needs_flashinfer
def test_the_faces_in_the_file_are_those_of_the_installed_library() -> None:
    library = importlib.import_module("flashinfer")
    if library.__version__ == faces.stored()["version"]:
        assert faces.faces_of(library) == faces.stored()["faces"]


@needs_flashinfer
def test_the_installed_library_takes_every_call_that_we_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = importlib.import_module("flashinfer")
    found = faces.faces_of(library)
    monkeypatch.setenv(SWITCHES, "rope,append,silu,norm")
    driver = CudaDriver(llama_gqa(tmp_path))
    driver.generate(list(b"Come unto these yellow sands"), 3)
    called = {name for name, *_ in driver.flashinfer.shapes}
    assert found.keys() - called == {f"{faces.CLASSES[1]}.reset_workspace_buffer"}
    for name, num_given, named in driver.flashinfer.shapes:
        faces.as_signature(found[name]).bind(*range(num_given), **dict.fromkeys(named))


def test_a_call_that_the_library_does_not_take_is_refused() -> None:
    with pytest.raises(TypeError, match="head_dim"):
        faces.signature("BatchPrefillWithPagedKVCacheWrapper.plan").bind(
            *range(5), num_qo_heads=1, num_kv_heads=1, head_dim=64, page_size=8
        )


def test_plans_take_all_but_their_tables_by_name() -> None:
    """Arguments in the order of places are on their way out of the library's decode plan."""
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    for name in names:
        assert "sm_scale" in faces.signature(f"{name}.plan").parameters
