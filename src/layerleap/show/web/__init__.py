"""The debugger's server: translates between the debugger and the page, and computes nothing."""

from layerleap.extras import library


def need_web() -> None:
    """Say how to install the server's libraries, if they are missing."""
    for name in ("fastapi", "uvicorn"):
        library(name, "web")
