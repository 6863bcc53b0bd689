"""Rules on the Hugging Face hub: fetched by an hf:// address, pushed with a model card.

Imports nothing of huggingface_hub until it is asked to; it is an optional extra.
"""

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

from celo2.rule import Rule

PREFIX = "hf://"
FILE = "rule.safetensors"
TIMEOUT = 5.0  # seconds

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ADDRESS = re.compile(rf"hf://({_NAME}/{_NAME})(?:@([^/@]+))?(?:/([^@]+))?")


class Address(NamedTuple):
    """A file in a repository; `revision` is a branch, a tag or a commit, None for the newest."""

    repo: str
    revision: str | None
    file: str


def is_address(text: str) -> bool:
    """Whether a path is meant as an address on the hub."""
    return text.startswith(PREFIX)


def parse_address(text: str) -> Address:
    """The parts of `hf://user/repo[@revision][/folder/file.safetensors]`.

    A slash in a revision is written %2F.

    >>> parse_address("hf://ada/rules@v1/small.safetensors")
    Address(repo='ada/rules', revision='v1', file='small.safetensors')
    """
    match = _ADDRESS.fullmatch(text)
    file = (match and match[3]) or FILE
    if not match or ".." in file.split("/") or not file.endswith(".safetensors"):
        raise ValueError(
            f"{text!r} is not an address on the hub; write hf://user/repo, "
            "hf://user/repo@revision or hf://user/repo/folder/file.safetensors."
        )
    return Address(match[1], unquote(match[2]) if match[2] else None, file)


def download(text: str) -> Path:
    """The local copy of the file at an address, fetched if it is not there yet.

    Without the network, or under HF_HUB_OFFLINE=1, only copies fetched before are found.
    """
    address = parse_address(text)
    library = _huggingface_hub()
    offline = _is_offline()
    try:
        path = library.hf_hub_download(
            address.repo,
            address.file,
            revision=address.revision,
            etag_timeout=TIMEOUT,
            local_files_only=offline,
        )
    except Exception as error:
        raise _explain(error, text, offline) from error
    return Path(path)


def push(repo: str, files: Mapping[str, bytes], *, private: bool = False) -> str:
    """Puts files into `user/repo` in one commit, making the repository if need be; its address."""
    address = parse_address(PREFIX + repo)
    if address != Address(repo, None, FILE):
        raise ValueError(f"{repo!r} is not a repository; write user/repo.")
    library = _huggingface_hub()
    if _is_offline():
        raise ConnectionError(
            f"{repo}: the hub is out of reach or HF_HUB_OFFLINE is set. Connect or unset it, then "
            "push again."
        )
    additions = [
        library.CommitOperationAdd(path_in_repo=name, path_or_fileobj=data)
        for name, data in files.items()
    ]
    api = library.HfApi(library_name="celo2")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.create_commit(repo, additions, commit_message="Push a celo2 rule")
    except Exception as error:
        raise _explain(error, repo, offline=False) from error
    return PREFIX + repo


def model_card(rule: Rule, address: str, sha256: str) -> str:
    """A README for the repository of a rule: how to use it, what it is, where it comes from."""
    name = parse_address(address).repo.split("/")[-1]
    facts = {"config": asdict(rule.config), "origin": dict(rule.origin), "sha256": sha256}
    return CARD.format(name=name, address=address, facts=json.dumps(facts, indent=2))


CARD = """\
---
library_name: celo2
tags: [learned-optimizer, optimizer]
---

# {name}

A learned optimizer, for JAX and PyTorch, as a rule of [celo2](https://pypi.org/project/celo2).

```python
import celo2

rule = celo2.load("{address}")
```

```json
{facts}
```
"""


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError("hf:// addresses need huggingface_hub: pip install celo2[hub]") from error
    return huggingface_hub


def _is_offline() -> bool:
    from huggingface_hub import constants

    wish = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return wish or not _is_reachable(constants.ENDPOINT)


def _is_reachable(endpoint: str) -> bool:
    # Asked first, because the library repeats its attempts for 24 s where there is no network.
    if {"http", "https", "all"} & getproxies().keys():
        return True  # a direct connection would say nothing
    url = urlsplit(endpoint)
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), TIMEOUT).close()
    except OSError:
        return False
    return True


def _explain(error: Exception, place: str, offline: bool) -> OSError:
    """The error to raise instead: it names the place, what went wrong, and the way out."""
    from huggingface_hub import errors

    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if offline or isinstance(error, errors.LocalEntryNotFoundError):
        return FileNotFoundError(
            f"{place}: no copy on this machine, and the hub is out of reach or HF_HUB_OFFLINE is "
            "set. Connect or unset it, or download the file elsewhere and give its path."
        )
    missing = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    if isinstance(error, (*missing, errors.EntryNotFoundError)):
        return FileNotFoundError(
            f"{place}: not found on the hub ({reason}). Check the name; a private repository "
            "needs `hf auth login` or HF_TOKEN."
        )
    return OSError(
        f"{place}: the hub refused ({reason}). Try again; if it asks who you are, run "
        "`hf auth login` or set HF_TOKEN."
    )
