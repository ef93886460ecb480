"""How layerleap touches the disk: all or nothing, and never a pickle.

In: a target path and a function body that fills a temporary neighbour of it.
Out: the finished file or folder under its final name, or nothing at all.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from layerleap.errors import BadArtifact, CannotWrite


def cache_root() -> Path:
    """The folder for fetched models and texts: $LAYERLEAP_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("LAYERLEAP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "layerleap"


WRITE_ERRORS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS,
        errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
    }
)  # fmt: skip


@contextmanager
def clear_write_errors(target: Path, *, ours: bool = False) -> Iterator[None]:
    """Turn the operating system's refusals into one sentence about `target`.

    Args:
        target: what was to be written.
        ours: only this module's own steps run inside, so every error is about writing. Else
            only those are that cannot come of a missing file, a download or a library.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors does not pass on the system's own error, and has one class for everything.
        if isinstance(error, SafetensorError) and "I/O error" not in str(error):
            raise
        if isinstance(error, OSError) and not ours and error.errno not in WRITE_ERRORS:
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotWrite(
            f"cannot write {target}: {reason}; free some space or choose another place"
        ) from error


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it becomes `target` in one step, else it is removed."""
    target = Path(target)
    with clear_write_errors(target, ours=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
    temporary = Path(name)
    try:
        with clear_write_errors(target):
            yield temporary
        with clear_write_errors(target, ours=True):
            _open_up(temporary)
            os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder; on success it replaces `target`, else it is removed."""
    target = Path(target)
    with clear_write_errors(target, ours=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file():
            raise CannotWrite(f"{target} is a file; a folder was wanted there")
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        temporary.chmod(0o777 & ~_umask())
    try:
        with clear_write_errors(target):
            yield temporary
        with clear_write_errors(target, ours=True):
            for path in temporary.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    _open_up(path)
            _swap_in(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap_in(fresh: Path, target: Path) -> None:
    """Put `fresh` in the place of `target`; a failure leaves the old folder where it was."""
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    old.rmdir()
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _open_up(path: Path) -> None:
    """Give a file the user's default mode: mkstemp's and safetensors' 0600 survive a rename."""
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(target: Path, value: Any) -> None:
    """Write `value` as readable JSON in one step; NaN is an error, for JSON has none."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with whole_file(target) as temporary:
        temporary.write_text(text, encoding="utf8")


def read_json(source: Path) -> Any:
    """Read JSON; a missing or broken file is a `BadArtifact`."""
    try:
        return json.loads(source.read_text(encoding="utf8"))
    except FileNotFoundError as error:
        raise BadArtifact(f"{source} is missing; was the folder copied whole?") from error
    except OSError as error:
        raise BadArtifact(f"{source} cannot be read ({error.strerror or error})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadArtifact(f"{source} is not valid JSON ({error}); make or copy it again") from error


def sha256_of(path: Path) -> str:
    """The file's SHA-256, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
