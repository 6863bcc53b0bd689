"""A user's own function, named as `module:function`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def import_function(address: str, what: str, example: str) -> Callable[..., Any]:
    """The function at `module:function`; `what` names the option in errors."""
    module_name, colon, function_name = address.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"{what}={address!r} is not module:function, such as {example}.")
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        raise ValueError(
            f"{what}={address!r}: there is no module {module_name!r}; "
            "run in its folder, or put that folder on PYTHONPATH."
        ) from error
    except AttributeError as error:
        raise ValueError(f"{what}={address!r}: {module_name} has no {function_name!r}.") from error


def search_working_directory() -> None:
    """Lets `import_function` find modules in the current folder, as `python -m` does."""
    sys.path.insert(0, os.getcwd())
