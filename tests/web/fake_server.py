"""The server with a make-believe debugger, to work on the page without a model.

    python tests/web/fake_server.py [--port 8130] [--static FOLDER] [--delay 0.03] [--no-index]

See `fake.py` for the words in a prompt that make it fail, hurry or wait.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import uvicorn
from fake import FakeDebugger

from layerleap.show.web.app import STATIC, create_app
from layerleap.show.web.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the debugger's page with made-up answers.")
    parser.add_argument("--port", type=int, default=8130)
    parser.add_argument("--static", type=Path, default=STATIC)
    parser.add_argument("--delay", type=float, default=0.03, help="seconds per frame")
    parser.add_argument("--no-index", action="store_true")
    parser.add_argument("--store", type=Path, help="sessions; default: forgotten at the end")
    options = parser.parse_args()
    debugger = FakeDebugger(
        index=not options.no_index, delay=options.delay, buildable=options.no_index, step=0.4
    )
    with tempfile.TemporaryDirectory() as folder:
        store = Store("f" * 32, options.store or Path(folder) / "sessions.sqlite")
        app = create_app(debugger, store, static=options.static)
        uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
