"""Modules trained whole beside adapters, LLaMA-Adapter, GPTQ and LLM.int8 bases, steps inside backward and
paged states, by hand.

What peft and torch themselves hold of the first is in test_computes.py (lora-saved). Not here: rows (tests/truth).
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from planner.ask import options
from planner.ask.question import warnings
from planner.engines import engine_of
from planner.engines.common import stored_weight_bytes
from planner.engines.deepspeed import allocated_bucket_elements
from planner.figures.memory import memory_breakdown
from planner.inventory import Compute, Moment, Stage, optimizers, parameters, unit_weights, walk
from planner.inventory.narrow import gptq_element_bytes, int8_element_bytes
from planner.inventory.ops import linear
from planner.inventory.tape import TERMS, Tape
from planner.inventory.tensors import NOTHING, Size, Weight
from planner.parallelism.case import Case
from planner.parallelism.rule import broken
from planner.spec import Layout, Lora, Optimizer, Quantization, TrainingJob, presets

SEVEN_B = presets.model("7b")
TABLE = 32000 * 4096
"""Elements of Llama 2's embedding, and of its head."""
RANK_8_ON_Q_AND_V = 4_194_304
BOTH = ("embed_tokens", "lm_head")


def case(job: TrainingJob, runtime: str = "accelerate-single", **layout: object) -> Case:
    chosen = presets.runtime(runtime)
    values = {"engine": chosen.engine, "micro_batch_size": 1, "grad_accum": 1} | layout
    return Case(SEVEN_B, job, Layout(**values), presets.cluster("a100-sxm-80gb", gpus=1), chosen)  # type: ignore[arg-type]


def terms(one: Case, phase: str) -> dict[str, float]:
    return next(found.terms for found in memory_breakdown(one).phases if found.phase == phase)


# -- modules_to_save -----------------------------------------------------------------------------------------------


def saving(*names: str) -> TrainingJob:
    lists = Optimizer(implementation="foreach")
    return TrainingJob(method="lora", lora=Lora(modules_to_save=names), seq_len=512, optimizer=lists)


def test_a_saved_module_is_a_trained_16_bit_copy_with_its_own_gradient_and_states() -> None:
    """Adapters are fp32 by peft's default: 4 bytes, and 4 + 8 more. Copies have 2 bytes, and 2 + 4 more."""
    plain, saved = terms(case(saving()), "optimizer"), terms(case(saving(*BOTH)), "optimizer")

    more = {name: saved[name] - plain[name] for name in saved if saved[name] != plain[name]}
    assert more == {
        "params": 2 * 2 * TABLE,
        "grads": 2 * 2 * TABLE,
        "optimizer": 2 * 4 * TABLE,
        "temporaries": 2 * 2 * TABLE,  # lists of AdamW: a root of the second moment
    }
    assert plain["grads"] == 4 * RANK_8_ON_Q_AND_V


def test_lists_of_torch_2_0_hold_a_second_result_of_one_format_at_a_time() -> None:
    wide, narrow = optimizers.TrainedTensor((10, 10), 100), optimizers.TrainedTensor((30, 10), 300, element_bytes=2.0)
    units: optimizers.UpdateUnits = [([wide], 1), ([narrow], 1)]

    assert optimizers.temporaries(Optimizer(), units, 4.0, "foreach") == 4 * 100 + 2 * 300
    assert optimizers.temporaries(Optimizer(), units, 4.0, "foreach-2.0") == 4 * 100 + 2 * 300 + 2 * 300
    assert optimizers.state_bytes(Optimizer(), narrow, 4.0) == 2 * 2 * 300


def test_the_original_of_a_saved_module_stays_frozen_and_is_in_no_product() -> None:
    units = unit_weights(SEVEN_B, Lora(modules_to_save=("lm_head",)))

    original, copy = (weight for weight in units["tail"] if weight.name.startswith("lm_head"))
    assert (original.trainable, original.replaced) == (False, True)
    assert (copy.name, copy.trainable, copy.replaced, copy.elements) == ("lm_head.modules_to_save", True, False, TABLE)
    assert not any(weight.trainable for weight in units["embed"])


def test_a_head_that_is_trained_whole_costs_a_third_of_its_forward_more_in_backward() -> None:
    from planner.figures.work import unit_work

    def tail(one: Case) -> tuple[float, float]:
        found = unit_work(one)["tail"]
        return float(found.forward.flops), float(found.backward.flops)

    plain, saved = tail(case(saving())), tail(case(saving("lm_head")))
    assert saved[0] == plain[0] == 2 * TABLE * 512
    assert saved[1] == 2 * plain[1] == 4 * TABLE * 512


def test_an_engine_that_counts_one_format_of_trained_weights_refuses_saved_modules() -> None:
    one = case(saving(*BOTH), "pytorch-fsdp1", zero_stage=3)

    found = broken(one, engine_of(one.layout.engine).rules)
    assert found is not None
    assert found.fix(one) == "Leave it out, or use engine ddp, deepspeed, fsdp2 or single"


@pytest.mark.parametrize(("micro_batches", "layers"), [(2, 30), (3, 32)])
def test_ddp_lets_whole_gradients_go_in_the_last_micro_batch_alone(micro_batches: int, layers: int) -> None:
    """In the third layer of backward, of adapters and a 16-bit head: with two micro-batches the later one is the last,
    and buckets have what is finished; one in the middle keeps everything."""
    of = case(saving("lm_head"), "accelerate-ddp", dp_replicate=2, grad_accum=micro_batches)
    later = engine_of("ddp").holder(of)(Moment("backward", "layer", 29, (), 0, 0), True)

    head = 2 * TABLE if micro_batches == 3 else 0
    assert later["grads"] - engine_of("ddp").resident(of)["grads"] == layers / 32 * 4 * RANK_8_ON_Q_AND_V + head


# -- 4-bit mixtures of experts -------------------------------------------------------------------------------------


def test_experts_stay_in_16_bits_beside_4_bit_attention_and_the_answer_says_so() -> None:
    """Mixtral: 32 layers of 8 experts with three matrices of 4096 x 14336."""
    asked = options.question({"model": "mixtral-8x7b", "gpus": "8", "method": "qlora"})
    one = Case(asked.model, asked.job, Layout(engine="single"), asked.cluster, presets.runtime("accelerate-single"))
    held = {weight.name: stored_weight_bytes(one, weight) for weight in one.units()["layer"]}

    experts = [name for name in held if "experts" in name]
    assert len(experts) >= 2 and {held[name] for name in experts} == {2.0}
    assert next(bytes_each for name, bytes_each in held.items() if name.endswith("q_proj")) < 0.6
    assert warnings(asked) == (
        "the experts of mixtral-8x7b, 97% of its weights, are not linear modules in Transformers 5: bitsandbytes "
        "leaves them in 16 bits, and so are they planned; --quantize-experts packs them",
    )
    assert 32 * 8 * 3 * 4096 * 14336 / parameters(asked.model) == pytest.approx(0.97, abs=0.005)
    assert warnings(options.question({"model": "mixtral-8x7b", "gpus": "8", "method": "lora"})) == ()


# -- DoRA ----------------------------------------------------------------------------------------------------------


def turning(**changes: object) -> TrainingJob:
    """Adapters with magnitudes on queries and values."""
    return TrainingJob(**{"method": "lora", "lora": Lora(dora=True), "seq_len": 16, **changes})  # type: ignore[arg-type]


def test_magnitudes_are_a_number_a_row_of_each_adapted_matrix() -> None:
    plain, dora = (parameters(SEVEN_B, Lora(dora=on), trainable=True) for on in (False, True))

    assert dora - plain == 32 * 2 * 4096


def test_rows_are_measured_beside_an_identity_matrix_as_wide_as_the_input() -> None:
    """In bf16 q_proj makes of fp32 adapters: the 16-bit copy of the identity and B A, W and both's sum in fp32; of 16
    tokens nothing else is large."""
    plain, dora = (terms(case(turning(lora=Lora(dora=on))), "forward")["temporaries"] for on in (False, True))

    square = 4096**2
    assert dora - plain == pytest.approx(square * (2 + 4 + 4 + 4 + 4), rel=0.02)


@pytest.mark.parametrize(
    ("runtime", "job", "layout", "field"),
    [
        ("accelerate-fsdp2", turning(), {"zero_stage": 3}, "dora"),
        ("accelerate-single", turning(method="qlora"), {}, "dora"),
        ("accelerate-single", turning(), {"recompute": "sac:matmul"}, "dora"),
        ("accelerate-single", turning(), {"recompute": "full"}, None),
    ],
)
def test_magnitudes_that_are_not_modelled_are_refused(
    runtime: str, job: TrainingJob, layout: dict[str, object], field: str | None
) -> None:
    one = case(job, runtime, **layout)
    found = [rule.field for rule in engine_of(one.layout.engine).rules if not rule.holds(one)]

    assert ("dora" in found) == (field == "dora")


# -- GPTQ ----------------------------------------------------------------------------------------------------------


def test_a_gptq_weight_is_a_code_with_a_share_of_scale_zero_and_index() -> None:
    """Of 4096 outputs: half a byte, an fp16 scale and half a byte of zero for 128, four bytes a row."""
    assert gptq_element_bytes(4096) == 0.5 + 2.5 / 128 + 4 / 4096 == 0.5205078125


def test_the_graph_keeps_what_gptq_unpacks_of_one_layer() -> None:
    """Four matrices of 4096 x 4096 and three of 4096 x 11008, in 16 bits; none waits for another layer's backward."""
    model, stage = SEVEN_B, Stage(first=True, last=True, runs=(("layer", 32),))
    compute = Compute(2, 2, lora=Lora(), adapter_bytes=2, layer_form="gptq", recompute="full")
    matrices = 4 * 4096 * 4096 + 3 * 4096 * 11008

    gathered = [moment.live[TERMS.index("gathered")].fixed for moment in walk(model, compute, stage).moments]
    assert max(gathered) == 2 * matrices


def test_a_gptq_base_is_kept_whole_and_refused_where_weights_are_sharded() -> None:
    job = TrainingJob(
        method="qlora", lora=Lora(), quantization=Quantization(base="gptq"), precision="fp16", seq_len=512
    )
    held = {stage: case(job, "deepspeed-zero", zero_stage=stage) for stage in (2, 3)}
    layers = 32 * (4 * 4096 * 4096 * gptq_element_bytes(4096) + 4096 * 11008 * (2 * gptq_element_bytes(11008)))
    layers += 32 * 4096 * 11008 * gptq_element_bytes(4096)
    norms = 65 * 4096

    params = terms(held[2], "optimizer")["params"]
    assert params == pytest.approx(layers + 2 * (2 * TABLE + norms + RANK_8_ON_Q_AND_V))
    rules = engine_of("deepspeed").rules
    assert broken(held[2], rules) is None
    refused = broken(held[3], rules)
    assert refused is not None and refused.field == "quantization"


def test_zero_2_allocates_two_buckets_where_it_reduces_beside_backward() -> None:
    job = TrainingJob(method="lora", lora=Lora(), seq_len=512)
    asked = {"zero_stage": 2, "reduce_bucket_elements": 1000}

    alone, beside = (case(job, "deepspeed-zero", overlap_comm=overlap, **asked) for overlap in (False, True))
    assert (allocated_bucket_elements(alone), allocated_bucket_elements(beside)) == (1000, 2000)


# -- a step inside backward, paged states, activations on the host -------------------------------------------------


def stepped(**optimizer: object) -> TrainingJob:
    return TrainingJob(precision="pure-bf16", seq_len=512, optimizer=Optimizer(**optimizer))  # type: ignore[arg-type]


def test_a_step_inside_backward_holds_one_weights_gradient() -> None:
    """The largest: the head's or the table's, 2 bytes x 32000 x 4096; the fused kernel makes nothing beside it."""
    asked = stepped(in_backward=True, implementation="fused")
    usual, inside = (terms(case(job, recompute="full"), "backward") for job in (stepped(), asked))

    assert usual["grads"] > 2 * 6.7e9
    assert inside["grads"] in (2 * TABLE, 0.0)
    assert terms(case(asked), "optimizer")["grads"] == 0.0


def test_lists_inside_backward_make_a_result_of_one_weight() -> None:
    one = case(stepped(in_backward=True, implementation="foreach"), recompute="full")
    holder = engine_of("single").holder(one)
    moments = walk(SEVEN_B, engine_of("single").compute(one), one.walked_stage).moments

    held = [holder(moment, False) for moment in moments if moment.in_flight == TABLE]
    assert held
    assert {(found["grads"], found["temporaries"]) for found in held} == {(2 * TABLE, 2 * TABLE)}


def test_a_step_inside_backward_accumulates_nothing() -> None:
    one = case(stepped(in_backward=True), grad_accum=2)

    found = broken(one, engine_of("single").rules)
    assert found is not None and found.field == "grad_accum"


def test_paged_states_of_all_but_small_weights_are_not_torchs() -> None:
    """Norms have 4096 weights, fewer than the 100,000 from which bitsandbytes pages: 65 of them, two moments of 1 byte
    and two scales for 256."""
    assert terms(case(stepped(name="adamw-8bit", paged=True)), "optimizer")["optimizer"] == 65 * 2 * (4096 + 4 * 16)


def test_one_device_can_keep_activations_on_the_host() -> None:
    """Of 32 inputs of recomputed layers one is on the device when the loss is worked out."""
    alone, spared = (case(stepped(), recompute="full", offload_activations=on) for on in (False, True))
    layer_input = 2 * 512 * 4096

    before, after = (terms(one, "forward")["activations"] for one in (alone, spared))
    assert before - after == pytest.approx(31 * layer_input)
    assert broken(spared, engine_of("single").rules) is None


def test_configurations_of_two_trainers_say_which_modules_are_saved(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from planner.ask import fromfile

    axolotl = "base_model: llama-2-7b\nadapter: lora\nlora_r: 8\nlora_modules_to_save: [embed_tokens, lm_head]\n"
    factory = "model_name_or_path: llama-2-7b\nfinetuning_type: lora\nadditional_target: embed_tokens,lm_head\n"
    for name, text in (("axolotl", axolotl), ("llamafactory", factory)):
        (tmp_path / f"{name}.yaml").write_text(text)
        assert fromfile.read(tmp_path / f"{name}.yaml").options["modules_to_save"] == "embed_tokens,lm_head"


# -- LLM.int8 ------------------------------------------------------------------------------------------------------


def test_an_int8_weight_is_a_code_with_a_share_of_its_row_s_scale() -> None:
    assert int8_element_bytes(4096) == 1 + 4 / 4096


@pytest.mark.slow
def test_bitsandbytes_holds_codes_and_a_scale_a_row_and_keeps_inputs() -> None:
    """Its own module, on a CPU: what it stores, and what one that is not reentrantly called keeps for backward."""
    bitsandbytes, torch = pytest.importorskip("bitsandbytes"), pytest.importorskip("torch")
    checkpoint = torch.utils.checkpoint.checkpoint
    module = bitsandbytes.nn.Linear8bitLt(96, 64, bias=False, has_fp16_weights=False, threshold=6.0).train()
    module.weight = bitsandbytes.nn.Int8Params(module.weight.data, requires_grad=False)._quantize("cpu")
    stored = module.weight.data.nbytes + module.weight.SCB.nbytes
    assert stored == 96 * 64 * int8_element_bytes(96)
    kept = {}
    for reentrant in (True, False):
        alive = []

        def called(x: Any, alive: list[Any] = alive) -> Any:
            wide = x * 2
            alive.append(weakref.ref(wide))
            return module(wide)

        out = checkpoint(called, torch.ones(5, 96, requires_grad=True), use_reentrant=reentrant)
        kept[reentrant] = alive[0]() is not None
        out.sum().backward()
    assert kept == {True: False, False: True}


@pytest.mark.parametrize(("precision", "quantising", "product"), [("bf16", 5, 6), ("fp16", 3, 4)])
def test_an_int8_product_quantises_its_input_and_keeps_it(precision: str, quantising: int, product: int) -> None:
    """Of 5 rows of 96: bytes while the input is quantised beside codes, and beside 64 results; then the 16-bit weight
    in backward."""
    form, rows = "int8-half" if precision == "fp16" else "int8", 5
    tape = Tape()
    weight = Weight(name="w", shape=(64, 96), unit="layer", trainable=False, form=form)
    x = tape.new(Size(per_token=2 * 96.0), needs_grad=True)
    out = linear(tape, x, weight, element_bytes=2)
    before = [sum((size for size in moment.live), NOTHING) for moment in tape.moments]
    most = max(size.per_token * rows + size.fixed for size in before)
    codes = rows * (96 + 4)
    assert most == rows * 2 * 96 + codes + max(rows * 96 * quantising, rows * 64 * (product + 2))
    tape.drop(x)
    assert sum((one.size.per_token for one in tape.nodes[-1].saved), 0.0) == 2 * 96
    count = len(tape.moments)
    tape.backward(out)
    assert max(sum(size.fixed for size in moment.live) for moment in tape.moments[count:]) == 2 * 64 * 96


def test_an_int8_base_is_held_whole_on_gpus_beside_peft_s_adapters() -> None:
    job = TrainingJob(method="qlora", lora=Lora(), quantization=Quantization(base="int8"), seq_len=512)
    for runtime, stage, refused in (
        ("accelerate-single", 0, None), ("accelerate-ddp", 0, None), ("deepspeed-zero", 2, None),
        ("deepspeed-zero", 3, "quantization"), ("accelerate-fsdp2", 3, "quantization"), ("unsloth", 0, "quantization"),
    ):  # fmt: skip
        one = case(job, runtime, zero_stage=stage)
        rules = [rule for rule in engine_of(one.layout.engine).rules if rule.field == "quantization"]
        found = broken(one, rules)
        assert (found and found.field) == refused
    held = terms(case(job, "deepspeed-zero", zero_stage=2), "optimizer")["params"]
    square, wide = 4 * 4096 * 4096 * int8_element_bytes(4096), 4096 * 11008 * 2 * int8_element_bytes(4096)
    layers = 32 * (square + wide + 4096 * 11008 * int8_element_bytes(11008))
    assert held == pytest.approx(layers + 2 * (2 * TABLE + 65 * 4096 + RANK_8_ON_Q_AND_V))
