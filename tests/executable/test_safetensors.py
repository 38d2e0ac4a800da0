"""Safetensors files: what is written is read, lazily, and what is none or damaged is refused."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tvm_axe as axe
from tvm_axe.collective.stored import let_go
from tvm_axe.executable import read_safetensors, write_safetensors

ARRAYS = {
    "a": np.arange(6, dtype="float32").reshape(2, 3),
    "b": np.arange(5, dtype="float32").astype(ml_dtypes.bfloat16),
    "c": np.array([1, -2], "int8"),
    "d.e": np.arange(8, dtype="float64").reshape(2, 2, 2).transpose(2, 0, 1),
    "empty": np.zeros((0, 3), "float16"),
    "scalar": np.array(3, "int64"),
    "eighth": np.arange(3, dtype="float32").astype(ml_dtypes.float8_e4m3fn),
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", ARRAYS)
    found = read_safetensors(tmp_path / "x.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name].astype("float64"), array.astype("float64"))
    assert not found["a"].flags.writeable and found["a"].base is not None  # the mapped file's memory


def test_several_files(tmp_path: Path) -> None:
    names = list(ARRAYS)
    for n, part in enumerate((names[:3], names[3:])):
        write_safetensors(tmp_path / f"part-{n}.safetensors", {name: ARRAYS[name] for name in part})
    files = [tmp_path / f"part-{n}.safetensors" for n in range(2)]
    index = tmp_path / "model.safetensors.index.json"
    assert list(read_safetensors(tmp_path)) == list(read_safetensors(files)) == names
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names[:3], "part-0.safetensors")}))
    assert list(read_safetensors(tmp_path)) == list(read_safetensors(index)) == names[:3]
    index.write_text("[]")
    with pytest.raises(axe.InputError, match="no index of safetensors files, which has a weight_map"):
        read_safetensors(tmp_path)
    with pytest.raises(axe.InputError, match=r"has the tensor 'a', as .*part-0\.safetensors has"):
        read_safetensors([files[0], files[0]])


def file(folder: Path, header: object, data: bytes = bytes(16)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder / "x.safetensors"


def entry(dtype: str = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_metadata_is_passed_over_and_tensors_need_no_alignment(tmp_path: Path) -> None:
    path = file(tmp_path, {"__metadata__": {"format": "pt"}, **entry(offsets=[1, 17])}, bytes(17))
    np.testing.assert_array_equal(read_safetensors(path)["a"], np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "its header is no JSON"),
        ([], "its header is no JSON object"),
        (b"\xff\xfe", "its header is no JSON"),
        ({"a": 3}, "'a' has no dtype, shape and data_offsets"),
        (entry(offsets=[0]), "'a' has no dtype, shape and data_offsets"),
        (entry("F12"), "'a' is of F12; what is read is F64, "),
        (entry(offsets=[0, 12]), r"'a' of F32\[2, 2\] would be the bytes 0 to 12 of 16"),
        (entry(offsets=[4, 20]), r"would be the bytes 4 to 20 of 16"),
        (entry(shape=[-2, -2]), r"'a' of F32\[-2, -2\] would be"),
        (entry(offsets=[-16, 0]), "would be the bytes -16 to 0"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(axe.InputError, match=message):
        read_safetensors(file(tmp_path, header))


def test_what_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "long").write_bytes(b"\xff" * 8)
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("short", "its header would be"), ("long", "its header would be"), ("none", "cannot be read"),
        ("empty", r"has no file \*.safetensors"), ("none.index.json", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(axe.InputError, match=message):
            read_safetensors(tmp_path / name)
    with pytest.raises(axe.InputError, match="a is of complex64; safetensors has float64, "):
        write_safetensors(tmp_path / "x", {"a": np.zeros(2, "complex64")})
    with pytest.raises(axe.InputError, match="cannot be written"):
        write_safetensors(tmp_path / "none" / "x", ARRAYS)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system doesn't give mapped memory back")
def test_memory_of_what_was_copied_is_given_back(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((3, 1 << 20), "float32")  # 12 MiB
    write_safetensors(tmp_path / "x.safetensors", {"before": np.ones(3, "int8"), "a": array})
    found = read_safetensors(tmp_path / "x.safetensors")["a"]

    def resident() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    np.testing.assert_array_equal(found, array)
    there = resident()
    let_go(found)
    assert there - resident() > array.nbytes * 0.9
    np.testing.assert_array_equal(found, array)  # read again
    let_go(array)  # of no file
    let_go(found[:, ::2])  # not dense
