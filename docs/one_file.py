"""Where the memory and the traffic of a training step come from: the planner's figures from formulas that fit one file.

Read it from top to bottom, or run it: `python docs/one_file.py`. Sizes are bytes, of one GPU and one optimizer step;
T: tokens that a GPU works on, P: parameters, n: GPUs. It holds within 2 % of the planner for models of 1 B parameters
or more, a micro-batch of 512 tokens or more, one a step, and 2 to 256 GPUs that divide its sizes: docs/one-file.md.
"""

from dataclasses import dataclass

BF16, FP32, FP64 = 2, 4, 8  # bytes of a number


@dataclass
class Model:
    """A Llama-like decoder: RMSNorm, rotary positions, grouped queries, a gated MLP, a head of its own, no biases."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int  # heads of keys, and of values: several heads of queries share one
    ffn: int  # features inside the MLP
    vocab: int
    head_dim: int = 128

    def __post_init__(self) -> None:
        self.q, self.kv = self.heads * self.head_dim, self.kv_heads * self.head_dim  # features over all heads
        # Elements: projections of queries, keys, values and attention's result, then gate, up and down; and two norms.
        self.matrices = self.hidden * (2 * self.q + 2 * self.kv + 3 * self.ffn)
        self.layer, self.table = self.matrices + 2 * self.hidden, self.vocab * self.hidden  # table: embedding, or head
        self.parameters = 2 * self.table + self.layers * self.layer + self.hidden


@dataclass
class Question:
    """Training in bf16 with AdamW. Methods: ddp, zero1, zero2, fsdp (stage 3), tensor (parallel), lora (over DDP)."""

    model: str
    method: str
    gpus: int
    sequences: int  # that a GPU works on at once
    length: int  # tokens of each
    recompute: bool = False  # layers run again in backward, so that they need not be kept
    rank: int = 16  # of adapters, which are on queries and values
    card: float = 79.1 * 2**30  # memory of a GPU

    def __post_init__(self) -> None:
        self.m, self.tokens, self.full = MODELS[self.model], self.sequences * self.length, self.method != "lora"
        self.split = self.gpus if self.method == "tensor" else 1
        self.adapters = self.m.layers * self.rank * (2 * self.m.hidden + self.m.q + self.m.kv)  # rank x in, out x rank
        # Bytes of a number in the residual stream. DDP's weights are fp32, and autocast makes products alone 16-bit.
        # FSDP gathers 16-bit weights, DeepSpeed casts the model, a base that is never updated is loaded in 16 bits.
        self.stream = FP32 if self.method in ("ddp", "tensor") else BF16


def states(ask: Question) -> dict[str, float]:
    """What stays between steps. DDP divides nothing, ZeRO-1 the optimizer, ZeRO-2 gradients too, FSDP weights too."""
    n, P, A = ask.gpus, ask.m.parameters, ask.adapters
    if ask.method == "ddp":  # gradients have their place, the buckets that are sent, from the first step on
        return {"weights": FP32 * P, "gradients": FP32 * P, "optimizer": 2 * FP32 * P}
    if ask.method == "lora":  # gradients and averages of the adapters alone
        return {"weights": BF16 * P + FP32 * A, "gradients": FP32 * A, "optimizer": 2 * FP32 * A}
    if ask.method in ("zero1", "zero2"):  # 16-bit weights; the optimizer has fp32 ones beside its averages
        return {"weights": BF16 * P, "gradients": 0, "optimizer": 3 * FP32 * P / n}
    whole = (2 * ask.m.layers + 1) * ask.m.hidden if ask.method == "tensor" else 0  # tensor ranks each have all norms
    mine = (P - whole) / n + whole
    return {"weights": FP32 * mine, "gradients": 0, "optimizer": 2 * FP32 * mine}


def kept_by_layer(ask: Question) -> dict[str, float]:
    """Activations, bytes a token. A derivative needs a product's operands, and of a frozen weight no input."""
    m, part, full = ask.m, 1 / ask.split, ask.full  # tensor ranks split heads and the MLP's features, nothing else
    casts = (3, 2) if ask.stream == FP32 else (1, 1)  # autocast gives every product a 16-bit copy of its input
    adapters = 2 * BF16 * (m.hidden + ask.rank) * (not full)  # inputs of A and B, of queries and of values
    return {
        "both norms, in fp32": 2 * FP32 * (m.hidden + 1),  # of the square, and one root
        "both norms' results": 2 * ask.stream * m.hidden * full,  # for the gradient of the weight they are scaled by
        "input of q, k, v": casts[0] * BF16 * m.hidden * full + adapters,
        "q, k, v": BF16 * (m.q + 2 * m.kv) * part,  # flash attention makes its scores again from these
        "attention's result": (BF16 * m.q + FP32 * m.heads) * part,  # with a number a head that rescales the scores
        "input of gate, up": casts[1] * BF16 * m.hidden * full,
        "gate, silu(gate), up": 3 * BF16 * m.ffn * part,  # silu keeps its input, gate * up both factors
        "input of down": BF16 * m.ffn * part * full,
    }


def touching(ask: Question, finished: float) -> float:
    """ZeRO-2: gradient elements that the fullest rank keeps when `finished` are computed, the last weights first."""
    # Weights lie end to end and are cut into n equal parts, one a rank; a gradient across a cut is kept whole by both.
    m, share = ask.m, ask.m.parameters / ask.gpus
    layer = [m.hidden * out for out in (m.q, m.kv, m.kv, m.q, m.ffn, m.ffn, m.ffn, 1, 1)]
    kept, start = [0.0] * ask.gpus, 0
    for size in [m.table, *layer * m.layers, m.hidden, m.table]:
        for rank in range(int(start / share), min(ask.gpus, int((start + size - 1) / share) + 1)):
            kept[rank] += size
        start += size
    return max((size for rank, size in enumerate(kept, 1) if finished > start - rank * share), default=0.0)


def moments(ask: Question) -> dict[str, float]:
    """Live bytes at each moment that can be the fullest; the largest is the peak."""
    m, n, T, P, F = ask.m, ask.gpus, ask.tokens, ask.m.parameters, ask.m.ffn / ask.split
    zero, fsdp, autocast = ask.method in ("zero1", "zero2"), ask.method == "fsdp", ask.stream == FP32
    resident, stream, logits = sum(states(ask).values()), T * ask.stream * m.hidden, T * m.vocab
    layer = T * sum(kept_by_layer(ask).values())
    end = T * (FP32 * (m.hidden + 1) + (ask.stream + BF16) * m.hidden * ask.full)  # the final norm, the head's input
    normal = stream * autocast  # autocast's final norm has an fp32 result, which the head casts
    # Autocast's 16-bit copies of weights live as long as the graph of their products, and at least until forward ends.
    copies, head_copy = (BF16 * autocast * size / ask.split for size in (m.matrices, m.table))
    # Recomputation keeps each layer's input alone. All else of one layer is there while that runs again.
    kept, kept_copies = (stream, 0) if ask.recompute else (layer, copies)
    again = layer + copies - stream * autocast if ask.recompute else 0  # autocast's first norm keeps the input itself
    gathered, gathered_end = BF16 * m.layer * fsdp, BF16 * m.table * fsdp  # whole weights under FSDP, a unit at a time
    made = (FP32 if autocast else BF16) * ask.full  # of a gradient as backward makes it
    bucket = BF16 * min(50e6, max(2**20, P / 16)) * zero  # DeepSpeed's, as the planner sets it: 1 to 50 M elements

    def finished(elements: float) -> float:  # gradients that are done, where they have no place among `states`
        if ask.method == "zero2":
            return BF16 * touching(ask, elements) + bucket
        return {"zero1": BF16, "fsdp": FP32 / n, "tensor": FP32}.get(ask.method, 0) * elements + bucket

    # At the loss all activations are there: with logits, their fp32 copy, its log-softmax; then with the log-softmax,
    # its gradient, the copy's. FSDP has the head's weights, and in forward the buffer that they were gathered in.
    at_loss = resident + m.layers * kept + head_copy + end + gathered_end
    forward, backward = at_loss + m.layers * copies + normal + gathered_end, at_loss + m.layers * kept_copies
    found = {
        "loss, forward": forward + (BF16 + FP32 + FP32) * logits,
        "loss, backward": backward + (FP32 + FP32 + FP32) * logits,
        "head, backward": backward + BF16 * logits + made * m.table / ask.split + gathered,  # of the last layer, early
    }
    for done in range(m.layers):  # layers whose backward is over, the last first
        below = m.layers - done - 1
        here = resident + below * (kept + kept_copies) + finished((m.table + done * m.layer) / ask.split) + stream
        # FSDP: this layer's weights, the buffer of the unit that is next, and the gradients of the last, being reduced.
        here += gathered + (gathered if below else gathered_end) + (gathered if done else gathered_end)
        # Gradients of silu(gate) * up (in the place of what down kept, its input), of both factors, and of a matrix.
        products = T * (2 if ask.full else 3) * BF16 * F + made * m.hidden * F
        found[f"MLP, backward, {done} layers done"] = here + kept + kept_copies + again + products
        # The first norm's backward: six fp32 tensors and a 16-bit one. FSDP by then has the layer's gradients whole.
        norm = T * m.hidden * (6 * FP32 + BF16) + kept * ask.recompute
        found[f"norm, backward, {done} layers done"] = here + norm + made * m.layer * fsdp
    embedding = made * m.table + gathered + gathered_end  # its gradient, whole, beside the first layer's on its way
    found["embedding, backward"] = resident + finished((P - m.table) / ask.split) + stream + embedding
    if zero:
        both = 2 * BF16 * P  # weights are laid end to end, on the card if it has room beside its own context, 1 GiB
        found["load"] = both if both <= ask.card - 2**30 else both / 2
        # A rank's gradients; beside them one as fp64, for its norm, then all end to end, then these in fp32.
        found["optimizer"] = resident + BF16 * P / n + max(FP64 * min(P / n, m.table), (BF16 + FP32) * P / n)
    elif ask.full and ask.method != "ddp":  # gradients as large as weights; the embedding's is whole on a tensor rank
        found["optimizer"] = resident + states(ask)["weights"] + FP32 * m.table * (ask.method == "tensor")
    return found


def all_gather(size: float, n: int) -> float:
    """Bytes a rank sends until all n have `size` bytes, of which each had 1/n: all parts but one pass it in a ring."""
    return size * (n - 1) / n


reduce_scatter = all_gather  # the same way back: each had the whole, and gets 1/n of the sum


def all_reduce(size: float, n: int) -> float:
    """Bytes a rank sends until all have the sum: both of them, one after the other."""
    return reduce_scatter(size, n) + all_gather(size, n)


def sent(ask: Question) -> float:
    """Bytes each rank sends in a step."""
    m, n, P, stream = ask.m, ask.gpus, ask.m.parameters, ask.tokens * ask.m.hidden
    if ask.method in ("ddp", "lora"):  # gradients, in the format of their weights
        return all_reduce(FP32 * (P if ask.full else ask.adapters), n)
    if ask.method in ("zero1", "zero2"):  # DeepSpeed sums whole buckets, then each rank hands out its new weights
        return all_reduce(BF16 * P, n) + all_gather(BF16 * P, n)
    if ask.method == "fsdp":  # weights for forward and for backward, but head and final norm once; then gradients
        return all_gather(BF16 * (P + P - m.table - m.hidden), n) + reduce_scatter(BF16 * P, n)
    # Tensor: a layer's two results, and again one that runs again; gradients of q, k, v, gate, up's inputs; both ends.
    layer = all_reduce((3 if ask.recompute else 2) * BF16 * stream + 5 * FP32 * stream, n)
    return m.layers * layer + all_reduce(2 * FP32 * stream, n) + all_gather(BF16 * ask.tokens * m.vocab, n)


MODELS = {
    "tinyllama-1.1b": Model(22, 2048, 32, 4, 5632, 32_000, head_dim=64),
    "llama-2-7b": Model(32, 4096, 32, 32, 11_008, 32_000),
    "llama-3-8b": Model(32, 4096, 32, 8, 14_336, 128_256),
    "llama-2-13b": Model(40, 5120, 40, 40, 13_824, 32_000),
    "llama-3-70b": Model(80, 8192, 64, 8, 28_672, 128_256),
}
QUESTIONS = (
    Question("tinyllama-1.1b", "ddp", 4, 4, 2048),
    Question("llama-2-7b", "zero1", 16, 1, 2048, recompute=True),
    Question("llama-2-13b", "zero2", 32, 2, 2048),
    Question("llama-3-70b", "fsdp", 64, 1, 8192, recompute=True),
    Question("llama-3-8b", "tensor", 8, 2, 4096),
    Question("llama-3-8b", "lora", 8, 2, 2048),
)

if __name__ == "__main__":
    for ask in QUESTIONS:
        where, peak = max(moments(ask).items(), key=lambda one: one[1])
        size = f"{ask.gpus} GPUs, {ask.sequences} x {ask.length} tokens{', recomputed' if ask.recompute else ''}"
        print(f"{ask.model:14} {ask.method:6} {size:36} {peak / 1e9:6.2f} GB {sent(ask) / 1e9:6.2f} GB sent  {where}")
