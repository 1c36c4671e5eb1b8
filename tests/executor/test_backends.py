"""Backends: the files they write (golden), what they refuse, and that an edited file is found out by its own parser.

Regenerate the golden files with `python tests/executor/test_backends.py` after a change that is meant.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from executor.backends.accelerate import AccelerateBackend
from executor.backends.common import HASH_SHOWN, OWN_ATTENTION
from executor.backends.deepspeed import DeepSpeedBackend
from executor.backends.transformers import FAMILIES, TransformersBackend
from executor.run.prepare import check_launchable
from planner.ask.launchable import find_backend
from planner.basics.errors import PlannerError
from planner.decide.estimation import nearest_launchable
from planner.engines.common import LARGEST_BUCKET_ELEMENTS, reduce_bucket_elements
from planner.engines.transformers_tp import NO_PLAN
from planner.inventory import parameters
from planner.parallelism.backend import Backend
from planner.parallelism.case import Case
from planner.spec import Cluster, Gpu, Layout, Link, Lora, ModelSpec, Moe, Optimizer, Runtime, TrainingJob
from planner.spec.formats import FORMATS
from planner.spec.plan import Plan

EXPERTS = Moe(experts=8, top_k=2, expert_ffn=704)

GOLDEN = Path(__file__).parent / "golden"

AUTOTP = Layout(engine="deepspeed-autotp", tp=2, dp_shard=2, zero_stage=3)
MODEL = ModelSpec(name="small", layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=704, vocab=1024)

LAYOUTS = {
    "single": Layout(engine="single"),
    "ddp": Layout(engine="ddp", dp_replicate=4),
    "fsdp2": Layout(engine="fsdp2", dp_shard=4, zero_stage=3),
    "hsdp": Layout(engine="fsdp2", dp_replicate=2, dp_shard=2, zero_stage=3, reshard_after_forward=False),
    "zero2": Layout(engine="deepspeed", dp_shard=4, zero_stage=2, micro_batch_size=2, grad_accum=3, overlap_comm=True),
    "zero3": Layout(
        engine="deepspeed",
        dp_shard=4,
        zero_stage=3,
        reduce_bucket_elements=5000,
        zero3_prefetch_elements=10,
        zero3_persistence_elements=20,
        zero3_max_live_elements=30,
        zero3_max_reuse_elements=40,
    ),
    "zero3-offload": Layout(engine="deepspeed", dp_shard=4, zero_stage=3, offload_optimizer=True, offload_params=True),
    "fsdp2-offload": Layout(engine="fsdp2", dp_shard=4, zero_stage=3, offload_optimizer=True, offload_params=True),
    "zero2-cp2": Layout(engine="deepspeed-ulysses", cp=2, cp_method="ulysses", dp_shard=2, zero_stage=2),
    "zero1-pp2": Layout(engine="deepspeed-pipeline", pp=2, tp=2, zero_stage=1, grad_accum=4),
    "tp2": Layout(engine="transformers-tp", tp=2, dp_shard=2, zero_stage=3),
}


def plan(layout: Layout, job: TrainingJob | None = None, model: ModelSpec = MODEL) -> Plan:
    link = Link(name="ethernet", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    nodes, per_node = (1, 1) if layout.engine == "single" else (2, 2)
    cluster = Cluster(
        name="nodes", gpu=Gpu(name="gpu"), nodes=nodes, gpus_per_node=per_node, intra_link=link, inter_link=link
    )
    runtime = Runtime(name=layout.engine, engine=layout.engine, kernels="transformers")
    return Plan(model=model, cluster=cluster, job=job or TrainingJob(), layout=layout, runtime=runtime).sealed()


def backend(name: str) -> Backend:
    if name.startswith("tp"):
        return TransformersBackend()
    return DeepSpeedBackend() if name.startswith("zero") else AccelerateBackend()


def without_hash(text: str, made: Plan) -> str:
    assert made.content_hash[:HASH_SHOWN] in text
    return text.replace(made.content_hash[:HASH_SHOWN], "sha256:...")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_files_are_as_agreed(name: str) -> None:
    made = plan(LAYOUTS[name])
    files = backend(name).files(made)

    assert refusal(backend(name), made) == ""
    for path, text in files.items():
        assert without_hash(text, made) == (GOLDEN / f"{name}{Path(path).suffix}").read_text()


def written(name: str, folder: Path) -> Plan:
    made = plan(LAYOUTS[name])
    (folder / "config").mkdir()
    for path, text in backend(name).files(made).items():
        (folder / path).write_text(text)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_frameworks_own_parser_reads_what_the_plan_says(name: str, tmp_path: Path) -> None:
    made = written(name, tmp_path)

    assert backend(name).drift(made, str(tmp_path)) == []


@pytest.mark.slow
def test_the_environment_is_the_launchers_and_carries_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")  # a stray export of the shell must not leak into the run

    environment = AccelerateBackend().environment(written("hsdp", tmp_path), str(tmp_path))

    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    assert environment["FSDP_OFFLOAD_PARAMS"] == "false"
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"
    assert all(key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) for key in environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "edits", "said"),
    [
        (
            "hsdp",
            {
                "fsdp_reshard_after_forward: false": "fsdp_reshard_after_forward: true",
                "parallelism_config_dp_shard_size": "dp_shard_size",
            },
            [
                "FSDP_RESHARD_AFTER_FORWARD is true, the plan says false",
                "parallelism_config.dp_shard_size is not known",
            ],
        ),
        (
            "fsdp2",
            {
                "fsdp_version: 2": "fsdp_version: 1\n  fsdp_ignored_modules: .*norm",
                "num_processes: 4": "num_processes: 8",
            },
            [
                "FSDP_VERSION is 1, the plan says 2",
                "FSDP_IGNORED_MODULES is .*norm",
                "num_processes is 8, the plan says 4",
            ],
        ),
        (
            "ddp",
            {"mixed_precision: 'bf16'": "mixed_precision: 'no'\ndynamo_config:\n  dynamo_backend: INDUCTOR"},
            ["ACCELERATE_MIXED_PRECISION is no, the plan says bf16", "DYNAMO_BACKEND is INDUCTOR, the plan says NO"],
        ),
        ("ddp", {"debug: false": "debug: false\nfsdp_cfg: {}"}, ["cannot read it"]),
        (
            "zero2",
            {
                '"stage": 2': '"stage": 1, "offload_optimizer": {"device": "cpu"}',
                '"overlap_comm": true': '"overlap_comm": false',
            },
            ["zero_optimization.stage is 1, the plan says 2", "offload_optimizer is set", "overlap_comm is False"],
        ),
        ("zero2", {'"overlap_comm": true': '"overlap_com": true'}, ["cannot read it"]),
        (
            "zero3",
            {
                '"stage3_max_live_parameters": 30': '"stage3_max_live_parameters": 31',
                '"gradient_clipping": 1.0': '"gradient_clipping": 2.0',
            },
            ["stage3_max_live_parameters is 31, the plan says 30", "gradient_clipping is 2, the plan says 1.0"],
        ),
        (
            "tp2",
            {'"tp_size": 2': '"tp_size": 4, "fsdp_cpu_offload": true, "tp_sizes": 2'},
            ["tp_size is 4, the plan says 2", "fsdp_cpu_offload is set", "tp_sizes is set"],
        ),
        ("tp2", {'"tp_size": 2': '"tp_size": 0'}, ["cannot read it"]),
    ],
)
def test_an_edited_file_is_found_out(name: str, edits: dict[str, str], said: list[str], tmp_path: Path) -> None:
    made = written(name, tmp_path)
    path = next((tmp_path / "config").iterdir())
    text = path.read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)

    differences = backend(name).drift(made, str(tmp_path))

    for sentence in said:
        assert any(sentence in line for line in differences), differences


def test_a_missing_file_is_a_difference_and_stops_a_launch(tmp_path: Path) -> None:
    assert "missing" in AccelerateBackend().drift(plan(LAYOUTS["ddp"]), str(tmp_path))[0]
    with pytest.raises(PlannerError) as caught:
        AccelerateBackend().environment(plan(LAYOUTS["ddp"]), str(tmp_path))
    assert caught.value.exit_code == 4


def refusal(backend: Backend, made: Plan) -> str:
    """The one line that a plan is refused with, or ""."""
    try:
        check_launchable(made, backend)
    except PlannerError as error:
        assert error.exit_code == 3
        return error.sentence
    return ""


@pytest.mark.parametrize(
    ("chosen", "layout", "job", "model", "said"),
    [
        ("fsdp2", Layout(engine="fsdp2", dp_shard=2, tp=2, zero_stage=3), {}, {}, "tp=2: the fsdp2 engine does not"),
        ("fsdp2", LAYOUTS["zero2"], {}, {}, "engine=deepspeed: is not one that accelerate runs: single, ddp or fsdp2"),
        ("zero2", LAYOUTS["ddp"], {}, {}, "engine=ddp: is not one that deepspeed runs"),
        ("fsdp2", Layout(engine="fsdp2", dp_replicate=4, zero_stage=3), {}, {}, "dp_shard=1: "),
        ("ddp", Layout(engine="ddp", dp_replicate=2), {}, {}, "2 x 1 = 2, but there are 4 GPUs"),
        ("zero2", Layout(engine="deepspeed", dp_shard=4), {}, {}, "zero_stage=0: "),
        ("zero2", replace(LAYOUTS["zero2"], dp_replicate=2, dp_shard=2), {}, {}, "Use dp_replicate=1"),
        (
            "ddp",
            LAYOUTS["ddp"],
            {"method": "lora", "lora": Lora(targets=("q_proj", "query"))},
            {},
            "query is not a linear module",
        ),
        (
            "ddp",
            LAYOUTS["ddp"],
            {"method": "lora", "lora": Lora(modules_to_save=("lm_head",))},
            {"tied": True},
            "lm_head is not a module outside the layers of",
        ),
        ("ddp", LAYOUTS["ddp"], {}, {"family": "mamba"}, "the trainer builds no mamba"),
        ("zero2", LAYOUTS["zero2"], {}, {"family": "mixtral", "moe": EXPERTS}, "mixtures of experts"),
        ("zero2", AUTOTP, {}, {"family": "gemma2"}, "Use engine deepspeed with tp=1 dp_shard=4"),
        ("zero2", AUTOTP, {}, {"family": "gpt2"}, "AutoTP does not split GPT-2's modules"),
        ("zero2", AUTOTP, {}, {"kv_heads": 1}, "does not divide the 1 key and value heads"),
        ("zero2", AUTOTP, {"method": "lora", "lora": Lora()}, {}, "finds no linear that an adapter has wrapped"),
        ("zero2", LAYOUTS["zero2-cp2"], {}, {"family": "gemma2"}, "Use engine deepspeed with cp=1 dp_shard=4"),
        ("zero2", LAYOUTS["zero2-cp2"], {"method": "lora", "lora": Lora()}, {}, "with full training only"),
        ("zero1-pp2", LAYOUTS["zero1-pp2"], {}, {"family": "gemma2"}, "into stages, not gemma2. Use pp=1"),
        ("zero1-pp2", LAYOUTS["zero1-pp2"], {}, {"family": "gpt2"}, "AutoTP does not split GPT-2's modules"),
        (
            "zero1-pp2",
            LAYOUTS["zero1-pp2"],
            {"method": "lora"},
            {},
            "AutoTP finds no linear",
        ),
        ("zero1-pp2", replace(LAYOUTS["zero1-pp2"], zero_stage=0), {}, {}, "zero_stage=0: "),
        ("ddp", LAYOUTS["ddp"], {"global_batch_size": 5}, {}, "not global_batch_size 5"),
        ("ddp", LAYOUTS["ddp"], {"optimizer": Optimizer(name="lion")}, {}, "Use optimizer adamw, sgd, adamw-8bit or"),
        ("zero2", LAYOUTS["zero2"], {"optimizer": Optimizer(name="lion-8bit")}, {}, "Use engine ddp, or optimizer"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_a_reason(
    chosen: str, layout: Layout, job: dict[str, object], model: dict[str, object], said: str
) -> None:
    assert said in refusal(backend(chosen), plan(layout, TrainingJob(**job), replace(MODEL, **model)))


@pytest.mark.parametrize(
    ("layout", "nearest"),
    [
        (Layout(engine="fsdp2", dp_shard=2, tp=2, zero_stage=3), "Nearest that runs: engine=deepspeed-autotp"),
        (Layout(engine="megatron", tp=2, dp_shard=2, zero_stage=1), "Nearest that runs: engine=deepspeed-autotp"),
        (Layout(engine="torchtitan", cp=2, dp_shard=2, zero_stage=3), "Nearest that runs: engine=deepspeed-ulysses"),
        (Layout(engine="ddp", dp_replicate=2), "Nearest that runs: dp_replicate=4"),
        (Layout(engine="fsdp2", dp_replicate=4, zero_stage=3), "Nearest that runs: engine=ddp zero_stage=0"),
    ],
)
def test_a_refusal_names_the_nearest_layout_that_runs_and_it_does(layout: Layout, nearest: str) -> None:
    made = plan(layout)
    case = Case(made.model, made.job, made.layout, made.cluster, made.runtime)

    found = nearest_launchable(case)

    assert found is not None
    assert nearest in refusal(AccelerateBackend(), made)
    there = find_backend(found.runtime.backend or "accelerate")
    assert there is not None
    assert refusal(there, plan(found.layout)) == ""


@pytest.mark.parametrize(
    ("layout", "model", "job", "said"),
    [
        (
            {},
            {"family": "gemma2"},
            {},
            "tp=2: Transformers' tensor parallelism supports llama, mistral, qwen2 or qwen3",
        ),
        ({}, {"family": "gemma2"}, {}, "Use engine fsdp2 with tp=1 dp_shard=4"),
        ({"tp": 1, "dp_shard": 4, "ep": 2}, {}, {}, "ep=2: small is dense"),
        (
            {"ep": 2},
            {"family": "mixtral", "moe": Moe(experts=4, top_k=2, expert_ffn=96)},
            {},
            "tp=2: beside ep=2 a sequence that tensor ranks share is not predicted",
        ),
        (
            {"tp": 1, "dp_shard": 4, "ep": 2},
            {"family": "gpt_oss", "attention_sinks": True, "moe": Moe(experts=4, top_k=2, expert_ffn=96, bias=True)},
            {},
            "beside ep=2 one expert form is predicted. Use mixtral or qwen3_moe. Nearest that runs: engine=fsdp2 ep=1",
        ),
        ({}, {}, {"method": "lora"}, "method=lora: split weights are launched for full training, not lora"),
        ({"tp": 4, "dp_shard": 1}, {"kv_heads": 2}, {}, "tp=4: it does not divide the 2 key and value heads of small"),
        ({"tp": 4, "dp_shard": 1}, {"kv_heads": 2}, {}, "Use tp=2"),
        ({"dp_shard": 1, "dp_replicate": 2}, {}, {}, "Use dp_shard=2 and dp_replicate=1"),
        ({"offload_optimizer": True}, {}, {}, "offload_optimizer=True: the transformers-tp engine keeps nothing"),
        ({"tp": 1, "dp_shard": 4}, {}, {}, "tp=1: the plan splits nothing over one rank"),
        ({"pp": 2, "dp_shard": 1}, {}, {}, "pp=2: the transformers-tp engine does not split pp. Use pp=1"),
        ({}, {}, {"optimizer": Optimizer(name="lion")}, "optimizer=lion: the trainer builds"),
    ],
)
def test_a_tensor_parallel_plan_that_cannot_be_launched_is_told_the_rule_and_the_nearest_that_can(
    layout: dict[str, int], model: dict[str, object], job: dict[str, object], said: str
) -> None:
    made = plan(replace(LAYOUTS["tp2"], **layout), TrainingJob(**job), replace(MODEL, **model))

    assert said in refusal(TransformersBackend(), made)


@pytest.mark.slow
def test_families_are_those_that_transformers_has_a_tensor_plan_for() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    planless = {family for family in FORMATS if not CONFIG_MAPPING[family].base_model_tp_plan}

    assert planless == set(NO_PLAN)
    assert planless.isdisjoint(FAMILIES)


@pytest.mark.parametrize("recompute", ["attention", "sac:matmul"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_selective_recomputation_runs_where_layers_are_whole_and_is_refused_elsewhere(
    name: str, recompute: str
) -> None:
    asked, whole = (plan(replace(LAYOUTS[name], recompute=one)) for one in (recompute, "full"))
    selective = LAYOUTS[name].engine in ("single", "ddp", "fsdp2", "deepspeed")

    assert (refusal(backend(name), asked) == "") == selective
    assert selective or f"recompute={recompute}: only whole layers are recomputed" in refusal(backend(name), asked)
    assert refusal(backend(name), whole) == ""


@pytest.mark.slow
def test_families_with_an_attention_of_their_own_are_those_whose_modules_do_not_ask_for_the_interface() -> None:
    import inspect

    import transformers

    sources = {
        family: inspect.getsource(inspect.getmodule(getattr(transformers, FORMATS[family].architecture)))
        for family in FORMATS
    }

    assert {family for family in FORMATS if "ALL_ATTENTION_FUNCTIONS" not in sources[family]} == set(OWN_ATTENTION)


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_attention_is_not_recomputed_where_the_trainer_cannot_reach_it(family: str) -> None:
    def asked(recompute: str) -> str:
        model = replace(MODEL, family=family, kv_heads=8)
        return refusal(backend("ddp"), plan(replace(LAYOUTS["ddp"], recompute=recompute), model=model))

    said = asked("attention")
    assert f"recompute=attention: Transformers' {family} calls attention itself" in said
    assert said.endswith("Use recompute=full. Nearest that runs: recompute=full.")
    assert [asked(one) for one in ("none", "sac:matmul", "full")] == [""] * 3


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_trainable_elements_are_those_of_the_real_model(method: str, tied: bool) -> None:
    from tests.built import build_model

    job = TrainingJob(
        method=method, seq_len=16, lora=Lora(rank=4, targets=("k_proj", "o_proj", "down_proj")), optimizer=Optimizer()
    )
    made = plan(LAYOUTS["ddp"], job, replace(MODEL, tied=tied))

    real = sum(weight.numel() for weight in build_model(made).parameters() if weight.requires_grad)

    assert parameters(made.model, job.adapters, trainable=True) == real


def test_buckets_never_exceed_the_model_and_follow_the_layout_when_it_says_so() -> None:
    automatic = Layout(engine="deepspeed", dp_shard=4, zero_stage=2)

    assert reduce_bucket_elements(automatic, 1000) == 1000
    assert reduce_bucket_elements(automatic, 7_000_000_000) == LARGEST_BUCKET_ELEMENTS
    assert reduce_bucket_elements(replace(automatic, reduce_bucket_elements=123), 7_000_000_000) == 123


@pytest.mark.slow
def test_a_name_that_a_release_lost_is_found_by_a_real_import(tmp_path: Path) -> None:
    from executor.worker.readback import missing_names

    (tmp_path / "transformers_tp.py").write_text(
        "def later():\n    from transformers.integrations.tensor_parallel import ReplicateParallel\n"
        "    from transformers.nowhere import Anything\n    from transformers import AutoConfig, utils\n"
    )

    assert missing_names("transformers", tmp_path) == [
        "transformers.integrations.tensor_parallel.ReplicateParallel",
        "transformers.nowhere.Anything",
    ]
    assert missing_names("transformers") == []


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case, layout in LAYOUTS.items():
        for file, content in backend(case).files(plan(layout)).items():
            (GOLDEN / f"{case}{Path(file).suffix}").write_text(without_hash(content, plan(layout)))
