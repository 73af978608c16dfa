"""A trained model outside of its job: exports of it, and `Predictor`, which predicts with it (docs/serving.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .predictor import Prediction, Predictor, PredictorStats

__all__ = ["Prediction", "Predictor", "PredictorStats"]


def __getattr__(name: str) -> Any:
    """Imports the predictor, which needs Paddle, when it is asked for."""
    if name in __all__:
        from . import predictor

        return getattr(predictor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
