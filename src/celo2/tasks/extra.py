"""Libraries that are needed for some things only, imported when they are."""

import importlib
from typing import Any


def import_extra(name: str, extra: str = "data") -> Any:
    """The library `name`, which the extra brings."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'This needs {name}: pip install "celo2[{extra}]".') from error
