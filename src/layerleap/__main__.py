"""`python -m layerleap`, which torchrun needs."""

from layerleap.show.cli.app import main

main()
