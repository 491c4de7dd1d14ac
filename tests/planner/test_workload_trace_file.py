"""Trace files: what reads back, and the sentence that each bad one gets."""

from pathlib import Path

import numpy as np
import pytest

from planner.errors import WorkloadError
from planner.workload.requests import Requests
from planner.workload.trace_file import read_trace, write_trace

HEADER = "arrival_s,input_tokens,output_tokens\n"


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def complaint(path: Path) -> str:
    with pytest.raises(WorkloadError) as caught:
        read_trace(path)
    return str(caught.value)


def test_a_trace_is_read_in_its_order(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEADER + "0,7,1\n0.5,300,2\n0.5,9,40\n"))
    assert trace.arrival_s.tolist() == [0.0, 0.5, 0.5]
    assert trace.input_tokens.tolist() == [7, 300, 9]
    assert trace.output_tokens.tolist() == [1, 2, 40]


def test_columns_may_stand_in_any_order_among_others(tmp_path: Path) -> None:
    text = "user, output_tokens ,arrival_s,input_tokens\nanna,5,1.25,80\n"
    trace = read_trace(written(tmp_path, text))
    assert (trace.arrival_s[0], trace.input_tokens[0], trace.output_tokens[0]) == (1.25, 80, 5)


def test_a_byte_order_mark_windows_line_ends_blank_lines_and_12_dot_0_are_no_obstacle(
    tmp_path: Path,
) -> None:
    text = "\ufeff" + HEADER + "0,12.0,3\n\n1,4,5\n\n"
    trace = read_trace(written(tmp_path, text.replace("\n", "\r\n")))
    assert trace.input_tokens.tolist() == [12, 4]


def test_what_is_written_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    lengths = random.integers(1, 5000, (2, 500))
    requests = Requests(np.cumsum(random.exponential(size=500)), lengths[0], lengths[1])
    path = tmp_path / "out.csv"
    write_trace(path, requests)
    back = read_trace(path)
    assert np.array_equal(back.arrival_s, requests.arrival_s)
    assert np.array_equal(back.input_tokens, requests.input_tokens)
    assert np.array_equal(back.output_tokens, requests.output_tokens)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    one = Requests(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    with pytest.raises(WorkloadError, match=r"nowhere/out\.csv: cannot be written"):
        write_trace(tmp_path / "nowhere" / "out.csv", one)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("0,10,2\n1,,2\n", "line 3: input_tokens is empty"),
        ("0,10,2\n,10,2\n", "line 3: arrival_s is empty"),
        ("0,10,2\n1,10\n", "line 3: has 2 fields, the header 3"),
        ("0,10,2,9\n", "line 2: has 4 fields, the header 3"),
        ("0,ten,2\n", "line 2: input_tokens is not a number: 'ten'"),
        ("nan,10,2\n", "line 2: arrival_s is not a number: 'nan'"),
        ("0,10,inf\n", "line 2: output_tokens is not a number: 'inf'"),
        ("-1,10,2\n", "line 2: arrival_s must be zero or above, not -1"),
        ("1.8e12,10,2\n", "line 2: arrival_s must not exceed 1e+10 seconds, not 1.8e12"),
        ("2,10,2\n1.5,10,2\n", "line 3: arrival_s falls from 2 to 1.5; times must never fall"),
        ("0,0,2\n", "line 2: input_tokens must lie between 1 and 1000000000, not 0"),
        ("0,10,0\n", "line 2: output_tokens must lie between 1 and 1000000000, not 0"),
        ("0,10,-3\n", "line 2: output_tokens must lie between 1 and 1000000000, not -3"),
        ("0,10,1e30\n", "line 2: output_tokens must lie between 1 and 1000000000, not 1e30"),
        ("0,10.5,2\n", "line 2: input_tokens must be a whole number, not 10.5"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(
    tmp_path: Path, rows: str, sentence: str
) -> None:
    path = written(tmp_path, HEADER + rows)
    assert complaint(path) == f"{path}, {sentence}"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", ", line 1: is empty; it must name arrival_s, input_tokens, output_tokens"),
        (HEADER, ": holds no requests below its header"),
        ("arrival_s,input_tokens\n0,1\n", ", line 1: the header lacks the column output_tokens"),
        ("0,10,2\n1,10,2\n", ", line 1: the header lacks the column arrival_s"),
        (
            "arrival_s,arrival_s,input_tokens,output_tokens\n0,0,1,1\n",
            ", line 1: the header repeats the column arrival_s",
        ),
        (b"\x89PNG\r\n\x1a\n\xff\xfe\x00\x80", ": is not a text file (UTF-8)"),
    ],
)
def test_a_file_that_is_no_trace_is_named(
    tmp_path: Path, content: str | bytes, sentence: str
) -> None:
    path = written(tmp_path, content)
    assert complaint(path) == f"{path}{sentence}"


def test_rubbish_that_happens_to_be_text_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "\0" * 4096)
    assert complaint(path).startswith(str(path))


def test_an_endless_field_is_refused_as_no_csv(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + '"' + "x" * 200_000)
    assert complaint(path).startswith(f"{path}: is not a CSV file")


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    assert complaint(tmp_path / "none.csv") == f"{tmp_path}/none.csv: no such file"
    assert complaint(tmp_path) == f"{tmp_path}: is not a file"


def test_a_name_too_long_for_the_file_system_is_no_such_file(tmp_path: Path) -> None:
    assert complaint(tmp_path / ("x" * 300)).endswith("no such file")
