"""Claims about reading and writing config.json, judged by the real configurations of transformers.

Not here: the presets themselves (test_presets.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.basics.errors import PlannerError
from planner.spec import ModelSpec, presets
from planner.spec.huggingface import config_dict, read_config

BY_HAND = [name for name in presets.names("models") if presets.model(name).described is None]
OLD_LLAMA: dict[str, Any] = {
    # The shape of a config.json from before transformers 5: no head_dim, no rope_parameters.
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "pretraining_tp": 1,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0 + place for place in range(16)]}
"""For a head of 32 elements that turns whole: 16 frequencies."""


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def sizes(model: ModelSpec) -> ModelSpec:
    """The model without its name and published count, which a config.json does not hold."""
    return msgspec.structs.replace(model, name="", parameters=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "my-model"


def test_file_and_folder_give_the_same_model_named_after_the_folder(folder: Path):
    write(folder, OLD_LLAMA)

    model = read_config(folder)

    assert model == read_config(folder / "config.json")
    assert model == ModelSpec(
        name="my-model", layers=3, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=704, vocab=1000, tied=True,
        max_seq_len=1024, norm_eps=1e-5, rope_theta=500000.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"head_dim": None}, {"head_dim": 32}),
        ({"head_dim": 64}, {"head_dim": 64}),
        ({"num_key_value_heads": None}, {"kv_heads": 8}),
        ({"rope_scaling": LLAMA3_SCALING}, {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_scaling": None, "rope_theta": 7.0}),
        (
            {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 9.0}},
            {"rope_scaling": LLAMA3_SCALING, "rope_theta": 9.0},
        ),
        ({"model_type": "mistral", "sliding_window": None}, {"family": "mistral", "sliding_window": None}),
        ({"model_type": "mistral", "sliding_window": 512}, {"sliding_window": 512, "full_attention_every": 0}),
        ({"attention_bias": True}, {"qkv_bias": True, "output_bias": True, "mlp_bias": False}),
        ({"mlp_bias": True}, {"qkv_bias": False, "mlp_bias": True}),
        ({"model_type": "qwen2"}, {"qkv_bias": True, "output_bias": False}),
        ({"model_type": "qwen3"}, {"qk_norm": True, "head_dim": 128}),
        ({"model_type": "qwen3", "head_dim": 64}, {"head_dim": 64}),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, {"rotary_fraction": 0.75}),
        ({"model_type": "gpt_neox", "rotary_pct": 0.5}, {"rotary_fraction": 0.5, "block": "parallel"}),
        ({"model_type": "gpt_neox"}, {"rotary_fraction": 0.25, "kv_heads": 8, "tied": True}),
        ({"model_type": "gemma2"}, {"full_attention_every": 2, "sliding_window": 4096, "head_dim": 256}),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
            {"full_attention_every": 3},
        ),
        ({"model_type": "falcon", "multi_query": False}, {"kv_heads": 8, "layer_norms": 1}),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4},
            {"kv_heads": 4, "layer_norms": 2, "ffn": 1024},
        ),
    ],
)
def test_optional_keys_are_read_as_transformers_reads_them(folder: Path, change: dict[str, Any], expected):
    model = read_config(write(folder, {**OLD_LLAMA, **change}))

    assert {key: getattr(model, key) for key in expected} == expected


@pytest.mark.slow  # imports transformers; test_config_defaults.py has the same of every family by hand
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_absent_keys_take_the_defaults_of_transformers(folder: Path, kind: str):
    transformers = pytest.importorskip("transformers")
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    bare = {"model_type": kind, **{key: OLD_LLAMA[key] for key in needed}}
    window = {} if kind == "llama" else {"sliding_window": None}
    real = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[kind](**bare, **window)

    model = read_config(write(folder, {**bare, **window}))

    assert (model.kv_heads, model.head_dim) == (real.num_key_value_heads, real.head_dim or 256 // 8)
    assert (model.max_seq_len, model.norm_eps) == (real.max_position_embeddings, real.rms_norm_eps)
    assert (model.tied, model.rope_theta) == (real.tie_word_embeddings, real.rope_parameters["rope_theta"])


@pytest.mark.slow  # the next test is the same without transformers
@pytest.mark.parametrize("name", BY_HAND)
def test_config_round_trips_through_the_real_config(folder: Path, name: str):
    transformers = pytest.importorskip("transformers")
    model = presets.model(name)
    real = transformers.AutoConfig.for_model(**config_dict(model))
    folder.mkdir()
    real.save_pretrained(folder)

    assert sizes(read_config(folder)) == sizes(model)


@pytest.mark.parametrize("name", BY_HAND)
def test_config_is_read_back_as_it_was_written(folder: Path, name: str):
    model = presets.model(name)

    assert sizes(read_config(write(folder, config_dict(model)))) == sizes(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "lama"}, "model_type=lama: is not a family planned here. Did you mean llama"),
        (
            {"model_type": "mamba"},
            "model_type=mamba: is not a family planned here; .* A decoder like Llama's can be given",
        ),
        ({"model_type": "smollm3"}, "model_type=smollm3: .*--layers, --hidden, --heads, --kv-heads, --ffn, --vocab"),
        ({"model_type": ["llama"]}, "model_type=.*is not a family planned here"),
        ({"hidden_act": []}, "hidden_act=.*must be one of silu"),
        ({"model_type": "gpt2", "activation_function": {}}, "activation_function=.*must be one of silu"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True: must be false"),
        ({"model_type": "falcon", "alibi": True}, "alibi=True: must be false: no other falcon"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 2}, "layer_types=.*must repeat"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}, "moe_intermediate_size: is missing"),
        ({"mlp_bias": "no"}, "mlp_bias=no: must be true or false"),
        ({"hidden_act": "mish"}, "hidden_act=mish: must be one of silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantized weights"),
        ({"num_key_value_heads": 3}, "kv_heads=3: must divide the 8 attention heads. Try kv_heads = 2 or 4"),
        ({"num_key_value_heads": 0}, "kv_heads=0: must be from 1"),
        ({"num_attention_heads": 0}, "heads=0: must be from 1"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "heads=6: must divide the hidden size 256"),
        ({"head_dim": 33}, "head_dim=33: must be even"),
        ({"hidden_size": "256"}, "hidden_size=256: must be a whole number"),
        ({"hidden_size": 256.5}, "hidden_size=256.5: must be a whole number"),
        ({"hidden_size": None}, "hidden_size: must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number"),
        ({"num_hidden_layers": 10**9}, "layers=1000000000: must be from 1 to 10000"),
        ({"vocab_size": -1}, "vocab=-1: must be from 1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps=1e-5: must be a number"),
        ({"rms_norm_eps": 0}, "norm_eps=0.0: must be between 0 and 1"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0: must be above 0"),
        ({"rope_scaling": [1]}, "rope_scaling=.*must be one table"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "original_max_position_embeddings: must be a num"),
        ({"model_type": "phi3", "rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor: must be 16 numbers"),
        ({"model_type": "phi3", "rope_scaling": {**LONGROPE, "short_factor": 1.0}}, "short_factor: must be 16 numbers"),
        ({"model_type": "phi3", "rope_scaling": {**LONGROPE, "long_factor": ["1"] * 16}}, "must be one table"),
        ({"rope_scaling": {**LLAMA3_SCALING, "factor": [8.0]}}, "factor=.*: must be a number above 0"),
        ({"rope_scaling": {**LLAMA3_SCALING, "more": [8.0]}}, "more: must be one number or name"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor.*must be a number above 0"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters=.*must be one table"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: must be 1"),
        ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window=all: must be a whole number"),
    ],
)
@pytest.mark.usefixtures("without_torch")
def test_what_no_model_here_can_be_is_refused_in_one_line(folder: Path, change: dict[str, Any], said: str):
    write(folder, {**OLD_LLAMA, **change})

    with pytest.raises(PlannerError, match=said) as refusal:
        read_config(folder)
    assert str(folder) in refusal.value.sentence
    assert "\n" not in refusal.value.sentence
    assert refusal.value.exit_code == 2


def phi(**change: Any) -> dict[str, Any]:
    """As Phi-3-mini-128k's file: lists of factors beside two lengths."""
    return {
        **OLD_LLAMA, "model_type": "phi3", "tie_word_embeddings": False, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "rope_scaling": LONGROPE, **change,
    }  # fmt: skip


PHIS: dict[str, dict[str, Any]] = {
    "phi-3-128k": {},
    "phi-4-mini": {
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12},
    },
    "another length": {"original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("change", PHIS.values(), ids=PHIS)
def test_longrope_lists_of_phi_are_read_and_written_as_they_are(folder: Path, change: dict[str, Any]):
    """A26: refused, though they change no byte."""
    config = phi(**change)

    model = read_config(write(folder, config))
    written = config_dict(model)

    assert model.rope_scaling is not None and model.rope_scaling["rope_type"] == "longrope"
    lists = {key: config["rope_scaling"][key] for key in ("short_factor", "long_factor")}
    for one in (model.rope_scaling, written["rope_parameters"]):
        assert {key: list(one[key]) for key in lists} == lists
    assert written["original_max_position_embeddings"] == config["original_max_position_embeddings"]
    assert sizes(read_config(write(folder, written))) == sizes(model)
    assert msgspec.json.decode(msgspec.json.encode(model), type=ModelSpec) == model


@pytest.mark.slow  # imports transformers; the test before is the same of our own readers
@pytest.mark.parametrize("change", PHIS.values(), ids=PHIS)
def test_longrope_lists_of_phi_are_read_and_written_as_transformers_reads_them(folder: Path, change: dict[str, Any]):
    """The frequencies are those of the file, short and long."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    model = read_config(write(folder, phi(**change)))
    theirs = transformers.Phi3Config.from_pretrained(folder)
    ours = transformers.AutoConfig.for_model(**config_dict(model))

    theirs.rope_parameters.pop("type")
    assert ours.rope_parameters == theirs.rope_parameters
    assert ours.original_max_position_embeddings == theirs.original_max_position_embeddings
    one, other = (Phi3RotaryEmbedding(each) for each in (theirs, ours))
    assert one.inv_freq.tolist() == other.inv_freq.tolist()


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope_are_read_too(tmp_path: Path, name: str):
    """As Phi-3's first files had it; transformers 5.23 asks of "su" what only "longrope" brings along."""
    old = read_config(write(tmp_path / "old", phi(rope_scaling={**LONGROPE, "type": name})))

    assert sizes(old) == sizes(read_config(write(tmp_path / "new", phi())))


@pytest.mark.parametrize(
    ("config", "way"),
    [
        ({"model_type": "gemma3", "text_config": {**OLD_LLAMA, "model_type": "gemma3_text"}}, "its text_config"),
        ({"model_type": "llava", "text_config": OLD_LLAMA}, "its text_config"),
        ({**OLD_LLAMA, "model_type": "qwen2_5_vl"}, "--layers, --hidden"),
        (OLD_LLAMA, "--layers, --hidden"),
        ({**OLD_LLAMA, "model_type": "llava", "mm_vision_tower": "openai/clip"}, "--layers, --hidden"),
    ],
    ids=["gemma-3", "llava", "qwen2.5-vl", "a text family with a tower", "a tower by its name"],
)
@pytest.mark.usefixtures("without_torch")
def test_a_model_that_sees_is_refused_with_a_way_to_plan_its_text_alone(folder: Path, config: dict[str, Any], way: str):
    """A21: gemma-3's vision tower was dropped in silence; llava was asked whether it meant llama."""
    write(folder, {**config, "vision_config": {"hidden_size": 1152}})
    by_its_code = config is not OLD_LLAMA and "mm_vision_tower" not in config

    with pytest.raises(PlannerError) as refusal:
        read_config(folder)
    assert ("executor import describes it" if by_its_code else "has more than a text model") in refusal.value.sentence
    assert f"To plan the text model alone, give {way}" in refusal.value.sentence.replace("its sizes: ", "")
    assert len(refusal.value.sentence) - len(str(folder)) < 300


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_size_that_is_missing_is_named(folder: Path, key: str):
    write(folder, {name: value for name, value in OLD_LLAMA.items() if name != key})

    with pytest.raises(PlannerError, match=f"{key}: is missing"):
        read_config(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "NaN", '{"a": "\ud800"}', "[" * 100_000])
def test_a_file_that_is_not_a_json_object_is_refused(folder: Path, text: str):
    folder.mkdir()
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))

    with pytest.raises(PlannerError, match="is not a JSON object"):
        read_config(folder)


@pytest.mark.parametrize("kind", ["bamba", "mamba2", "falcon_h1", "nemotron_h", "granitemoehybrid"])
@pytest.mark.usefixtures("without_torch")
def test_a_config_with_infinity_as_on_the_hub_is_refused_by_its_family(folder: Path, kind: str):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "time_step_limit": [0.0, float("inf")]}))
    with pytest.raises(PlannerError, match=f"model_type={kind}"):
        read_config(folder)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("key", ["rope_theta", "hidden_size", "rms_norm_eps", "tie_word_embeddings", "rope_scaling"])
def test_no_number_that_a_model_is_made_of_is_infinite(folder: Path, key: str, value: float):
    whole = config_dict(presets.model("llama-3.2-1b")) | {"not_of_ours": value}
    if key == "rope_scaling":
        broken: dict[str, object] = {key: {"rope_type": "linear", "factor": value}}
    else:
        whole["rope_parameters"] = None
        broken = {key: value}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    assert read_config(folder).layers == 16
    (folder / "config.json").write_text(json.dumps(whole | broken))
    with pytest.raises(PlannerError, match=key):
        read_config(folder)


def test_a_path_without_a_config_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none", "/dev/null"):
        with pytest.raises(PlannerError, match="cannot be read"):
            read_config(path)


@pytest.mark.parametrize(
    ("layer_norms", "kv_heads", "new", "multi_query"),
    [(1, 1, False, True), (1, 8, False, False), (2, 1, True, False), (2, 8, True, False), (1, 4, True, False)],
)
def test_falcons_three_kinds_of_heads_are_written_as_its_own_two_switches(
    layer_norms: int, kv_heads: int, new: bool, multi_query: bool
):
    """One key head for all (7b), one for each of 8 (rw-1b), and groups or two norms, which are the new kind (40b)."""
    model = msgspec.structs.replace(presets.model("falcon-7b"), heads=8, kv_heads=kv_heads, layer_norms=layer_norms)

    config = config_dict(model)

    assert (config["new_decoder_architecture"], config["multi_query"]) == (new, multi_query)
    assert config["num_ln_in_parallel_attn"] == (layer_norms if new else None)
