"""The one step of the conversion that is ours: the order of query and key rows."""

from pathlib import Path

import pytest
import torch

from gpu_workers import gguf_convert


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As GGUF files hold it: within a head, the rows of both rotary halves take turns."""
    heads = weight.view(num_heads, 2, -1, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("num_heads", [1, 3, 9])
def test_rows_come_back_in_hugging_faces_order(num_heads: int) -> None:
    weight = torch.arange(num_heads * 8 * 5, dtype=torch.float32).view(num_heads * 8, 5)
    stored = permuted(weight, num_heads)
    assert not torch.equal(stored, weight)
    assert torch.equal(gguf_convert.unpermuted(stored, num_heads), weight)


def test_a_head_of_four_rows_reads_first_third_second_fourth() -> None:
    stored = torch.tensor([[0.0], [2.0], [1.0], [3.0]])
    assert gguf_convert.unpermuted(stored, 1).flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_file_that_is_not_there_is_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(tmp_path / "model.gguf"), str(tmp_path / "out")]
    assert gguf_convert.main(argv) == gguf_convert.EX_DATA
    assert capsys.readouterr().err.endswith("model.gguf: there is no such file\n")
    assert not (tmp_path / "out").exists()
