"""Operations that blocks of all kinds are made of: norms, linear maps, sums, and the bytes that they move.

See the module `transformer` for how their memory traffic is counted.
"""

from analysis.literature.kernels import KernelUse, kernels_of
from analysis.literature.operations import FLOAT, ZERO_BYTES, Operation, TensorSplit, Weight, total
from analysis.literature.runs import Shape, Software
from gssim.units import PRECISION_BYTES
from gssim.workload import Polynomial

FLOAT8_CALLS = 3
"""Operations that cast what a product reads to float8, by the scale of its own largest value: that, the scale and the
cast (Transformer Engine, pytorch/csrc/quantizer.cpp, Float8CurrentScalingQuantizer); the weight's stays cast."""


class OperationBuilder:
    """Builds operations that blocks are made of, for one model, whole or split over `ranks` tensor ranks."""

    def __init__(
        self,
        shape: Shape,
        software: Software,
        ranks: int,
        use: KernelUse | None = None,
        windows: tuple[int, int] | None = None,
        *,
        alone: bool = False,
        expert_tensor_ranks: int | None = None,
        expert_ranks: int = 1,
    ) -> None:
        self.shape, self.software, self.split = shape, software, TensorSplit(ranks, windows, alone)
        self.expert_tensor_ranks = expert_tensor_ranks or ranks
        self.expert_ranks = expert_ranks
        self.use = use
        self.kernels = kernels_of(use.machine) if use is not None else None
        self.value = PRECISION_BYTES[software.precision]

    def token_bytes(self, width: float, *, shared: bool = True, value: float | None = None) -> Polynomial:
        """Return the bytes of a tensor of `width` elements per token; `shared`: split over tensor ranks."""
        return self.split.size(bs=width * (self.value if value is None else value), shared=shared)

    def unsplit_bytes(self, width: float, *, value: float | None = None) -> Polynomial:
        """Return the bytes of a tensor outside tensor-parallel layers, split only by sequence parallelism."""
        return self.token_bytes(width, shared=self.software.sequence_parallel, value=value)

    def streamed(self, size: Polynomial, kind: str = "default", *, calls: int = 1) -> Polynomial:
        """Return the bytes that take as long at the device's own rate as kernels of a kind take to stream `size`.

        `kind`: of the machine's measured kernels, where the software names one; they also take a time for each call.
        """
        measured = self.kernels.streaming.get(kind) if self.kernels is not None else None
        if measured is None or self.use is None or size == ZERO_BYTES:
            return size
        rate, call_s = measured
        device = self.use.device_bytes_per_s
        return total([total([size], device / rate), self.split.size(one=calls * call_s * device, shared=False)])

    def block_output_bytes(self) -> Polynomial:
        """Return the bytes of a block's output."""
        shared = self.software.sequence_parallel or self.software.partitioned
        return self.token_bytes(self.shape.hidden, shared=shared)

    def score_bytes(self, per_score: float) -> Polynomial:
        """Return the bytes of a tensor of attention scores, `per_score` bytes for each score of a head."""
        return self.split.size(bss=per_score * self.shape.heads * self.software.context_ranks)

    def input_gathering(self) -> Operation:
        """Return the all-gather of a partitioned block input: a rank receives the other ranks' parts."""
        parts = self.split.ranks
        width = self.shape.hidden * (parts - 1) / parts
        return Operation(name="gathered", output=self.token_bytes(width, shared=False))

    def is_gathered(self, name: str) -> bool:
        """Return whether an operation of this name is a `gathered_input`."""
        return name.endswith("_gathered") and self.split.ranks > 1

    def gathered_input(self, name: str, reads: str) -> list[Operation]:
        """Return the all-gather of a norm's output for all layers that read it, where it is a tensor of its own.

        DTensor passes it to the layers, which save it for their backward (torchtitan, parallelize_llama:
        PrepareModuleInput); Megatron's layers gather their input in each pass, and save only their shard of it.
        """
        if not self.software.gathers_inputs or self.split.ranks == 1:
            return []
        whole = self.token_bytes(self.shape.hidden, shared=False)
        kept = self.unsplit_bytes(self.shape.hidden) if self.software.pipelined_maps else whole
        return [Operation(name=name, reads=(reads,), output=kept, backward_reduced=whole)]

    def norm(self, name: str, *reads: str, width: int | None = None) -> Operation:
        """Return a layer norm (GPT) or RMS norm (Llama) of the outputs that it reads; `width`: if not the model's."""
        h, v = width or self.shape.hidden, self.value
        names = ("weight", "bias") if self.shape.kind == "gpt" else ("weight",)
        weights = tuple(Weight(name=f"{{}}.{name}.{each}", shape=(h,)) for each in names)
        # eager RMS norms are five operations, in float (square, mean, product, cast, product)
        passes = 2.0 if self.shape.kind == "gpt" or self.software.compiled else 2.0 + 4 * FLOAT / v
        return Operation(
            name=name,
            reads=reads,
            output=self.unsplit_bytes(h),
            streamed=self.streamed(self.unsplit_bytes(h * passes)),
            backward_streamed=self.streamed(self.unsplit_bytes(h * (5 if passes == 2 else 2 * passes))),
            saves=reads,
            also_saved=self.unsplit_bytes(2 if self.shape.kind == "gpt" else 1, value=FLOAT),
            weights=weights,
            kernels=2 if passes == 2 else 5,
        )

    def product_slowdowns(self, inputs: int, outputs: int, *, by_rows: bool) -> tuple[float, float, float]:
        """Return the times of a linear layer's three products over those at the device's own rate.

        The products are, in this order, the forward, the gradient of the input and the gradient of the weight. Their
        shapes are those of a tensor rank with whole sequences, also where norms have parts of them.
        """
        if self.use is None or self.kernels is None:
            return 1.0, 1.0, 1.0
        tokens = self.use.micro_batch * self.shape.sequence_length // self.software.context_ranks
        inputs, outputs = (inputs // self.split.ranks, outputs) if by_rows else (inputs, outputs // self.split.ranks)
        rates = (
            self.kernels.product_flop_per_s("TN", tokens, inputs, outputs),
            self.kernels.product_flop_per_s("NN", tokens, outputs, inputs),
            self.kernels.product_flop_per_s("NT", outputs, tokens, inputs),
        )
        first, second, third = (self.use.device_flop_per_s / rate if rate else 1.0 for rate in rates)
        return first, second, third

    def attention_flop(self) -> tuple[float, float]:
        """Return the FLOP of flash attention for each score of a head, forward and backward, at the device's own rate.

        Forward 2 products of 2 FLOP, half of it masked; backward 5 of them (Dao 2023, FlashAttention-2, section 3.1).
        Measured rates count the masked half too.
        """
        shape, use = self.shape, self.use
        forward = 4 * shape.query_width / 2 / shape.heads / self.software.attention_ratio
        flops = [forward, 2.5 * forward]
        if use is not None and self.kernels is not None:
            heads, kv_heads = shape.heads // self.split.ranks, max(1, shape.kv_heads // self.split.ranks)
            for place, (phase, products) in enumerate((("f", 4.0), ("b", 10.0))):
                rate = self.kernels.attention_flop_per_s(
                    "f" if phase == "f" else "b", heads, kv_heads, shape.sequence_length
                )
                if rate:
                    flops[place] = products * shape.hidden / shape.heads * use.device_flop_per_s / rate
        return flops[0], flops[1]

    def linear(
        self,
        name: str,
        reads: str,
        inputs: int,
        outputs: int,
        *,
        by_rows: bool,
        kept: bool = True,
        wide: bool = False,
    ) -> Operation:
        """Return a linear layer, split by columns (outputs) or by rows (inputs: tensor ranks then all-reduce).

        `wide`: its product is in 16 bits even if those of blocks are in float8.
        """
        size = self.token_bytes
        weights = [Weight(name="{}." + name + ".weight", shape=(outputs, inputs), sharded_dim=1 if by_rows else 0)]
        if self.shape.kind == "gpt" and self.shape.biased:
            weights.append(Weight(name="{}." + name + ".bias", shape=(outputs,), sharded_dim=None if by_rows else 0))
        slowdowns = self.product_slowdowns(inputs, outputs, by_rows=by_rows)
        maps, cast = (1, 0) if self.software.compiled else (3, FLOAT8_CALLS * (self.software.float8_maps and not wide))
        output = size(outputs, shared=not by_rows)
        # in a ring, the all-reduce is a reduce-scatter and an all-gather, which sequence parallelism separates
        reduced = size(outputs if by_rows else inputs, shared=False)
        return Operation(
            name=name,
            reads=(reads,),
            output=self.unsplit_bytes(outputs) if by_rows else output,
            flop=self.split.size(bs=2 * inputs * outputs * slowdowns[0]),
            backward_flop=self.split.size(bs=2 * inputs * outputs * (slowdowns[1] + slowdowns[2])),
            operands=self.split.size(one=self.value * inputs * outputs, bs=self.value * (inputs + outputs)),
            backward_streamed=size(outputs if self.shape.kind == "gpt" and not by_rows else 0),
            saves=(reads,),
            weights=tuple(weights),
            kept=kept,
            kernels=maps + cast,
            backward_kernels=2 * maps + cast,
            # the gathered input, of which only this rank's part is saved
            backward_scratch=reduced if self.software.gathers_alone and not by_rows else ZERO_BYTES,
            reduced=reduced if by_rows else None,
            backward_reduced=None if by_rows or self.is_gathered(reads) else reduced,
            in_wide_format=wide,
        )

    def whole_linear(self, name: str, reads: str, inputs: int, outputs: int) -> Operation:
        """Return a linear layer without bias, which each tensor rank holds whole and runs on its part of the sequence.

        Without sequence parallelism all ranks compute the same.
        """
        slowdowns = self.product_slowdowns(inputs * self.split.ranks, outputs, by_rows=True)
        flop = self.unsplit_bytes(2 * inputs * outputs, value=1)
        matrix = self.split.size(one=self.value * inputs * outputs, shared=False)
        return Operation(
            name=name,
            reads=(reads,),
            output=self.unsplit_bytes(outputs),
            flop=total([flop], slowdowns[0]),
            backward_flop=total([flop], slowdowns[1] + slowdowns[2]),
            operands=total([matrix, self.unsplit_bytes(inputs + outputs)]),
            saves=(reads,),
            weights=(Weight(name="{}." + name + ".weight", shape=(outputs, inputs)),),
            kept=True,
            kernels=1 if self.software.compiled else 3,
        )

    def add(self, name: str, reads: tuple[str, str], *, last: bool = False) -> Operation:
        """Return the residual addition, preceded by bias and dropout where the model has them."""
        h, v = self.shape.hidden, self.value
        dropped = self.shape.kind == "gpt" and self.software.dropout
        passes = 0.0 if self.software.compiled and not self.software.separate_adds else 3.0
        return Operation(
            name=name,
            reads=reads,
            output=self.block_output_bytes() if last else self.unsplit_bytes(h),
            streamed=self.streamed(self.unsplit_bytes(h * (passes + dropped / v))),
            backward_streamed=self.streamed(self.unsplit_bytes(h * (passes + (2 + 1 / v) * dropped))),
            also_saved=self.unsplit_bytes(h, value=1) if dropped else ZERO_BYTES,
            passes_gradient=not dropped,
            kernels=3 if self.shape.kind == "gpt" else 1,
        )

    # Attention -------------------------------------------------------------------------------------------------------
