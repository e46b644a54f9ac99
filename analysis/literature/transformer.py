"""Models of transformers from their hyper-parameters, as the figures' own code builds them.

Bytes that operations stream are counted by reading the kernels: of a tensor of n elements of v bytes, a norm reads and
writes v*n each way, and in its backward reads two tensors twice and writes one; a dropout reads v*n and writes v*n and
a mask of n; a softmax that is fused with scale and mask (Megatron-LM, fused_kernels) reads and writes v a score.
"""

from dataclasses import replace
from functools import lru_cache

from analysis.literature.operations import FLOAT, INPUT, NOTHING, Chain, Cut, Operation, Weight, loss_of, total
from analysis.literature.runs import Shape, Software
from gssim.units import PRECISION_BYTES
from gssim.workload import Layer, Model, Module, Polynomial, TokenInput


class Writer:
    """Writes the operations of one model down."""

    def __init__(self, shape: Shape, software: Software, ranks: int) -> None:
        self.shape, self.software, self.cut = shape, software, Cut(ranks)
        self.value = PRECISION_BYTES[software.precision]

    def tokens(self, width: float, *, shared: bool = True, value: float | None = None) -> Polynomial:
        """Return the bytes of a tensor of `width` elements for each token."""
        return self.cut.size(bs=width * (self.value if value is None else value), shared=shared)

    def whole(self, width: float, *, value: float | None = None) -> Polynomial:
        """Return the same of a tensor outside cut maps: with sequence parallelism, shared too."""
        return self.tokens(width, shared=self.software.sequence_parallel, value=value)

    def passed(self) -> Polynomial:
        """Return the bytes of what a block hands on."""
        shared = self.software.sequence_parallel or self.software.partitioned
        return self.tokens(self.shape.hidden, shared=shared)

    def scores(self, per_score: float) -> Polynomial:
        """Return so many for each score of a head."""
        return self.cut.size(bss=per_score * self.shape.heads * self.software.context_ranks)

    def gathered(self) -> Operation:
        """Return what a rank gets of the others' parts of a block's input."""
        parts = self.cut.ranks
        width = self.shape.hidden * (parts - 1) / parts
        return Operation(name="gathered", output=self.tokens(width, shared=False))

    def gathers(self, name: str) -> bool:
        """Return whether what is read under a name was gathered by `cut_input`."""
        return name.endswith("_gathered") and self.cut.ranks > 1

    def cut_input(self, name: str, reads: str) -> list[Operation]:
        """Return the gathering of a norm's output for all the maps that read it, where it is one tensor of its own.

        DTensor hands it to the maps, which keep it for their backward (torchtitan, parallelize_llama:
        PrepareModuleInput); Megatron's maps gather what they read in each pass, and keep their part of it.
        """
        if not self.software.gathers_inputs or self.cut.ranks == 1:
            return []
        whole = self.tokens(self.shape.hidden, shared=False)
        kept = self.whole(self.shape.hidden) if self.software.pipelined_maps else whole
        return [Operation(name=name, reads=(reads,), output=kept, backward_summed=whole)]

    def norm(self, name: str, *reads: str) -> Operation:
        """Return a norm of what is read."""
        h, v = self.shape.hidden, self.value
        names = ("weight", "bias") if self.shape.kind == "gpt" else ("weight",)
        weights = tuple(Weight(name=f"{{}}.{name}.{each}", shape=(h,)) for each in names)
        # eager RMS norms are five operations, in float (square, mean, product, cast, product)
        passes = 2.0 if self.shape.kind == "gpt" or self.software.compiled else 2.0 + 4 * FLOAT / v
        return Operation(
            name=name,
            reads=reads,
            output=self.whole(h),
            streamed=self.whole(h * passes),
            backward_streamed=self.whole(h * (5 if passes == 2 else 2 * passes)),
            saves=reads,
            noted=self.whole(2 if self.shape.kind == "gpt" else 1, value=FLOAT),
            weights=weights,
            kernels=2 if passes == 2 else 5,
        )

    def linear(
        self,
        name: str,
        reads: str,
        inputs: int,
        outputs: int,
        *,
        by_rows: bool,
        kept: bool = True,
        speedup: float | None = None,
    ) -> Operation:
        """Return a linear map, cut by its outputs' columns, or by its inputs' rows: ranks then sum."""
        size, speedup = self.tokens, self.software.map_speedup if speedup is None else speedup
        weights = [Weight(name="{}." + name + ".weight", shape=(outputs, inputs), cut=1 if by_rows else 0)]
        if self.shape.kind == "gpt":
            weights.append(Weight(name="{}." + name + ".bias", shape=(outputs,), cut=None if by_rows else 0))
        casts = inputs + outputs if self.software.float8_casts and speedup != 1 else 0
        made = size(outputs, shared=not by_rows)
        # in a ring, the sum over ranks is a reduce-scatter and an all-gather, which sequence parallelism takes apart
        summed = size(outputs if by_rows else inputs, shared=False)
        return Operation(
            name=name,
            reads=(reads,),
            output=self.whole(outputs) if by_rows else made,
            flop=self.cut.size(bs=2 * inputs * outputs / speedup),
            operands=self.cut.size(one=self.value * inputs * outputs, bs=self.value * (inputs + outputs)),
            streamed=size(casts * 1.5),
            backward_streamed=size(casts * 3 + (outputs if self.shape.kind == "gpt" and not by_rows else 0)),
            saves=(reads,),
            weights=tuple(weights),
            kept=kept,
            kernels=1 if self.software.compiled else 3,
            summed=summed if by_rows else None,
            backward_summed=None if by_rows or self.gathers(reads) else summed,
        )

    def add(self, name: str, reads: tuple[str, str], *, last: bool = False) -> Operation:
        """Return a sum with the residual, behind bias and dropout where there are such."""
        h, v = self.shape.hidden, self.value
        dropped = self.shape.kind == "gpt" and self.software.dropout
        passes = 0.0 if self.software.compiled else 3.0
        return Operation(
            name=name,
            reads=reads,
            output=self.passed() if last else self.whole(h),
            streamed=self.whole(h * (passes + dropped / v)),
            backward_streamed=self.whole(h * (passes + (2 + 1 / v) * dropped)),
            noted=self.whole(h, value=1) if dropped else NOTHING,
            passes_gradient=not dropped,
            kernels=3 if self.shape.kind == "gpt" else 1,
        )

    # Attention -------------------------------------------------------------------------------------------------------

    def attention(self, reads: tuple[str, ...]) -> list[Operation]:
        """Return the operations between queries, keys and values, and the context."""
        return [self.flash(reads)] if self.software.flash_attention else self.unfused(reads[0])

    def flash(self, reads: tuple[str, ...]) -> Operation:
        """Return attention whose scores stay on the chip."""
        shape = self.shape
        # forward 2 products of 2 FLOP, half of it masked; backward 5 of them (Dao 2023, FlashAttention-2, section 3.1)
        forward = 4 * shape.hidden / 2 / shape.heads / self.software.attention_ratio
        merged, merged_back = self.ring() if self.software.context_ranks > 1 else (NOTHING, NOTHING)
        return Operation(
            name="context",
            reads=reads,
            output=self.tokens(shape.hidden),
            flop=self.scores(forward),
            backward_flop=self.scores(2.5 * forward),
            operands=self.tokens(2 * shape.hidden + 2 * shape.kv_width),
            streamed=merged,
            backward_streamed=merged_back,
            saves=(*reads, "context"),
            noted=self.tokens(shape.heads, value=FLOAT),
            kept=True,
        )

    def ring(self) -> tuple[Polynomial, Polynomial]:
        """Return the bytes that attention in a ring streams, forward and backward, beside the attention itself.

        Each other rank's part costs as many FLOP as the own causal half (load-balanced), and besides (torch 2.13,
        distributed/tensor/experimental/_context_parallel/_attention.py, `_templated_ring_attention` and its backward):
        its output is cast to float and merged; keys and values, of every head (torchtitan, `repeat_kv`), are joined and
        sent; in the backward, gradients of all three are added up in float, and those of keys and values are joined and
        sent on. Messages are taken to hide behind the attention to the part before.
        """
        v, others = self.value, self.software.context_ranks - 1
        # of the other parts, half are against all own queries, and half against the second half of them: then what is
        # not added to is copied (`_partial_update`), but where one kernel does it all
        if self.software.compiled:
            merged = added = 2 * FLOAT + 0.75 * v
            joined = 0
        else:
            merged, added = (0.75 * (passes * FLOAT + v) + FLOAT for passes in (9, 2))
            joined = 4 * FLOAT
        handed, layer_input_gradient = 8 * v, 4 * FLOAT  # keys and values: joined, read to be sent, written on arrival
        forward, backward = merged + handed, 3 * added + joined + layer_input_gradient + handed
        width = self.shape.hidden * others
        return self.tokens(width, value=forward), self.tokens(width, value=backward)

    def unfused(self, reads: str) -> list[Operation]:
        """Return attention whose scores are written.

        A head's products have so few FLOP a byte that their scores' bytes count beside them. Where softmax is several
        kernels, scores are read or written 6 times in the forward and 20 times in the backward, as Sailor's profiles of
        layers tell (OPT-350M and GPT-Neo on one V100, A100 or GH200: most are then within 7 %, those on an A100 of
        40 GB within 15 %).
        """
        h, v = self.shape.hidden, self.value
        product = 2 * h / self.shape.heads
        fused = self.software.fused_softmax
        found = [
            Operation(
                name="scores",
                reads=(reads,),
                output=self.scores(v),
                flop=self.scores(product),
                streamed=self.scores(v),
                backward_streamed=self.scores(2 * v),
                saves=(reads,),
                kept=True,
                kernels=4,
            ),
            Operation(
                name="softmax",
                reads=("scores",),
                output=self.scores(v),
                streamed=self.scores((2 if fused else 4) * v),
                backward_streamed=self.scores((3 if fused else 16) * v),
                saves=("softmax",),
                kernels=1 if fused else 3,
            ),
        ]
        if self.software.dropout:
            found.append(
                Operation(
                    name="dropout",
                    reads=("softmax",),
                    output=self.scores(v),
                    streamed=self.scores(2 * v + 1),
                    backward_streamed=self.scores(2 * v + 1),
                    noted=self.scores(1),
                )
            )
        weights = found[-1].name
        context = Operation(
            name="context",
            reads=(weights, reads),
            output=self.tokens(h),
            flop=self.scores(product),
            streamed=total([self.tokens(2 * h), self.scores(v)]),
            backward_streamed=total([self.tokens(2 * h), self.scores(2 * v)]),
            saves=(weights, reads),
            kept=True,
            kernels=4,
        )
        return [*found, context]

    # Blocks ----------------------------------------------------------------------------------------------------------

    def block(self) -> tuple[Operation, ...]:
        """Return the operations of a block."""
        return self.gpt_block() if self.shape.kind == "gpt" else self.llama_block()

    def gpt_block(self) -> tuple[Operation, ...]:
        """Return a GPT block: norms come first."""
        h, ffn = self.shape.hidden, self.shape.ffn
        return (
            *([self.gathered()] if self.software.partitioned else []),
            self.norm("attention_norm", INPUT, *(["gathered"] if self.software.partitioned else [])),
            self.linear("qkv", "attention_norm", h, h + 2 * self.shape.kv_width, by_rows=False),
            *self.attention(("qkv",)),
            self.linear("out", "context", h, h, by_rows=True),
            self.add("attended", ("out", INPUT)),
            self.norm("map_norm", "attended"),
            self.linear("up", "map_norm", h, ffn, by_rows=False),
            Operation(
                name="gelu",
                reads=("up",),
                output=self.tokens(ffn),
                streamed=self.tokens(2 * ffn),
                backward_streamed=self.tokens(3 * ffn),
                saves=("up",),
            ),
            self.linear("down", "gelu", ffn, h, by_rows=True),
            self.add("mapped", ("down", "attended"), last=True),
        )

    def llama_block(self) -> tuple[Operation, ...]:
        """Return a Llama block; torchtitan's selective recomputation keeps every other map (`_get_custom_policy`).

        That of the last one is kept for nothing, as no backward needs it: a compiler keeps only what lies between
        forward and backward (torch 2.13, _functorch/partitioners.py).
        """
        h, ffn, kv = self.shape.hidden, self.shape.ffn, self.shape.kv_width
        eager = not self.software.compiled
        rotated = h + kv
        # eager: casts to float and back, and a product of complex numbers
        passes = 2 + 4 * FLOAT / self.value if eager else 2
        before, behind = (self.cut_input(f"{place}_gathered", f"{place}_norm") for place in ("attention", "map"))
        attended, mapped = (
            each[0].name if each else f"{place}_norm" for place, each in (("attention", before), ("map", behind))
        )
        return (
            self.norm("attention_norm", INPUT),
            *before,
            self.linear("query", attended, h, h, by_rows=False),
            self.linear("key", attended, h, kv, by_rows=False, kept=False),
            self.linear("value", attended, h, kv, by_rows=False),
            Operation(
                name="rotated",
                reads=("query", "key"),
                output=self.tokens(rotated),
                streamed=self.tokens(passes * rotated),
                backward_streamed=self.tokens(passes * rotated),
                kernels=6 if eager else 1,
            ),
            *self.attention(("rotated", "value")),
            self.linear("out", "context", h, h, by_rows=True, kept=False),
            self.add("attended", ("out", INPUT)),
            self.norm("map_norm", "attended"),
            *behind,
            self.linear("gate", mapped, h, ffn, by_rows=False),
            self.linear("up", mapped, h, ffn, by_rows=False, kept=False),
            Operation(
                name="swiglu",
                reads=("gate", "up"),
                output=self.tokens(ffn),
                streamed=self.tokens((5 if eager else 3) * ffn),
                backward_streamed=self.tokens((9 if eager else 5) * ffn),
                saves=("gate", "up"),
                kernels=2 if eager else 1,
            ),
            self.linear("down", "swiglu", ffn, h, by_rows=True, kept=eager),
            self.add("mapped", ("down", "attended"), last=True),
        )

    def embedding(self) -> tuple[Operation, ...]:
        """Return the look-up of tokens, and of positions where they are learned."""
        h, shape = self.shape.hidden, self.shape
        weights = [Weight(name="{}.weight", shape=(shape.vocabulary, h), cut=0)]
        if shape.kind == "gpt":
            weights.append(Weight(name="{}.positions", shape=(shape.sequence_length, h)))
        return (
            Operation(
                name="embedding",
                reads=(),
                output=self.passed(),
                streamed=self.whole((2.0 if shape.kind == "llama" else 6.0) * h),
                backward_streamed=self.whole(3.0 * h),
                noted=self.tokens(1, shared=False, value=8),
                weights=tuple(weights),
                summed=self.tokens(h, shared=False),
            ),
        )

    def head(self, *, tied: bool) -> tuple[Operation, ...]:
        """Return the last norm, the logits and the loss; `tied`: the embedding's weight serves for logits too."""
        h, vocabulary = self.shape.hidden, self.shape.vocabulary
        if self.shape.predicted is not None:
            vocabulary = round(vocabulary * self.shape.predicted / self.shape.sequence_length)
        logits = self.linear("logits", "norm", h, vocabulary, by_rows=False, speedup=1.0)
        logits = replace(logits, weights=() if tied else logits.weights[:1])
        return (self.norm("norm", INPUT), logits, *loss_of(self, vocabulary))


def layers_of(shape: Shape, software: Software, ranks: int, *, tied: bool) -> tuple[Layer, ...]:
    """Return the layers of a model: embedding, blocks, and the head with the loss."""
    writer = Writer(shape, software, ranks)
    cut, stop = writer.cut, software.early_stop
    block = writer.block()
    held = next(len(block) - 1 - place for place, each in enumerate(block) if each.name == "map_norm")
    modules = [f"blocks.{number}" for number in range(shape.layers)]
    parts = {"embedding": writer.embedding(), "blocks.0": block, "head": writer.head(tied=tied)}
    return tuple(
        Chain(operations, cut, stop).layer(
            name,
            modules if operations is block else [name],
            block=operations is block,
            passed=writer.passed(),
            held=held,
        )
        for name, operations in parts.items()
    )


@lru_cache(maxsize=16)
def transformer(shape: Shape, software: Software, *, tp: int, tied: bool) -> Model:
    """Return the model; `tp`: among how many ranks its blocks can be cut; `tied`: the head has no parameters.

    The same one for the same arguments, so that what follows from it is worked out once.
    """
    length = shape.sequence_length // software.context_ranks
    return Model(
        name=f"{shape.kind} {shape.layers} x {shape.hidden}",
        source="its hyper-parameters",
        module=Module(factory="none.whatever"),
        input=TokenInput(kind="tokens", vocabulary=shape.vocabulary, maximum_sequence_length=length),
        traced_precision=software.precision,
        traced_batch_sizes=(1,),
        traced_sequence_lengths=(length,),
        layers=layers_of(shape, software, 1, tied=tied),
        sliced_layers=layers_of(shape, software, tp, tied=tied) if tp > 1 else (),
    )
