"""A checkpoint beside the plan's model, judged by its files alone: what is refused before a run, and what is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_datacheck import plan

from executor.preflight.checkpoint import check_checkpoint
from planner.basics import reading
from planner.basics.errors import PlannerError
from planner.spec import ModelSpec, Recipe, TrainingJob
from planner.spec.huggingface import config_dict

SPEC = ModelSpec(name="m", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=300)


def safetensors(name: str, elements: int) -> bytes:
    """A file of one fp32 tensor: the head's length in 8 bytes, the head, the values."""
    tensor = {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}
    head = json.dumps({"__metadata__": {"format": "pt"}, name: tensor}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(4 * elements)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint of SPEC as far as a look without torch can tell, in two files."""
    (tmp_path / "config.json").write_text(json.dumps(config_dict(SPEC)))
    names = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(safetensors(name[:11], 3 * 5))
    index = {"weight_map": {name[:11]: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def check(folder: Path, spec: ModelSpec = SPEC, seq_len: int = 16) -> None:
    job = TrainingJob(seq_len=seq_len, recipe=Recipe(checkpoint=str(folder)))
    check_checkpoint(replace(plan(), model=spec, job=job))


def change(folder: Path, **keys: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))


def refusal(folder: Path, spec: ModelSpec = SPEC, seq_len: int = 16) -> str:
    with pytest.raises(PlannerError) as caught:
        check(folder, spec, seq_len)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.sentence
    return caught.value.sentence


def test_a_whole_checkpoint_of_the_same_model_is_taken_whatever_it_is_called_and_however_it_turns_positions(folder):
    check(folder)
    check(folder, replace(SPEC, name="other", parameters=5, rope_theta=5e5, norm_eps=1e-6, max_seq_len=64), seq_len=128)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 3), ("hidden", 64), ("kv_heads", 4), ("ffn", 64), ("vocab", 301), ("tied", True), ("qkv_bias", True)],
)
def test_other_sizes_are_named_with_both_values_and_the_way_out(folder: Path, field: str, value: object) -> None:
    said = refusal(folder, replace(SPEC, **{field: value}))

    assert f"its {field} is {getattr(SPEC, field)}, the plan's m has {value}" in said
    assert f"--model {folder}" in said


def test_another_architecture_is_named(folder: Path) -> None:
    change(folder, model_type="qwen3")

    assert "its model_type is qwen3, the plan's m is a llama" in refusal(folder)


def test_quantised_weights_are_refused_in_any_family(folder: Path) -> None:
    change(folder, quantization_config={"quant_method": "gptq", "bits": 4})

    assert "its weights are quantised (gptq, quantization_config of its config.json)" in refusal(folder)


def test_more_tokens_than_learned_positions_are_refused(folder: Path) -> None:
    gpt = ModelSpec(
        name="g", family="gpt2", layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=128, vocab=300,
        max_seq_len=64, positions="learned", norm="layernorm", gated=False, activation="gelu_new", tied=True,
        qkv_bias=True, output_bias=True, mlp_bias=True,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config_dict(gpt)))

    check(folder, gpt, seq_len=64)
    assert "has 64 learned positions" in refusal(folder, replace(gpt, max_seq_len=128), seq_len=65)


def test_a_missing_file_of_the_index_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()

    assert "1 of the 2 files of its index are missing: model-00002-of-00002.safetensors" in refusal(folder)


@pytest.mark.parametrize("left", [0, 7, 8, 40, -1, None])
def test_a_file_that_was_cut_short_or_goes_on_after_its_last_tensor_is_named(folder: Path, left: int | None) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:left] if left is not None else file.read_bytes() + b"\0")

    said = refusal(folder)
    assert file.name in said
    assert "is not a whole safetensors file" in said


def test_one_file_needs_no_index_and_one_without_a_tensor_is_refused(folder: Path) -> None:
    for name in folder.glob("model*"):
        name.unlink()
    (folder / "model.safetensors").write_bytes(safetensors("a", 4))
    check(folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "is not a whole safetensors file" in refusal(folder)


def test_an_index_without_a_map_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')

    assert "has no weight_map" in refusal(folder)


def test_a_pickle_alone_nothing_at_all_and_adapters_alone_are_three_refusals(folder: Path) -> None:
    for name in folder.glob("model*"):
        name.unlink()
    assert "holds no weights" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert "pytorch_model.bin alone" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "adapters alone" in refusal(folder)


ENTRY = {"dtype": "F32", "shape": [15], "data_offsets": [0, 60]}
HOSTILE_HEADS = {
    "offsets that are strings": {"t": ENTRY | {"data_offsets": ["0", "60"]}},
    "one offset": {"t": ENTRY | {"data_offsets": [60]}},
    "offsets below zero": {"t": ENTRY | {"data_offsets": [-60, 60]}},
    "offsets that are not whole numbers": {"t": ENTRY | {"data_offsets": [0.0, 60.5]}},
    "no offsets": {"t": {"dtype": "F32", "shape": [15]}},
    "a shape of words": {"t": ENTRY | {"shape": ["15"]}},
    "a shape below zero": {"t": ENTRY | {"shape": [-15]}},
    "a number for a tensor": {"t": 60},
    "a list": [ENTRY],
    "a word": "t",
    "nothing": None,
}


@pytest.mark.parametrize("kind", [*HOSTILE_HEADS, "nested", "not UTF-8", "digits"])
def test_a_head_that_is_none_is_refused_in_one_line(folder: Path, kind: str) -> None:
    raw = {"nested": b'{"t":' * 10**5 + b"}" * 10**5, "not UTF-8": b'{"\xff": 1}', "digits": b'{"t": ' + b"9" * 9999}
    head = raw[kind] if kind in raw else json.dumps(HOSTILE_HEADS[kind]).encode()
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(60))
    assert "is not a whole safetensors file" in refusal(folder)


@pytest.mark.parametrize("length", [2**24 + 1, 3 * 10**9, 2**40])
def test_a_head_of_gigabytes_is_not_read(folder: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    with file.open("wb") as stream:
        stream.write(length.to_bytes(8, "little"))
        stream.truncate(8 + length + 60)  # a file with a hole: no disk is used
    read = count_reads(monkeypatch)
    assert f"has a head of {length} bytes" in refusal(folder)
    assert max(read) <= 2**24


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are asked of each file from here on."""
    sizes: list[int] = []
    real = reading.opened

    def opened(path: str) -> object:
        stream = real(path)
        read = stream.read

        class Counted:
            def __enter__(self) -> Counted:
                return self

            def __exit__(self, *raised: object) -> None:
                stream.close()

            def fileno(self) -> int:
                return stream.fileno()

            def read(self, size: int = -1) -> bytes:
                sizes.append(2**63 if size < 0 else size)
                return read(size)

        return Counted()

    monkeypatch.setattr("executor.preflight.checkpoint.opened", opened)
    return sizes


@pytest.mark.parametrize(
    "name", ["../../other.safetensors", "/etc/passwd", "a/../../b", "..", "", "a\0b", "a\n", 7, None]
)
def test_an_index_names_files_of_its_own_folder_alone(folder: Path, name: object) -> None:
    inner = folder / "inner"
    inner.mkdir()
    for path in list(folder.iterdir()):
        if path.is_file():
            (inner / path.name).write_bytes(path.read_bytes())
    (folder.parent / "other.safetensors").write_bytes(safetensors("w", 15))
    (folder / "b").write_bytes(safetensors("w", 15))
    index = inner / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    assert "which is not a file of its folder" in refusal(inner)
    assert reading.content_of(inner, "checkpoint") is not None  # and its digest reads nothing else
    assert reading._checkpoint_files(inner) == ["config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_a_pipe_in_a_checkpoint_is_refused_without_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert len(refusal(folder)) < 400
