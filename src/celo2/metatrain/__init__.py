"""Makes rules: meta-training on many small problems, with everything a long run needs."""

from celo2.metatrain.config import PRESETS, MetaConfig
from celo2.metatrain.loop import Limits, metatrain
from celo2.metatrain.status import status
from celo2.runs.engine import Diverged

__all__ = ["PRESETS", "Diverged", "Limits", "MetaConfig", "metatrain", "status"]
