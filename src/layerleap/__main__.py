"""`python -m layerleap`, which torchrun needs."""

from layerleap.show.cli import main

main()
