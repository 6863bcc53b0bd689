"""Rule files: one .safetensors file holds config, arrays and origin of a rule.

A rule is for one optimizer, Celo2 unless its config names another.

Loading and saving come first (files, shipped rules, hf:// addresses), then the encoding, then the
Hugging Face hub. Files may come from anyone, so anything wrong with one raises a ValueError that
says what. huggingface_hub is an optional extra, imported only when it is needed.
"""

import dataclasses
import functools
import hashlib
import importlib
import json
import os
import re
import secrets
import warnings
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import safetensors
import safetensors.numpy

from celo2 import velo
from celo2.rule import Rule, RuleConfig, check_shapes

SHIPPED = ("celo2", "celo2-base")

FORMAT = 1  # to be raised when older versions of celo2 can no longer read a file
# Newer config fields, which a file has only where they differ from these values.
LATER: dict[str, Any] = {"gated": False, "overshoot": 0.0}
MAX_FILE = 64 * 2**20  # bytes; the shipped rules have 3,000
MAX_HEADER = 2**20

CHECKPOINT = "is it a published checkpoint? Then run: celo2 convert theta.state rule.safetensors"
# The first bytes of files that are not rules, and what they are.
OTHER_FORMATS = {
    b"PK\x03\x04": "it is a zip archive (torch or npz?)",
    b"\x93NUMPY": "it is a numpy array",
    b"\x80": "it looks like a pickle, which celo2 never opens",
    b"\x81": CHECKPOINT,  # of Celo2
    b"\x82": CHECKPOINT,  # of Celo-Adam
    b"\x83": CHECKPOINT,  # of VeLO and Celo
}

HUB_PREFIX = "hf://"
HUB_FILE = "rule.safetensors"
HUB_TIMEOUT = 5.0  # seconds

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ADDRESS = re.compile(rf"hf://({_NAME}/{_NAME})(?:@([^/@]+))?(?:/([^@]+))?")


def load(path: str | os.PathLike[str]) -> Rule:
    """The rule in a file, or at an address on the Hugging Face hub.

    It is a `Rule`, or a `celo2.velo.VeloRule` if the file is for VeLO or Celo.

    Args:
        path: a `.safetensors` file, or `hf://user/repo`, optionally with `@revision` and with
            `/folder/file.safetensors` (default `rule.safetensors`).

    Its arrays are float32 and read-only.

    >>> rule = celo2.load("rule.safetensors")  # doctest: +SKIP
    >>> rule.config.hidden  # doctest: +SKIP
    (8, 8)
    """
    source = os.fspath(path)
    file = download(source) if source.startswith(HUB_PREFIX) else Path(source)
    return from_bytes(read_file(file), source)


def save(rule: Rule, path: str | os.PathLike[str]) -> None:
    """Writes a rule to a file, whole or not at all.

    Args:
        rule: its arrays may be of any floating type, JAX's included, and are stored as float32.
        path: where to; a file already there is replaced.

    Tuples in the origin are loaded as lists; everything else is loaded as it was saved.

    >>> celo2.save(rule, "rule.safetensors")  # doctest: +SKIP
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is not a folder: make it before saving {target}.")
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file in it, such as rule.safetensors.")
    write_whole(target, to_bytes(rule))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically: completely or not at all."""
    temporary = path.with_name(f".celo2-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def pretrained(name: str = "celo2") -> Rule:
    """A rule shipped with celo2: `celo2` or `celo2-base`. Needs no network.

    >>> celo2.pretrained("celo2").config.hidden  # doctest: +SKIP
    (8, 8)
    """
    if name not in SHIPPED:
        raise ValueError(f"{name!r} is not a shipped rule; there are {', '.join(SHIPPED)}.")
    rule = _shipped(name)
    if rule.origin.get("trained") == "no":
        warnings.warn(
            f"The shipped rule {name!r} is an untrained placeholder: it will not optimize well. "
            "Use a rule of your own, or turn a published checkpoint into one with `celo2 convert`.",
            stacklevel=2,
        )
    return rule


def as_rule(rule: Rule | str | os.PathLike[str]) -> Rule:
    """The Celo2 rule given as a Rule, a shipped name, a file or an address."""
    found = find_rule(rule)
    check_optimizer(found, "celo2")
    return found


def as_velo_rule(rule: Rule | str | os.PathLike[str], optimizer: velo.Optimizer) -> velo.VeloRule:
    """The rule for VeLO or Celo given as a Rule, a file or an address."""
    found = find_rule(rule)
    check_optimizer(found, optimizer)
    assert isinstance(found, velo.VeloRule)
    return found


def find_rule(rule: Rule | str | os.PathLike[str]) -> Rule:
    """The rule given as a Rule, a shipped name, a file or an address, for any optimizer."""
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str) and rule in SHIPPED:
        return pretrained(rule)
    if isinstance(rule, (str, os.PathLike)):
        return load(rule)
    raise TypeError(
        f"rule={rule!r} is a {type(rule).__name__}; give a Rule, a shipped name "
        f"({', '.join(SHIPPED)}), a .safetensors file or an hf:// address."
    )


def optimizer_of(rule: Rule) -> str:
    """The optimizer that a rule is for: celo2, velo or celo."""
    return rule.config.optimizer if isinstance(rule, velo.VeloRule) else "celo2"


def check_optimizer(rule: Rule, optimizer: str) -> None:
    """Raises a ValueError where a rule is for another optimizer."""
    if (found := optimizer_of(rule)) != optimizer:
        use = "celo2.jax or celo2.torch" if found == "celo2" else f"celo2.jax.{found}"
        raise ValueError(
            f"the rule is for {found}, not for {optimizer}: use it with {use}, or as "
            f"{'optimizer FILE' if found == 'celo2' else f'optimizer {found}=FILE'} in runs."
        )


@functools.cache
def _shipped(name: str) -> Rule:
    # Through the package, not "celo2.pretrained": importing that would hide the function.
    file = resources.files("celo2").joinpath("pretrained", f"{name}.safetensors")
    return from_bytes(file.read_bytes(), f"the shipped rule {name!r}")


def _shipped_hint(path: Path) -> str:
    if str(path) in SHIPPED:
        return f'; celo2.pretrained("{path}") is the shipped rule of that name'
    return "" if path.suffix else f"; the shipped rules are {', '.join(SHIPPED)}"


def read_file(path: Path) -> bytes:
    """A file's bytes; raises an error if there is no such file or it is larger than any rule."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}{_shipped_hint(path)}.")
    if not path.is_file():
        raise ValueError(f"{path} is not a file but a folder or a device: name the file itself.")
    with open(path, "rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError(f"{path} is larger than {MAX_FILE // 2**20} MB: it is not a rule.")
    return data


def to_bytes(rule: Rule) -> bytes:
    """The file that holds `rule`; equal rules make equal files."""
    texts, arrays = _texts(rule), float32(rule.weights)
    stamp = _digest(texts, arrays)
    header: dict[str, Any] = {"__metadata__": {"celo2": str(FORMAT), **texts, "sha256": stamp}}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    # By hand: the library writes metadata in random order, so that files could not be compared.
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    data = b"".join(
        (len(head).to_bytes(8, "little"), head, *(a.tobytes() for a in arrays.values()))
    )
    from_bytes(data, "the rule to save")  # so that what was saved can be loaded
    return data


def from_bytes(data: bytes, source: str) -> Rule:
    """The rule in a file's bytes; `source` names the file in errors."""
    try:
        return _parse(data)
    except (ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise ValueError(f"{source} is not a usable rule: {printable(error)}") from error


def digest(rule: Rule) -> str:
    """The SHA-256 that a rule's file carries, over its config, origin and arrays."""
    return _digest(_texts(rule), float32(rule.weights))


def printable(error: Exception) -> str:
    """An error's text, safe to print in a terminal."""
    # The content of an untrusted file may be long, or contain control codes.
    text = "".join(c if c.isprintable() else "?" for c in str(error))
    return text if len(text) <= 400 else f"{text[:400]}…"


def _parse(data: bytes) -> Rule:
    header = _header(data)
    metadata = header.pop("__metadata__", {})
    _check_metadata(metadata)
    config = _config(_json_object(metadata["config"], "config"))
    origin = _json_object(metadata["origin"], "origin")
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.get("dtype") != "F32":
            raise ValueError(f"array {name} is not F32, the type of a rule's arrays.")
    # Before the arrays are made, so that no more is allocated than the config needs.
    shapes = {name: _shape(entry) for name, entry in header.items()}
    if isinstance(config, RuleConfig):
        check_shapes(config, shapes)
    else:
        velo.check_velo_shapes(config, shapes)
    arrays = float32(safetensors.numpy.load(data))
    if _digest(metadata, arrays) != metadata["sha256"]:
        raise ValueError("its SHA-256 does not match its content: it was damaged; fetch it again.")
    if isinstance(config, RuleConfig):
        return Rule(config, arrays, origin)
    return velo.VeloRule(config, arrays, origin)


def _header(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(MAX_HEADER, len(data) - 8):
        hints = (hint for start, hint in OTHER_FORMATS.items() if data.startswith(start))
        size = f"it has {len(data)} bytes and claims a header of {length}"
        raise ValueError(f"not a whole safetensors file; {next(hints, size)}.")
    if len(data) > MAX_FILE:
        raise ValueError(f"it has {len(data)} bytes; a rule has at most {MAX_FILE}.")
    return _json_object(data[8 : 8 + length].decode(), "header")


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or "celo2" not in metadata:
        raise ValueError("a safetensors file, but not made by celo2.save.")
    version = metadata["celo2"]
    if not (isinstance(version, str) and version.isascii() and version.isdecimal()):
        raise ValueError(f"format {version!r} is not a number.")
    if int(version) > FORMAT:
        raise ValueError(
            f"format {version} is newer than {FORMAT}, the newest this celo2 reads: "
            "pip install --upgrade celo2."
        )
    for name in ("config", "origin", "sha256"):
        if not isinstance(metadata.get(name), str):
            raise ValueError(f"it has no {name}; write it again with celo2.save.")


def _config_fields(config: RuleConfig | velo.VeloConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if (name, value) not in LATER.items()}


def _config(fields: dict[str, Any]) -> RuleConfig | velo.VeloConfig:
    kind = velo.VeloConfig if "optimizer" in fields else RuleConfig
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(f"unknown config fields: {', '.join(unknown)}; made by a newer celo2?")
    if missing := sorted(known - fields.keys() - LATER.keys()):
        raise ValueError(f"config fields missing: {', '.join(missing)}.")
    return kind(**(LATER if kind is RuleConfig else {}) | fields)


def _shape(entry: dict[str, Any]) -> tuple[Any, ...]:
    shape = entry.get("shape")
    return tuple(shape) if isinstance(shape, list) else ()


def _json_object(text: str, what: str) -> dict[str, Any]:
    def refuse(constant: str):
        raise ValueError(f"{what} holds {constant}, which is not JSON.")

    value = json.loads(
        text, object_pairs_hook=lambda pairs: dict_of_unique(pairs, what), parse_constant=refuse
    )
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object.")
    return value


def dict_of_unique(pairs: list[tuple[Any, Any]], what: str) -> dict[Any, Any]:
    """The pairs as a dict. Raises a ValueError if a key occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"{what} names something twice.")
    return result


def _texts(rule: Rule) -> dict[str, str]:
    try:
        if not _has_text_keys(rule.origin):
            raise ValueError("a key is not a string")
        return {
            "config": json.dumps(_config_fields(rule.config)),
            "origin": json.dumps(dict(rule.origin), allow_nan=False),
        }
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"origin cannot be stored: {error}; use text, finite numbers, lists and dicts."
        ) from error


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _has_text_keys(v) for k, v in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))


def float32(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays as read-only float32, sorted by name; a ValueError where one is not finite."""
    arrays = {}
    for name, weight in sorted(weights.items()):
        array = np.asarray(weight)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise ValueError(f"{name} has dtype {array.dtype}; a rule's arrays are floating point.")
        with np.errstate(over="ignore"):  # what overflows is refused below
            array = np.array(array, dtype="<f4", order="C")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds values that are infinite or not a number.")
        array.flags.writeable = False
        arrays[name] = array
    return arrays


def _digest(texts: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> str:
    sha = hashlib.sha256()
    for part in (texts["config"], texts["origin"], *arrays):
        sha.update(part.encode() + b"\0")
    for array in arrays.values():
        sha.update(array.tobytes())
    return sha.hexdigest()


class Address(NamedTuple):
    """A file in a repository; `revision` is a branch, a tag or a commit, None for the newest."""

    repo: str
    revision: str | None
    file: str


def parse_address(text: str) -> Address:
    """The parts of `hf://user/repo[@revision][/folder/file.safetensors]`.

    A slash in a revision is written %2F.

    >>> parse_address("hf://ada/rules@v1/small.safetensors")
    Address(repo='ada/rules', revision='v1', file='small.safetensors')
    """
    match = _ADDRESS.fullmatch(text)
    file = (match and match[3]) or HUB_FILE
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
    library = import_extra("huggingface_hub", "hub")
    offline = _is_offline()
    try:
        path = library.hf_hub_download(
            address.repo,
            address.file,
            revision=address.revision,
            etag_timeout=HUB_TIMEOUT,
            local_files_only=offline,
        )
    except Exception as error:
        raise _explain(error, text, offline) from error
    return Path(path)


def push(repo: str, files: Mapping[str, bytes], *, private: bool = False) -> str:
    """Commits files to `user/repo`, which is created if it does not exist; returns its address."""
    address = parse_address(HUB_PREFIX + repo)
    if address != Address(repo, None, HUB_FILE):
        raise ValueError(f"{repo!r} is not a repository; write user/repo.")
    library = import_extra("huggingface_hub", "hub")
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
    return HUB_PREFIX + repo


def model_card(rule: Rule, address: str, sha256: str) -> str:
    """A README for a rule's repository: how to use the rule, its config and its origin."""
    name = parse_address(address).repo.split("/")[-1]
    facts = {
        "config": _config_fields(rule.config),
        "origin": dict(rule.origin),
        "sha256": sha256,
    }
    optimizer = optimizer_of(rule)
    where = "for JAX and PyTorch" if optimizer == "celo2" else f"for celo2.jax.{optimizer}"
    facts = json.dumps(facts, indent=2)
    return CARD.format(name=name, address=address, where=where, facts=facts)


CARD = """\
---
library_name: celo2
tags: [learned-optimizer, optimizer]
---

# {name}

A learned optimizer, {where}, as a rule of [celo2](https://pypi.org/project/celo2).

```python
import celo2

rule = celo2.load("{address}")
```

```json
{facts}
```
"""


def import_extra(name: str, extra: str) -> Any:
    """Imports the library `name`, which celo2's `extra` installs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'This needs {name} ({error}): pip install "celo2[{extra}]".') from error


def offline_is_set() -> bool:
    """Whether HF_HUB_OFFLINE is set: only files in the hub's cache may be used."""
    constants = import_extra("huggingface_hub.constants", "hub")
    set_since = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return constants.HF_HUB_OFFLINE or set_since


def ask_hub() -> None:
    """Raises an error unless the hub answers within HUB_TIMEOUT; its library would try for 24 s."""
    library = import_extra("huggingface_hub", "hub")
    library.get_session().head(library.constants.ENDPOINT, timeout=HUB_TIMEOUT)


def _is_offline() -> bool:
    if offline_is_set():
        return True
    try:
        ask_hub()
    except Exception:  # of whichever library makes the connection
        return True
    return False


def _explain(error: Exception, place: str, offline: bool) -> OSError:
    """The error to raise instead, with the address, the cause and what to do."""
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
