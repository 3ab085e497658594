"""Vision Transformer, size Small: width 384, depth 12, 6 heads, MLP 1536, pre-norm, class token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, DEPTH, NUM_HEADS, MLP_WIDTH = 384, 12, 6, 1536
INIT_STD = 0.02


def patch_size(image_size: int) -> int:
    """4 pixels for images below 64, else 8: an 8 x 8 grid at both 32 and 64 pixels."""
    return 4 if image_size < 64 else 8


class Attention(nn.Module):
    """Multi-head self-attention, tokens [n, m, d] -> [n, m, d], with biases on q, k and v."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, m, d = x.shape
        q, k, v = self.qkv(x).view(n, m, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(n, m, d))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_width), nn.GELU(), nn.Linear(mlp_width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Images [n, 3, s, s] -> [n, 384]: the class token after the final norm. s must be a multiple of the patch."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        patch = patch_size(image_size)
        num_tokens = (image_size // patch) ** 2 + 1
        self.feature_size = WIDTH
        self.patches = nn.Conv2d(3, WIDTH, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, num_tokens, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, NUM_HEADS, MLP_WIDTH) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.positions
        # The norm acts on each token by itself, so only the class token needs it.
        features: Tensor = self.norm(self.blocks(tokens)[:, 0])
        return features

    def initialise(self, generator: torch.Generator) -> None:
        """Truncated normal (std 0.02) for weights, class token and positions; zero biases; norms as the identity."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=INIT_STD, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for token in (self.class_token, self.positions):
            nn.init.trunc_normal_(token, std=INIT_STD, generator=generator)
