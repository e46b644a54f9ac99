"""Transformer models from hyper-parameters, with the operations of the software that published runs were made with.

Memory traffic is counted by reading the kernels: of a tensor of n elements of v bytes, a norm reads and writes v*n each
way, and in its backward reads two tensors twice and writes one; a dropout reads v*n and writes v*n and a mask of n; a
softmax that is fused with scale and mask (Megatron-LM, fused_kernels) reads and writes v a score.
"""

from dataclasses import replace
from functools import lru_cache, partial

from analysis.literature.builder import OperationBuilder
from analysis.literature.kernels import KernelUse
from analysis.literature.mixture import ExpertRanks, latent_block, routed_maps, undivided, with_exchanges
from analysis.literature.operations import (
    FLOAT,
    INPUT,
    ZERO_BYTES,
    LayerOperations,
    Operation,
    Weight,
    total,
)
from analysis.literature.runs import Shape, Software
from gssim.workload import Buffer, Layer, Model, Module, Moment, Polynomial, TokenInput, with_quantities

BATCH_CALLS = 12
"""Operations by which Megatron-LM brings a micro-batch to the device: sizes and tokens, each broadcast; sizes back to
the host; tokens, labels, positions, and the masks of loss and attention (tensor_parallel/data.py, broadcast_data;
utils.py, get_ltor_masks_and_position_ids)."""
FLOAT8_BYTES = 1
EMBEDDING_CALLS = 4
"""Those of the embedding of tokens and positions: two look-ups, their sum, dropout."""
LOSS_CALLS = {"f": 29, "b": 13}
"""Operations of its loss, by pass: 20 and 7 of the cross-entropy of divided logits, with three sums over ranks
(tensor_parallel/cross_entropy.py); the mean over what the mask leaves, the mean over replicas for the log, and the
scales of micro-batches and of fp16 (pretrain_gpt.py, loss_func; schedules.py)."""


class TransformerBuilder(OperationBuilder):
    """Builds the operations of one model, whole or split over `ranks` tensor ranks."""

    def attention(self, reads: tuple[str, ...]) -> list[Operation]:
        """Return the operations from queries, keys and values to the context."""
        return [self.flash(reads)] if self.software.flash_attention else self.unfused(reads[0])

    def flash(self, reads: tuple[str, ...]) -> Operation:
        """Return flash attention, whose scores stay on the chip."""
        shape = self.shape
        forward, backward = self.attention_flop()
        merged, merged_back = self.ring() if self.software.context_ranks > 1 else (ZERO_BYTES, ZERO_BYTES)
        carried_width = shape.kv_width if self.software.rings_of_groups else shape.query_width
        return Operation(
            name="context",
            reads=reads,
            output=self.token_bytes(shape.query_width),
            flop=self.score_bytes(forward),
            backward_flop=self.score_bytes(backward),
            operands=self.token_bytes(2 * shape.query_width + 2 * shape.kv_width),
            streamed=merged,
            backward_streamed=merged_back,
            saves=(*reads, "context"),
            also_saved=self.token_bytes(shape.heads, value=FLOAT),
            kept=True,
            kernels=self.software.flash_calls,
            ring=self.token_bytes(2 * carried_width) if self.software.rings else None,
        )

    def ring(self) -> tuple[Polynomial, Polynomial]:
        """Return the memory traffic of ring attention, forward and backward, in addition to the attention itself.

        Each other rank's part costs as many FLOP as the own causal half (load-balanced), and in addition (torch 2.13,
        distributed/tensor/experimental/_context_parallel/_attention.py, `_templated_ring_attention` and its backward):
        its output is cast to float and merged; keys and values, of every head (torchtitan, `repeat_kv`), are joined and
        sent; in the backward, gradients of all three are accumulated in float, and those of keys and values are joined
        and sent on.

        Messages overlap with the attention to another part. Those of compiled blocks do not: where collectives are
        traced, each is followed by its wait (torch 2.6, distributed/_functional_collectives.py, `_maybe_wrap_tensor`),
        which the compiler does not move (_inductor/config.py, `reorder_for_compute_comm_overlap` = False). They are
        predicted by `plan.cp` instead (`Software.rings`).
        """
        v, others = self.value, self.software.context_ranks - 1
        # of the other parts, half are against all own queries, and half against the second half of them: the rest is
        # then copied (`_partial_update`), unless all is compiled into one kernel
        if self.software.compiled:
            merged = added = 2 * FLOAT + 0.75 * v
            joined = 0
        else:
            merged, added = (0.75 * (passes * FLOAT + v) + FLOAT for passes in (9, 2))
            joined = 4 * FLOAT
        handed, layer_input_gradient = 8 * v, 4 * FLOAT  # keys and values: joined, read to be sent, written on arrival
        forward, backward = merged + handed, 3 * added + joined + layer_input_gradient + handed
        width = self.shape.query_width * others
        return self.token_bytes(width, value=forward), self.token_bytes(width, value=backward)

    def unfused(self, reads: str) -> list[Operation]:
        """Return attention whose scores are written to memory.

        A head's products have so few FLOP per byte that the bytes of the scores are not hidden by them. Where softmax
        is several kernels, scores are read or written 6 times in the forward and 20 times in the backward, inferred
        from Sailor's layer profiles (OPT-350M and GPT-Neo on one V100, A100 or GH200: most are then within 7 %, those
        on an A100 of 40 GB within 15 %).
        """
        h, v = self.shape.hidden, self.value
        product = 2 * h / self.shape.heads
        fused, in_float = self.software.fused_softmax, self.software.float_softmax
        read, back, kernels = (2 * v, 3 * v, 1) if fused else (4 * v, 16 * v, 3)
        if in_float and not fused:  # scores are cast, scaled, masked, normalised and cast back; the mask is not counted
            read, back, kernels = 2 * v + 8 * FLOAT, 2 * v + 9 * FLOAT, 5
        operations = [
            Operation(
                name="scores",
                reads=(reads,),
                output=self.score_bytes(v),
                flop=self.score_bytes(product),
                streamed=self.score_bytes(v),
                backward_streamed=self.score_bytes(2 * v),
                saves=(reads,),
                kept=True,
                kernels=4,
            ),
            Operation(
                name="softmax",
                reads=("scores",),
                output=self.score_bytes(v),
                streamed=self.score_bytes(read),
                backward_streamed=self.score_bytes(back),
                saves=("softmax",),
                kernels=kernels,
            ),
        ]
        if self.software.dropout:
            operations.append(
                Operation(
                    name="dropout",
                    reads=("softmax",),
                    output=self.score_bytes(v),
                    streamed=self.score_bytes(2 * v + 1),
                    backward_streamed=self.score_bytes(2 * v + 1),
                    also_saved=self.score_bytes(1),
                )
            )
        weights = operations[-1].name
        context = Operation(
            name="context",
            reads=(weights, reads),
            output=self.token_bytes(h),
            flop=self.score_bytes(product),
            streamed=total([self.token_bytes(2 * h), self.score_bytes(v)]),
            backward_streamed=total([self.token_bytes(2 * h), self.score_bytes(2 * v)]),
            saves=(weights, reads),
            kept=True,
            kernels=4,
        )
        return [*operations, context]

    # Blocks ----------------------------------------------------------------------------------------------------------

    def block(self, *, routed: bool = False) -> tuple[Operation, ...]:
        """Return the operations of a block; `routed`: its perceptron is a mixture of experts."""
        if self.shape.latent is not None:
            return self.graphed(latent_block(self, routed=routed))
        dense = self.gpt_block() if self.shape.kind == "gpt" else self.llama_block()
        if not routed:
            return self.graphed(dense)
        place = [operation.name for operation in dense].index("map_norm")
        maps = routed_maps(self)
        return self.graphed((*dense[: place + 1], *maps, self.add("mapped", (maps[-1].name, "attended"), last=True)))

    def graphed(self, block: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """Return a block whose attention, up to the sum behind it, is one launch each way if it is a CUDA graph."""
        if not self.software.graphs_attention:
            return block
        place = [operation.name for operation in block].index("attended")
        first, *others = (replace(each, kernels=0, backward_kernels=0) for each in block[: place + 1])
        return (replace(first, kernels=1, backward_kernels=1), *others, *block[place + 1 :])

    def gpt_block(self) -> tuple[Operation, ...]:
        """Return the operations of a GPT block with pre-normalisation."""
        h, ffn = self.shape.hidden, self.shape.ffn
        return (
            *([self.input_gathering()] if self.software.partitioned else []),
            self.norm("attention_norm", INPUT, *(["gathered"] if self.software.partitioned else [])),
            self.linear("qkv", "attention_norm", h, h + 2 * self.shape.kv_width, by_rows=False),
            *self.turned(),
            *self.attention(("turned" if self._turns else "qkv",)),
            self.linear("out", "context", h, h, by_rows=True),
            self.add("attended", ("out", INPUT)),
            self.norm("map_norm", "attended"),
            self.linear("up", "map_norm", h, (1 + self.shape.gated) * ffn, by_rows=False),
            Operation(
                name="activation",
                reads=("up",),
                output=self.token_bytes(ffn),
                streamed=self.token_bytes((2 + self.shape.gated) * ffn),
                backward_streamed=self.token_bytes((3 + 2 * self.shape.gated) * ffn),
                saves=("activation",) if self.shape.rectified else ("up",),
            ),
            self.linear("down", "activation", ffn, h, by_rows=True),
            self.add("mapped", ("down", "attended"), last=True),
        )

    @property
    def _turns(self) -> bool:
        return self.software.rotary_calls > 0 or self.software.checks_norms_over is not None

    def turned(self) -> list[Operation]:
        """Return the operations of a `gpt` on queries and keys before the attention, if there are any."""
        if not self._turns:
            return []
        ranks, size = self.software.checks_norms_over, self.token_bytes(self.shape.hidden + self.shape.kv_width)
        norms, compared = (2 * 2, 2 * 2 + 4 * ranks) if ranks is not None else (0, 0)
        rotary = self.software.rotary_calls
        return [
            Operation(
                name="turned",
                reads=("qkv",),
                output=self.token_bytes(self.shape.hidden + 2 * self.shape.kv_width),
                streamed=total([size], 2),
                backward_streamed=total([size], 5 if norms else 2),
                saves=("qkv",) if norms else (),
                # two norms of two operations; stacked, gathered and compared one by one, with the host waiting
                kernels=rotary + norms + compared,
                backward_kernels=2 * (rotary + norms),
            )
        ]

    def further_block(self, *, routed: bool) -> tuple[Operation, ...]:
        """Return a block that predicts one more token, from what the one before returns and the next one's embedding.

        Both are normalised and joined, and a product makes them as wide as one; the output has a norm of its own
        (Megatron-LM, core/transformer/multi_token_prediction.py).
        """
        h, size = self.shape.hidden, self.unsplit_bytes
        embedded = self.embedding()[0]
        block = [
            replace(each, reads=tuple("projected" if name == INPUT else name for name in each.reads))
            for each in self.block(routed=routed)
        ]
        # the product is cut by columns, and gathered
        projected = replace(self.linear("projected", "joined_inputs", 2 * h, h, by_rows=False), output=size(h))
        renamed = {"attention_norm": "projected", "attended": "projected"}
        block = [
            replace(each, saves=tuple(renamed[each.name] if name == INPUT else name for name in each.saves))
            for each in block
        ]
        return (
            replace(embedded, weights=embedded.weights[:1] if self.shape.embeds_again else ()),
            self.norm("embedded_norm", "embedding"),
            self.norm("hidden_norm", INPUT),
            Operation(
                name="joined_inputs",
                reads=("embedded_norm", "hidden_norm"),
                output=size(2 * h),
                streamed=size(4 * h),
                backward_streamed=size(4 * h),
            ),
            projected,
            *block,
            self.norm("further_norm", "mapped"),
        )

    def decoder_block(self, encoder: "TransformerBuilder") -> tuple[Operation, ...]:
        """Return the operations of a block that attends to its own sequence, and to the output of an encoder."""
        h, own = self.shape.hidden, self.gpt_block()
        place = [operation.name for operation in own].index("map_norm")
        keys = encoder.linear("cross_keys", "cross_norm", h, 2 * h, by_rows=False)
        behind = [
            replace(each, reads=tuple("crossed" if name == "attended" else name for name in each.reads))
            for each in own[place:]
        ]
        behind[0] = replace(behind[0], saves=("crossed",))
        return (
            *own[:place],
            self.norm("cross_norm", "attended"),
            self.linear("cross_query", "cross_norm", h, h, by_rows=False),
            replace(keys, saves=()),  # the encoder's output, which is there anyway
            *self.cross_attention(encoder.shape.sequence_length),
            self.linear("cross_out", "cross_context", h, h, by_rows=True),
            self.add("crossed", ("cross_out", "attended")),
            *behind,
        )

    def cross_attention(self, others: int) -> list[Operation]:
        """Return the operations from queries to the context of `others` positions of another sequence, unmasked."""
        h, v, heads = self.shape.hidden, self.value, self.shape.heads
        flop = self.token_bytes(2 * h * others, value=1)
        weights = self.token_bytes(heads * others)
        masks = self.token_bytes(heads * others, value=1)
        reads = ("cross_query", "cross_keys")
        if self.software.flash_attention:
            return [
                Operation(
                    name="cross_context",
                    reads=reads,
                    output=self.token_bytes(h),
                    flop=total([flop], 2),
                    backward_flop=total([flop], 5),
                    saves=(*reads, "cross_context"),
                    also_saved=self.token_bytes(heads, value=FLOAT),
                    kernels=self.software.flash_calls,
                )
            ]
        passes = 2 if self.software.fused_softmax else 4
        return [
            Operation(
                name="cross_scores",
                reads=reads,
                output=weights,
                flop=flop,
                streamed=weights,
                backward_streamed=total([weights], 2),
                saves=reads,
                kernels=4,
            ),
            Operation(
                name="cross_softmax",
                reads=("cross_scores",),
                output=weights,
                streamed=total([weights], passes),
                backward_streamed=total([weights], passes + 1),
                saves=("cross_softmax",),
            ),
            Operation(
                name="cross_dropout",
                reads=("cross_softmax",),
                output=weights,
                streamed=total([weights], 2 + 1 / v),
                backward_streamed=total([weights], 2 + 1 / v),
                also_saved=masks,
            ),
            Operation(
                name="cross_context",
                reads=("cross_dropout", "cross_keys"),
                output=self.token_bytes(h),
                flop=flop,
                streamed=weights,
                backward_streamed=total([weights], 2),
                saves=("cross_dropout", "cross_keys"),
                kernels=4,
            ),
        ]

    def llama_block(self) -> tuple[Operation, ...]:
        """Return the operations of a Llama block, with the selective recomputation of torchtitan.

        It keeps the output of every other linear layer (`_get_custom_policy`). The last one's output is kept though no
        backward needs it; a compiler saves only tensors between forward and backward (torch 2.13,
        _functorch/partitioners.py).
        """
        h, ffn, kv, queries = self.shape.hidden, self.shape.ffn, self.shape.kv_width, self.shape.query_width
        eager = not self.software.compiled
        rotated = queries + kv
        # eager: casts to float and back, and a product of complex numbers
        passes = 2 + 4 * FLOAT / self.value if eager else 2
        before, behind = (self.gathered_input(f"{place}_gathered", f"{place}_norm") for place in ("attention", "map"))
        attended, mapped = (
            each[0].name if each else f"{place}_norm" for place, each in (("attention", before), ("map", behind))
        )
        fused = self.software.fused_projections
        values, gates = ("qkv", "gate_up") if fused else ("value", "gate")
        values = values if self.software.copies_keys else "values"
        projections = (
            [self.linear("qkv", attended, h, queries + 2 * kv, by_rows=False)]
            if fused
            else [
                self.linear("query", attended, h, queries, by_rows=False),
                self.linear("key", attended, h, kv, by_rows=False, kept=False),
                self.linear("value", attended, h, kv, by_rows=False),
            ]
        )
        maps = (
            [self.linear("gate_up", mapped, h, 2 * ffn, by_rows=False)]
            if fused
            else [
                self.linear("gate", mapped, h, ffn, by_rows=False),
                self.linear("up", mapped, h, ffn, by_rows=False, kept=False),
            ]
        )
        return (
            self.norm("attention_norm", INPUT),
            *before,
            *projections,
            *([] if self.software.copies_keys else [self.values()]),
            Operation(
                name="rotated",
                reads=("qkv",) if fused else ("query", "key"),
                output=self.token_bytes(rotated),
                # of queries and of keys
                streamed=self.streamed(self.token_bytes(passes * rotated), calls=2),
                backward_streamed=self.streamed(self.token_bytes(passes * rotated), calls=2),
                kernels=6 if eager else 1,
            ),
            *self.attention(("rotated", values)),
            self.linear("out", "context", queries, h, by_rows=True, kept=False),
            self.add("attended", ("out", INPUT)),
            self.norm("map_norm", "attended"),
            *behind,
            *maps,
            Operation(
                name="swiglu",
                reads=(gates,) if fused else ("gate", "up"),
                output=self.token_bytes(ffn),
                streamed=self.streamed(self.token_bytes((5 if eager else 3) * ffn)),
                backward_streamed=self.streamed(self.token_bytes((9 if eager else 5) * ffn)),
                saves=(gates,) if fused else ("gate", "up"),
                kernels=2 if eager else 1,
            ),
            self.linear("down", "swiglu", ffn, h, by_rows=True, kept=eager),
            self.add("mapped", ("down", "attended"), last=True),
        )

    def values(self) -> Operation:
        """Return the values as a tensor of their own, taken from the product that has queries and keys too."""
        kv = self.token_bytes(self.shape.kv_width)
        moved = self.streamed(self.token_bytes(2 * self.shape.kv_width))
        return Operation(name="values", reads=("qkv",), output=kv, streamed=moved, backward_streamed=moved)

    def embedding(self) -> tuple[Operation, ...]:
        """Return the embedding of tokens, and of positions where they are learned."""
        h, shape = self.shape.hidden, self.shape
        weights = [Weight(name="{}.weight", shape=(shape.vocabulary, h), sharded_dim=0)]
        if shape.kind == "gpt":
            weights.append(Weight(name="{}.positions", shape=(shape.sequence_length, h)))
        megatron = self.software.in_place_loss
        return (
            Operation(
                name="embedding",
                reads=(),
                output=self.block_output_bytes(),
                streamed=self.unsplit_bytes((2.0 if shape.kind == "llama" else 6.0) * h),
                backward_streamed=self.unsplit_bytes(3.0 * h),
                also_saved=self.token_bytes(1, shared=False, value=8),
                weights=tuple(weights),
                in_wide_format=True,
                kernels=BATCH_CALLS + EMBEDDING_CALLS if megatron else 1,
                backward_kernels=EMBEDDING_CALLS if megatron else None,
                reduced=self.token_bytes(h, shared=False),
            ),
        )

    def mean_loss(self) -> tuple[Operation, ...]:
        """Return a loss that is the mean of the last block's output."""
        read = self.unsplit_bytes(self.shape.hidden)
        return (Operation(name="loss", output=self.split.size(one=FLOAT, shared=False), backward_streamed=read),)

    def head(self, *, tied: bool) -> tuple[Operation, ...]:
        """Return the last norm, the logits and the loss; `tied`: the logits use the embedding's weight."""
        h, vocabulary = self.shape.hidden, self.shape.vocabulary
        if self.shape.predicted is not None:
            vocabulary = round(vocabulary * self.shape.predicted / self.shape.sequence_length)
        logits = self.linear("logits", "norm", h, vocabulary, by_rows=False, wide=True)
        logits = replace(logits, weights=() if tied else logits.weights[:1])
        if self.software.loss_gradient_in_place:
            logits = replace(logits, saves=(*logits.saves, "logits"))
        if self.software.dummy_gradients:
            dummy = self.split.size(one=self.value * h * vocabulary)
            logits = replace(logits, backward_scratch=total([logits.backward_scratch, dummy]))
        operations = (self.norm("norm", INPUT), logits, *self.loss(vocabulary))
        further = [
            replace(
                each,
                name=f"further{number}_{each.name}",
                reads=tuple(name if name == INPUT else f"further{number}_{name}" for name in each.reads),
                saves=tuple(name if name == INPUT else f"further{number}_{name}" for name in each.saves),
                weights=(),
            )
            for number in range(self.shape.further)
            for each in operations[1:]
        ]
        further = [
            replace(
                each,
                reads=tuple(INPUT if name.endswith("_norm") else name for name in each.reads),
                saves=tuple(INPUT if name.endswith("_norm") else name for name in each.saves),
            )
            for each in further
        ]
        return (*further, *operations)

    def loss(self, vocabulary: int) -> tuple[Operation, ...]:
        """Return the operations from the logits to the loss, for a vocabulary of this size.

        A fused loss reads the logits twice, for their maxima and sums, and writes their gradient at once; some software
        does so over the logits themselves, which are then saved for their own layer's backward. An in-place loss
        overwrites the logits in float by their softmax, and that by its gradient.
        """
        if self.software.fused_loss:
            fused = Operation(
                name="loss",
                reads=("logits",),
                output=self.split.size(one=FLOAT, shared=False),
                streamed=self.streamed(self.token_bytes(2 * vocabulary), "ce_fusion"),
                backward_streamed=self.streamed(self.token_bytes(2 * vocabulary), "ce_fusion"),
                saves=() if self.software.loss_gradient_in_place else ("logits",),
                passes_gradient=self.software.loss_gradient_in_place,
                also_saved=self.token_bytes(1, shared=False, value=2 * FLOAT),
            )
            return (fused,)
        if self.software.in_place_loss:
            in_place = Operation(
                name="loss",
                reads=("float_logits",),
                output=self.split.size(one=FLOAT, shared=False),
                streamed=self.token_bytes(2 * vocabulary, value=FLOAT),
                backward_streamed=self.token_bytes(4 * vocabulary, value=FLOAT),
                saves=("float_logits",),
                passes_gradient=True,
                kernels=LOSS_CALLS["f"],
                backward_kernels=LOSS_CALLS["b"],
            )
            if self.software.compiled_loss:
                size = self.token_bytes(vocabulary, value=FLOAT)
                reads = ("float_logits", "logits")  # the caller holds these
                second = Operation(name="exponentials", reads=reads, output=size, saves=("exponentials",))
                in_place = replace(
                    in_place, reads=("float_logits", "exponentials"), saves=(), kernels=1, backward_kernels=2
                )
                return (replace(self._cast(vocabulary), kernels=0), second, in_place)
            return (self._cast(vocabulary, saves=("float_logits",)), in_place)
        return (self._cast(vocabulary), *self._softmax_and_loss(vocabulary))

    def _cast(self, vocabulary: int, saves: tuple[str, ...] = ()) -> Operation:
        """Return the cast of the logits to float."""
        return Operation(
            name="float_logits",
            reads=("logits",),
            output=self.token_bytes(vocabulary, value=FLOAT),
            streamed=self.token_bytes(vocabulary, value=self.value + FLOAT),
            backward_streamed=self.token_bytes(vocabulary, value=self.value + FLOAT),
            saves=saves,
        )

    def _softmax_and_loss(self, vocabulary: int) -> tuple[Operation, ...]:
        """Return torch's loss, in which each step from logits to loss allocates a new tensor."""
        size = self.token_bytes(vocabulary, value=FLOAT)
        parallel = self.software.parallel_loss and self.split.ranks > 1
        shifted = Operation(name="shifted", reads=("float_logits",), output=size)
        softmax = Operation(
            name="log_softmax",
            reads=("shifted",) if parallel else ("float_logits",),
            output=size,
            streamed=self.token_bytes(2 * vocabulary, value=FLOAT),
            backward_streamed=self.token_bytes(3 * vocabulary, value=FLOAT),
            saves=("log_softmax",),
        )
        loss = Operation(
            name="loss",
            # `loss_parallel` has four tensors in float at once: the saved one, zeros, their sum and its product
            reads=("log_softmax", "float_logits") if parallel else ("log_softmax",),
            output=self.split.size(one=FLOAT, shared=False),
            backward_streamed=size,
        )
        return (shifted, softmax, loss) if parallel else (softmax, loss)


Part = tuple[str, TransformerBuilder, tuple[Operation, ...], list[str]]


def _parts(builder: TransformerBuilder, *, tied: bool) -> list[Part]:
    """Return name, builder, operations and modules of each layer, or of equal ones in a row."""
    shape, last, blocks = builder.shape, builder, builder.shape.layers
    if shape.decoder is not None:
        inner = replace(shape, decoder=None, sequence_length=shape.decoder.sequence_length)
        last = TransformerBuilder(inner, builder.software, builder.split.ranks, builder.use, (1, inner.sequence_length))
    elif shape.windows is not None:
        part = shape.windows.shape
        windows = (shape.windows.count, part.sequence_length)
        last = TransformerBuilder(part, builder.software, builder.split.ranks, builder.use, windows)
        blocks -= part.layers
    elif shape.experts is not None:
        blocks = shape.experts.dense_blocks
    parts: list[Part] = [("embedding", builder, builder.embedding(), ["embedding"])]
    if blocks:
        parts.append(("blocks.0", builder, builder.block(), [f"blocks.{number}" for number in range(blocks)]))
    if shape.decoder is not None:
        (tokens,) = last.embedding()  # of the same weights
        parts.append(("decoder_embedding", last, (replace(tokens, weights=()),), ["decoder_embedding"]))
        inside = [f"decoder.{number}" for number in range(shape.decoder.layers)]
        parts.append(("decoder.0", last, last.decoder_block(builder), inside))
    elif shape.windows is not None:
        inside = [f"windows.{number}" for number in range(shape.layers - blocks)]
        parts.append(("windows.0", last, last.block(), inside))
    elif shape.experts is not None:
        sparse = [f"blocks.{number}" for number in range(blocks, shape.layers)]
        parts.append((f"blocks.{blocks}.0", builder, builder.block(routed=True), sparse))
    if shape.further:
        more = [f"further.{number}" for number in range(shape.further)]
        parts.append(("further.0", builder, builder.further_block(routed=shape.experts is not None), more))
    head = last.mean_loss() if shape.windows is not None else last.head(tied=tied)
    return [*parts, ("head", last, head, ["head"])]


def layers_of(
    shape: Shape,
    software: Software,
    ranks: int,
    *,
    tied: bool,
    across: bool = False,
    use: KernelUse | None = None,
    divided: ExpertRanks | None = None,
) -> tuple[Layer, ...]:
    """Return the layers of a model (embedding, blocks, head with the loss), split over `ranks` tensor ranks.

    `divided`: how ranks divide experts; then layers are those of one rank, whose units are experts.
    """
    of = divided or ExpertRanks()
    builder = TransformerBuilder(
        shape,
        software,
        ranks,
        use,
        alone=divided is not None,
        expert_tensor_ranks=of.each,
        expert_ranks=of.ranks,
    )
    # index, in the backward of the layer before, at which the gradient of a block's input is freed
    block = builder.block()
    freed_at = next(len(block) - 1 - i for i, operation in enumerate(block) if operation.name == "map_norm")
    parts = _parts(builder, tied=tied)
    in_float8 = software.gathers_float8 and software.float8_maps and software.pipelined_maps
    gathered = FLOAT8_BYTES / builder.value if in_float8 else 1.0
    layers = [
        LayerOperations(
            operations, of.split, software.early_stop, software.gathers_alone, software.recomputes_attention, gathered
        ).layer(
            name,
            names,
            block=name.endswith(".0"),
            input_bytes=of.block_output_bytes(),
            freed_at=freed_at,
        )
        for name, of, operations, names in parts
    ]
    for place, (_, _, operations, _) in enumerate(parts):
        if any(operation.name == "router" for operation in operations):
            layers[place] = with_exchanges(layers[place], operations, builder)
    if across:
        layers[-1] = _with_tied_gradient(builder, layers[-1])
    return tuple(layers)


def _with_tied_gradient(builder: TransformerBuilder, head: Layer) -> Layer:
    """Return the head where it may be on another stage than the embedding, whose weight it uses.

    The gradient of that use is freed by the embedding's backward: so `gssim.scenario.stages` finds tied parameters.
    """
    shape = builder.shape
    size = builder.split.size(one=builder.value * shape.vocabulary * shape.hidden)
    places = [operation.name for operation in builder.head(tied=True)]
    born = Moment("b", len(places) - 1 - places.index("logits"))
    gradient = Buffer(born, Moment("b", 0, -(shape.layers + 1)), "temporaries", size)
    return replace(head, buffers=(*head.buffers, gradient))


def on_parts(layer: Layer, heads: int) -> Layer:
    """Return a layer of whole sequences as a function of a rank's positions p of each, whose attention is to all s.

    `heads`: the units of a block, see `gssim.workload.model`.
    """

    def of_parts(quantity: Polynomial) -> Polynomial:
        whole = tuple(term for term in quantity.terms if not term[2])
        return Polynomial(whole, part_terms=tuple((c, i, j - 1) for c, i, j in quantity.terms if j))

    return replace(with_quantities(layer, of_parts), units=heads if layer.block else None)


@lru_cache(maxsize=16)
def transformer(
    shape: Shape,
    software: Software,
    *,
    tp: int,
    tied: bool,
    across: bool = False,
    use: KernelUse | None = None,
    divided: ExpertRanks | None = None,
) -> Model:
    """Return the model; `tp`: number of tensor ranks that its layers can be split over; `tied`: see `head`.

    `across`: whether embedding and head, if tied, may be on different stages of a pipeline, of which each has a copy.
    `use`: what measured rates of kernels depend on, where the software names a machine that has them. `divided`: how
    ranks divide the experts of a model that has these.

    Equal arguments return the same object, so that results derived from it are cached.
    """
    of_ranks = partial(layers_of, shape, tied=tied, across=across, use=use)
    in_rings: tuple[Layer, ...] = ()
    if software.rings:
        software = replace(software, context_ranks=1)
        in_rings = of_ranks(software, 1)
        software = replace(software, rings=False)
    length = shape.sequence_length // software.context_ranks
    layers = of_ranks(software, 1)
    own = of_ranks(software, tp, divided=divided) if divided is not None else ()
    sliced: tuple[Layer, ...] = ()
    if tp > 1:
        sliced = tuple(undivided(layer, length) for layer in own) if divided is not None else of_ranks(software, tp)
    return Model(
        name=f"{shape.kind} {shape.layers} x {shape.hidden}",
        source="published hyper-parameters, by analysis/literature/transformer.py",
        module=Module(factory="published.without_code"),
        input=TokenInput(kind="tokens", vocabulary=shape.vocabulary, maximum_sequence_length=length),
        traced_precision=software.precision,
        traced_batch_sizes=(1,),
        traced_sequence_lengths=(length,),
        exact_sequence=divided is None,
        layers=tuple(undivided(layer, length) for layer in layers),
        expert_layers=own if divided is not None and divided.ranks > 1 else (),
        expert_tensor_ranks=tp if divided is not None and divided.ranks > 1 else 1,
        sliced_layers=sliced,
        context_layers=tuple(on_parts(layer, shape.heads) for layer in in_rings),
    )
