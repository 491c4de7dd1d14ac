"""What the fake library takes is what the real one takes, where that is installed."""

import importlib
import importlib.util

import pytest

from tests.gpu_workers.cuda import faces


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)
@pytest.mark.filterwarnings("ignore")
def test_the_faces_in_the_file_are_those_of_the_installed_library() -> None:
    library = importlib.import_module("flashinfer")
    found = faces.faces_of(library)
    if library.__version__ == faces.stored()["version"]:
        assert found == faces.stored()["faces"]
    for name, ours in faces.stored()["faces"].items():  # another version takes at least as much
        assert {parameter for parameter, *_ in ours} <= {p for p, *_ in found[name]}, name


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
