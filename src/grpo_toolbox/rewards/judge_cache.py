"""Judges' replies on disk: one file each, under the hash of the request, safe under several processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_toolbox.errors import ConfigError

log = logging.getLogger(__name__)


def request_key(request: Mapping[str, Any]) -> str:
    """The hash of a request: model, messages and parameters, whatever the order of their names."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ReplyCache:
    """A folder of replies.

    A file is written beside and renamed, so that another process sees all of it or nothing; one that cannot be read
    (damaged, or of another program) counts as absent and is written anew.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"reward.cache={str(folder)!r} is a file: give a folder, or null to keep no replies.")

    def get(self, key: str) -> dict[str, Any] | None:
        """The reply kept under `key`, None where there is none."""
        try:
            kept = json.loads(self._path(key).read_bytes())
        except (OSError, ValueError, RecursionError):  # absent, or not (whole) JSON
            return None
        return kept if isinstance(kept, dict) and isinstance(kept.get("reply"), str) else None

    def put(self, key: str, kept: Mapping[str, Any]) -> None:
        """Keep a reply; where the disk does not take it, the log says so once and the run goes on."""
        path = self._path(key)
        beside = path.with_name(f".{key}.{uuid.uuid4().hex}")  # of this process and this call alone
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(json.dumps(kept).encode())
            os.replace(beside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            _say_not_kept(self.folder, error.strerror or str(error))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


@functools.cache
def _say_not_kept(folder: Path, why: str) -> None:
    log.warning("reward.cache=%s keeps no replies (%s): the judge is asked again each time.", folder, why)
