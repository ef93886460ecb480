"""A bank of made-up maps between all pairs of layers of a tiny model."""

import torch

from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap
from layerleap.models.transformer import Transformer


def bank_of(transformer: Transformer, seed: int = 1) -> ShortcutBank:
    """Each map is the identity and some noise."""
    last, width = transformer.n_layers, transformer.d_model
    draw = torch.Generator().manual_seed(seed)
    maps = [
        LinearMap(
            src, dst, weight=torch.eye(width) + 0.05 * torch.randn(width, width, generator=draw)
        )
        for src in range(last)
        for dst in range(src + 1, last + 1)
    ]
    return ShortcutBank(
        maps,
        fits=[],
        model=transformer.identity.to_dict(),
        n_layers=last,
        d_model=width,
        settings={},
    )
