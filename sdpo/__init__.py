"""Reinforcement learning of language models by self-distillation (SDPO, arXiv 2601.20802)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sdpo.callbacks import SDPOCallback as SDPOCallback
    from sdpo.config import SDPOConfig as SDPOConfig
    from sdpo.discovery import discover as discover
    from sdpo.guard import NonFiniteLossError as NonFiniteLossError
    from sdpo.teacher_check import compare_teacher as compare_teacher
    from sdpo.trainer import SDPOTrainer as SDPOTrainer
    from sdpo.types import Score as Score

# Resolved on first use, so that `import sdpo` alone loads neither torch nor transformers.
_HOME = {
    "NonFiniteLossError": "sdpo.guard",
    "SDPOCallback": "sdpo.callbacks",
    "SDPOConfig": "sdpo.config",
    "SDPOTrainer": "sdpo.trainer",
    "Score": "sdpo.types",
    "compare_teacher": "sdpo.teacher_check",
    "discover": "sdpo.discovery",
}

__all__ = [
    "NonFiniteLossError",
    "SDPOCallback",
    "SDPOConfig",
    "SDPOTrainer",
    "Score",
    "__version__",
    "compare_teacher",
    "discover",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sdpo' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
