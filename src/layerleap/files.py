"""Reading and writing files: writes are atomic, and nothing is ever a pickle.

In: a target path and a `with` body that fills a temporary file or folder next to it.
Out: the finished file or folder under its final name, or nothing at all.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from layerleap.errors import BadArtifact, CannotWrite


def cache_root() -> Path:
    """The cache folder: $LAYERLEAP_CACHE, or "layerleap" in the user's cache folder."""
    if chosen := os.environ.get("LAYERLEAP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "layerleap"


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
WRONG_PLACE = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
WRITE_ERRORS = NO_ROOM | NOT_ALLOWED | WRONG_PLACE


@contextmanager
def clear_write_errors(target: Path, *, ours: bool = False) -> Iterator[None]:
    """Turn errors of the operating system into one `CannotWrite` about `target`.

    Args:
        target: the file or folder being written.
        ours: only code of this module runs inside, so every error is about writing. Otherwise
            errors that a missing file, a download or a library can cause are passed on.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors hides the system's error and uses one class for everything.
        if isinstance(error, SafetensorError) and "I/O error" not in str(error):
            raise
        if isinstance(error, OSError) and not ours and error.errno not in WRITE_ERRORS:
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotWrite(
            f"cannot write {target}: {reason}; free some space or choose another location"
        ) from error


def check_writable(target: Path, noun: str = "file") -> None:
    """Refuse a file (or "folder") that cannot be written where it is wanted; nothing is made."""
    target = Path(target)
    if target.is_dir() and noun == "file":
        raise CannotWrite(f"{target} is a folder; expected a file or a new name")
    if target.is_file() and noun == "folder":
        raise CannotWrite(f"{target} is a file; expected a folder")
    above = next(path for path in target.absolute().parents if os.path.exists(path))
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise CannotWrite(f"cannot write {target}: {above} is not writable; choose another {noun}")


@contextmanager
def whole_file(target: str | Path) -> Iterator[Path]:
    """Yield a temporary path; on success it replaces `target`, otherwise it is removed."""
    target = Path(target)
    with clear_write_errors(target, ours=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(target)
        temporary.touch(exist_ok=False)  # unlike mkstemp, with the user's default mode
        mode = temporary.stat().st_mode
    try:
        with clear_write_errors(target):
            yield temporary
        with clear_write_errors(target, ours=True):
            temporary.chmod(mode)  # safetensors replaces it by a private file
            os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder; on success it replaces `target`, otherwise it is removed."""
    target = Path(target)
    with clear_write_errors(target, ours=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file():
            raise CannotWrite(f"{target} is a file; expected a folder or a new name")
        temporary = _beside(target)
        temporary.mkdir()
        mode = temporary.stat().st_mode & 0o666
    try:
        with clear_write_errors(target):
            yield temporary
        with clear_write_errors(target, ours=True):
            for path in temporary.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    path.chmod(mode)
            _swap_in(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap_in(fresh: Path, target: Path) -> None:
    """Replace `target` by `fresh`; if that fails, the old folder stays."""
    if not target.exists():
        fresh.rename(target)
        return
    old = _beside(target)
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _beside(target: Path) -> Path:
    """An unused hidden path next to `target`, where a rename is a single step."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}")


def write_json(target: Path, value: Any) -> None:
    """Write `value` as readable JSON in one step; NaN is an error because JSON has none."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with whole_file(target) as temporary:
        temporary.write_text(text, encoding="utf8")


def read_json(source: Path) -> Any:
    """The content of a JSON file; a missing or broken file is a `BadArtifact`."""
    try:
        return json.loads(source.read_text(encoding="utf8"))
    except FileNotFoundError as error:
        raise BadArtifact(f"{source} is missing; was the folder copied whole?") from error
    except OSError as error:
        raise BadArtifact(
            f"{source} cannot be read ({error.strerror or error}); check its permissions"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadArtifact(
            f"{source} is not valid JSON ({error}); create or copy it again"
        ) from error


def files_under(folder: Path, matches: Callable[[Path], bool]) -> list[Path]:
    """The matching files in `folder` and its subfolders, sorted; hidden ones are left out."""
    inside = sorted(path for path in folder.rglob("*") if path.is_file() and matches(path))
    return [p for p in inside if not any(x.startswith(".") for x in p.relative_to(folder).parts)]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_hash(
    tensors: Mapping[str, Any], header: Mapping[str, Any], hash_key: str = "sha256"
) -> str:
    """Hash of all numbers and of the header, whatever its layout; without its entry `hash_key`."""
    fields = {key: value for key, value in header.items() if key != hash_key}
    # A round trip first: JSON has no tuples, and its keys are strings.
    plain = json.loads(json.dumps(fields))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for key, value in sorted(tensors.items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).numpy().data)
    return digest.hexdigest()
