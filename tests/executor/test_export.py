"""A run's weights as a model folder: what is written loads and computes the same, and what is refused leaves no trace.

Not here: weights that real ranks trained (tests/cluster/test_weights.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from test_model import SPEC, plan

from executor.folder import rundir
from executor.run import export as exports
from executor.run.export import ModelOptions
from executor.worker.weights import weights
from executor.worker.weights.export import export
from planner.basics.errors import PlannerError
from planner.spec import Lora, ModelSpec, Moe, Recipe, TrainingJob
from planner.spec.plan import encode_plan
from tests.built import build_model

GPT2 = replace(
    SPEC, family="gpt2", kv_heads=4, ffn=128, tied=True, positions="learned", norm="layernorm", gated=False,
    activation="gelu_new", qkv_bias=True, output_bias=True, mlp_bias=True, max_seq_len=64,
)  # fmt: skip
MODELS = {
    "llama": SPEC,
    "llama tied": replace(SPEC, tied=True),
    "gpt2": GPT2,
    "mixtral": replace(SPEC, family="mixtral", moe=Moe(experts=4, top_k=2, expert_ffn=48)),
}


FRESH = TrainingJob(seq_len=16)
LORA = TrainingJob(
    seq_len=16, precision="fp32", method="lora", lora=Lora(rank=4, alpha=12, targets=("q_proj", "down_proj"))
)


def trained(
    folder: Path, spec: ModelSpec = SPEC, shard_bytes: int = 10**9, *, job: TrainingJob = FRESH, **recipe: Any
) -> Any:
    """A run folder of a run that saved, and its model."""
    made = plan(spec, replace(job, recipe=Recipe(**recipe))).sealed()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / rundir.PLAN).write_bytes(encode_plan(made))
    model = build_model(made).eval()
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # made as zeros, which would add nothing
            torch.nn.init.normal_(weight.data, std=0.1)
    weights.save(made, rank_zero(model), folder, 0, shard_bytes)
    return model


def rank_zero(model: Any) -> Any:
    """What `save` asks of an engine, of a model that nothing splits."""
    return SimpleNamespace(weights=lambda: iter(model.state_dict().items()), model=model)


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
def test_the_model_that_is_loaded_computes_what_the_trained_one_does(
    tmp_path: Path, name: str, shard_bytes: int
) -> None:
    spec = MODELS[name]
    model = trained(tmp_path / "run", spec, shard_bytes)
    export(tmp_path / "run", tmp_path / "model", None, shard_bytes)

    ids = torch.arange(24).reshape(2, 12) % spec.vocab
    assert torch.equal(loaded(tmp_path / "model")(ids).logits, model(ids).logits)
    assert torch.equal(loaded(tmp_path / "run" / "weights")(ids).logits, model(ids).logits)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 10**9) == (tmp_path / "model" / "model.safetensors.index.json").exists()


def test_experts_are_written_one_by_one_as_their_makers_do(tmp_path: Path) -> None:
    trained(tmp_path / "run", MODELS["mixtral"])
    export(tmp_path / "run", tmp_path / "model", None, 10**9)

    names = load_file(tmp_path / "model" / "model.safetensors").keys()
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names


def test_another_format_casts_every_weight_and_says_so(tmp_path: Path) -> None:
    model = trained(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "model", "bf16", 10**9)

    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], weight.to(torch.bfloat16)) for name, weight in model.state_dict().items())


def test_a_checkpoints_own_configuration_and_the_runs_tokenizer_go_with_the_weights(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="a"))
    own = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", chat_template="{{ 'hi' }}")
    own.save_pretrained(tmp_path / "tokenizer")
    start = build_model(plan())
    start.config.rope_parameters["rope_theta"] = 5e5
    start.generation_config.max_new_tokens = 7
    start.save_pretrained(tmp_path / "start")

    trained(tmp_path / "run", checkpoint=str(tmp_path / "start"), tokenizer=str(tmp_path / "tokenizer"))
    shutil.rmtree(tmp_path / "start")
    shutil.rmtree(tmp_path / "tokenizer")
    export(tmp_path / "run", tmp_path / "model", None, 10**9)

    model = loaded(tmp_path / "model")
    assert model.config.rope_parameters["rope_theta"] == 5e5
    assert model.generation_config.max_new_tokens == 7
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.get_vocab() == own.get_vocab()
    assert tokenizer.chat_template == own.chat_template

    trained(tmp_path / "fresh", tokenizer=str(tmp_path / "model"))
    assert loaded(tmp_path / "fresh" / "weights").config.eos_token_id == 3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_adapters_load_beside_their_base_and_merged_into_it(tmp_path: Path, from_checkpoint: bool, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    spec, start = replace(SPEC, tied=tied), tmp_path / "start"
    build_model(plan(spec, replace(FRESH, recipe=Recipe(seed=9)))).save_pretrained(start)
    model = trained(tmp_path / "run", spec, job=LORA, checkpoint=str(start) if from_checkpoint else None)
    assert (tmp_path / "run" / "weights").exists() != from_checkpoint  # the checkpoint is not written again

    export(tmp_path / "run", tmp_path / "adapters", None, 10**9)
    done = export(tmp_path / "run", tmp_path / "model", None, 30_000, merge=True)

    ids = torch.arange(24).reshape(2, 12)
    expected = model(ids).logits
    beside = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters", local_files_only=True).eval()
    torch.testing.assert_close(beside(ids).logits, expected, rtol=1e-5, atol=1e-6)
    whole = loaded(tmp_path / "model")
    torch.testing.assert_close(whole(ids).logits, expected, rtol=1e-5, atol=1e-6)
    assert done["parameters"] == whole.num_parameters()
    assert not torch.allclose(loaded(start)(ids).logits, expected, rtol=1e-2)


def test_weights_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    model = trained(tmp_path / "run")
    state = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp" not in name}
    weights.save(plan(), SimpleNamespace(weights=lambda: iter(state.items()), model=model), tmp_path, 0)
    (tmp_path / "run" / "weights" / "model.safetensors").unlink()
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "run" / "weights" / "model.safetensors")

    with pytest.raises(PlannerError, match=r"3 weights are missing, model.layers.1.mlp.down_proj.weight among them"):
        export(tmp_path / "run", tmp_path / "model", None, 10**9)


def test_a_save_that_fails_leaves_nothing_and_names_the_way_out(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(PlannerError, match=r"cannot be written \(No space left on device\).*--no-save-weights") as told:
        weights.save(plan(), SimpleNamespace(weights=broken, model=torch.nn.Module()), tmp_path, 0)
    assert told.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """As much of a run folder as is looked at before anything is written."""
    folder = tmp_path / "run"
    (folder / rundir.WEIGHTS).mkdir(parents=True)
    (folder / rundir.PLAN).write_bytes(encode_plan(plan().sealed()))
    (folder / rundir.WEIGHTS / "config.json").write_text("{}")
    return folder


def refusal(run: Path, target: Path, **options: Any) -> str:
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(PlannerError) as caught:
        exports.export(run, target, ModelOptions(**options))
    assert sorted(run.parent.rglob("*")) == before
    return caught.value.sentence


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()

    assert "holds no plan.json" in refusal(tmp_path / "other", tmp_path / "model")


def test_a_writer_that_fails_leaves_nothing_and_force_keeps_the_old_model(run: Path, tmp_path: Path) -> None:
    old = tmp_path / "model"
    old.mkdir()
    (old / "config.json").write_text("the old one")

    # The run folder's config.json says no model_type: the writing process cannot go on.
    assert "its process failed" in refusal(run, old, force=True)
    assert (old / "config.json").read_text() == "the old one"
