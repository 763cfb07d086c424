"""Makes the callback known to MindSpore Transformers.

Importing this module registers `PrometheusMonitor` under its name, so that a YAML may say `- type: PrometheusMonitor`.
Its contract: registration and the adapter of the second, Trainer-style callback interface live here; correction of losses
belongs to `decode.py`, parallel layouts to `identity.py`.
"""

from __future__ import annotations

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from .callback import PrometheusMonitor

MindFormerRegister.register_cls(PrometheusMonitor, MindFormerModuleType.CALLBACK)

__all__ = ["PrometheusMonitor"]
