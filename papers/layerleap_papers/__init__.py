"""Reproductions of papers with layerleap, one package per paper, each with a `STUDY`."""
