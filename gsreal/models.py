"""Bundled models: GPT, BERT, mixtures of experts and residual networks small enough to train for real on a CPU core.

Any other `nn.Module` works as well: `gsreal trace` takes a dotted path to a factory, or a Hugging Face config. A model
maps inputs to logits; the loss is cross-entropy over the last dimension. A model that can be split into pipeline stages
also has a method `keep_layers`.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsreal.methods.experts import run_experts


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.head_width, self.causal = heads, width // heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attended values, shaped as `x` (batch, sequence, width); `mask` is added to the scores."""
        batch, sequence, _ = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, self.heads * self.head_width))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a residual; layer norm before (GPT) or after (BERT)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm_first = causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.perceptron_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def _perceptron(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the block's output, shaped as `x` (batch, sequence, width); `mask` is added to attention's scores."""
        if self.norm_first:
            x = x + self.attention(self.attention_norm(x), mask)
            return x + self._perceptron(self.perceptron_norm(x))
        x = self.attention_norm(x + self.attention(x, mask))
        return self.perceptron_norm(x + self._perceptron(x))


class Experts(nn.Module):
    """Routed experts: perceptrons with gated SiLU (Shazeer 2020), whose matrices lie in two tensors."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.act_fn = nn.SiLU()
        for matrices in self.parameters():
            nn.init.normal_(matrices, std=0.02)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, shaped as `x` (tokens, width)."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return run_experts(x, index, weights, experts=len(gate_up), gate_up=gate_up, down=down, activation=self.act_fn)


class Mixture(nn.Module):
    """A router with its experts, of which each token takes the `chosen` most probable, and shared experts.

    The weights of a token's experts are their probabilities, scaled to a sum of 1 (as Mixtral does); shared experts
    (Dai et al. 2024, DeepSeekMoE, arXiv:2401.06066), which all tokens take, are one perceptron as wide as all of them
    together. No token is dropped.
    """

    def __init__(self, width: int, hidden: int, *, experts: int, chosen: int, shared: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        self.shared_up = nn.Linear(width, 2 * shared * hidden, bias=False) if shared else None
        self.shared_down = nn.Linear(shared * hidden, width, bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' weighted outputs, shaped as `x` (batch, sequence, width)."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, index = self.router(tokens).softmax(-1).topk(self.chosen)
        y = self.experts(tokens, index, weights / weights.sum(-1, keepdim=True))
        if self.shared_up is not None and self.shared_down is not None:
            gate, up = self.shared_up(tokens).chunk(2, dim=-1)
            y = y + self.shared_down(F.silu(gate) * up)
        return y.view_as(x)


class MixtureBlock(nn.Module):
    """Causal attention and a mixture of experts, each behind a layer norm and a residual."""

    def __init__(self, width: int, heads: int, hidden: int, **mixture: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.mixture_norm = nn.LayerNorm(width)
        self.mixture = Mixture(width, hidden, **mixture)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shaped as `x` (batch, sequence, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(self.mixture_norm(x))


class Transformer(nn.Module):
    """A stack of transformer blocks over learned token and position embeddings, with a head over the vocabulary.

    `tied`: the head uses the token embedding's weight, as in GPT-2 and GPT-3. `block`: returns a new block for its
    number, if blocks are of another kind.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        maximum_length: int,
        width: int,
        heads: int,
        layers: int,
        causal: bool,
        tied: bool = False,
        block: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.tokens: nn.Embedding | None = nn.Embedding(vocabulary, width)
        self.positions: nn.Embedding | None = nn.Embedding(maximum_length, width)
        new_block = block or (lambda _number: TransformerBlock(width, heads, causal=causal))
        self.blocks = nn.ModuleList(map(new_block, range(layers)))
        self.norm: nn.Module = nn.LayerNorm(width)
        self.head: nn.Module = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def keep_layers(self, names: Collection[str]) -> None:
        """Remove all layers but those of these paths; the remaining module is a pipeline stage."""
        if "tokens" not in names:
            self.tokens = self.positions = None
        _keep_blocks(self.blocks, names)
        self.norm = self.norm if "norm" in names else nn.Identity()
        self.head = self.head if "head" in names else nn.Identity()

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits (batch, sequence, vocabulary) for token ids (batch, sequence).

        A pipeline stage returns its output for its input `x`. `position_ids` (1, sequence): from 0 on by default.
        """
        if self.tokens is not None and self.positions is not None:
            # No name for the positions: one would keep them alive for the whole forward pass
            x = self.tokens(x) + self.positions(
                torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
            )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _keep_blocks(blocks: nn.ModuleList, names: Collection[str]) -> None:
    """Replace all blocks but those of these paths; the others keep their numbers, and so their parameters' names."""
    for number in range(len(blocks)):
        if f"blocks.{number}" not in names:
            blocks[number] = nn.Identity()


class SequenceClassifier(nn.Module):
    """A BERT encoder with BERT's head for classes of whole sequences: a dense layer with tanh on the first token.

    Tokens that are `padding` are masked out of the attention.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        maximum_length: int,
        width: int,
        heads: int,
        layers: int,
        classes: int,
        padding: int,
    ) -> None:
        super().__init__()
        self.padding = padding
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(maximum_length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, causal=False) for _ in range(layers))
        self.pooler = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)
        self.apply(_initialise)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (batch, classes) for token ids (batch, sequence)."""
        x = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        hidden = torch.zeros_like(ids, dtype=x.dtype).masked_fill(ids == self.padding, -torch.inf)[:, None, None]
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)  # GPT-2's initialisation
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group norm and a shortcut (1x1 where the shape changes)."""

    def __init__(self, channels_in: int, channels_out: int, *, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels_out)
        same = stride == 1 and channels_in == channels_out
        self.shortcut = None if same else nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output (batch, channels, height, width)."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """A residual network for small images, with group norm (its statistics are independent of the batch's division)."""

    def __init__(self, *, channels: int, widths: list[int], blocks: int, classes: int, groups: int = 8) -> None:
        super().__init__()
        self.stem: nn.Conv2d | None = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        stack = []
        before = widths[0]
        for stage, width in enumerate(widths):
            for number in range(blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                stack.append(ResidualBlock(before, width, stride=stride, groups=groups))
                before = width
        self.blocks = nn.ModuleList(stack)
        self.pools = True
        self.head: nn.Module = nn.Linear(before, classes)

    def keep_layers(self, names: Collection[str]) -> None:
        """Remove all layers but those of these paths; the remaining module is a pipeline stage.

        The mean over the image belongs to the last block, as in a trace.
        """
        if "stem" not in names:
            self.stem = None
        self.pools = f"blocks.{len(self.blocks) - 1}" in names
        _keep_blocks(self.blocks, names)
        self.head = self.head if "head" in names else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, classes) for images (batch, channels, height, width).

        A pipeline stage returns its output for its input `x`.
        """
        if self.stem is not None:
            x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)) if self.pools else x)


def gpt(
    *, vocabulary: int = 256, maximum_length: int = 256, width: int, heads: int, layers: int, tied: bool = False
) -> nn.Module:
    """Return a GPT: causal attention, layer norm first; `tied`: the head shares the token embedding's weight."""
    return Transformer(
        vocabulary=vocabulary,
        maximum_length=maximum_length,
        width=width,
        heads=heads,
        layers=layers,
        causal=True,
        tied=tied,
    )


def mixture(
    *,
    vocabulary: int = 256,
    maximum_length: int = 256,
    width: int,
    heads: int,
    layers: int,
    experts: int,
    experts_per_token: int,
    expert_width: int,
    shared_experts: int = 0,
    dense_blocks: int = 0,
) -> nn.Module:
    """Return a decoder whose perceptrons are mixtures of experts, in the form of DeepSeekMoE; no token is dropped.

    `expert_width`: hidden width of each expert. `shared_experts`: number of experts that all tokens take besides.
    `dense_blocks`: number of first blocks that have a plain perceptron instead.
    """

    def new_block(number: int) -> nn.Module:
        if number < dense_blocks:
            return TransformerBlock(width, heads, causal=True)
        return MixtureBlock(width, heads, expert_width, **sizes)

    sizes = {"experts": experts, "chosen": experts_per_token, "shared": shared_experts}
    return Transformer(
        vocabulary=vocabulary,
        maximum_length=maximum_length,
        width=width,
        heads=heads,
        layers=layers,
        causal=True,
        block=new_block,
    )


def bert(*, vocabulary: int = 257, maximum_length: int = 256, width: int, heads: int, layers: int) -> nn.Module:
    """Return a BERT encoder with a masked-token head: bidirectional attention, layer norm after; id 256 is the mask."""
    return Transformer(
        vocabulary=vocabulary, maximum_length=maximum_length, width=width, heads=heads, layers=layers, causal=False
    )


def bert_classifier(
    *,
    vocabulary: int = 256,
    maximum_length: int = 256,
    width: int,
    heads: int,
    layers: int,
    classes: int = 2,
    padding: int = 0,
) -> nn.Module:
    """Return a BERT encoder that classifies sequences (GLUE); `padding` is the padding token."""
    return SequenceClassifier(
        vocabulary=vocabulary,
        maximum_length=maximum_length,
        width=width,
        heads=heads,
        layers=layers,
        classes=classes,
        padding=padding,
    )


def resnet(*, channels: int = 1, widths: list[int], blocks: int, classes: int = 10) -> nn.Module:
    """Return a small residual network with group norm."""
    return ResNet(channels=channels, widths=widths, blocks=blocks, classes=classes)
