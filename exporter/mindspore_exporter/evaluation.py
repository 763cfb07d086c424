"""An evaluation that the exporter runs itself, where the configuration asks for one.

It runs on the training thread, between two steps, because a MindSpore network must not run in two threads; it is the
one thing here that costs training time, and only who configured it pays.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from .config import EvaluationConfig
from .errors import ConfigError

log = logging.getLogger(__name__)


class OwnEvaluation:
    """Evaluates the loss of the network in training on at most `max_batches` batches, every `every_steps` global steps."""

    def __init__(self, config: EvaluationConfig) -> None:
        """Raises ConfigError when the dataset cannot be had."""
        self.every_steps = config.every_steps
        self._max_batches = config.max_batches
        self._dataset = _dataset(config.dataset)
        self._model: Any = None

    def due(self, step: int, steps: int) -> bool:
        """Whether the `steps` steps that ended with the global step `step` crossed a multiple of `every_steps`."""
        return step // self.every_steps > (step - steps) // self.every_steps

    def run(self, train_network: Any, network: Any, loss_function: Any) -> dict[str, float]:
        """Run it once; gives {"loss": mean loss}. The networks are those of the callback's parameters; the network's
        training mode is put back afterwards."""
        was_training = bool(train_network.training)
        try:
            if self._model is None:
                self._model = _model(train_network, network, loss_function)
            dataset = self._dataset.take(self._max_batches)
            return {name: float(value) for name, value in self._model.eval(dataset, dataset_sink_mode=False).items()}
        finally:
            train_network.set_train(was_training)


def _dataset(dataset: Any) -> Any:
    if dataset is None:
        raise ConfigError(
            "evaluation.dataset is not set; allowed: a MindSpore dataset (from Python), or 'module:function'"
        )
    if not isinstance(dataset, str):
        if not callable(getattr(dataset, "take", None)):
            raise ConfigError(
                f"evaluation.dataset is a {type(dataset).__name__}; allowed: a MindSpore dataset, or"
                " 'module:function' that returns one"
            )
        return dataset
    module, _, function = dataset.partition(":")
    try:
        return _dataset(getattr(importlib.import_module(module), function)())
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"evaluation.dataset = {dataset!r} cannot be used: {error}") from error


def _model(train_network: Any, network: Any, loss_function: Any) -> Any:
    """A model for evaluation over the network in training, its loss as the only metric."""
    from mindspore import nn
    from mindspore.train import Loss, Model

    if loss_function is not None:
        return Model(network, loss_function, metrics={"loss"})
    # A ready-made train cell holds the network that computes the loss.
    inner = getattr(train_network, "network", network)
    return Model(inner, eval_network=_LossOnly(inner, nn), eval_indexes=[0, 1, 2], metrics={"loss": Loss()})


def _LossOnly(network: Any, nn: Any) -> Any:  # noqa: N802 - makes a class: nn.Cell exists only with MindSpore
    class LossOnly(nn.Cell):  # type: ignore[misc]
        """The form that Model.eval wants of a network: loss, outputs, labels."""

        def __init__(self) -> None:
            super().__init__(auto_prefix=False)
            self.network = network

        def construct(self, *inputs: Any) -> Any:
            loss = self.network(*inputs)
            if isinstance(loss, (tuple, list)):
                loss = loss[0]
            return loss, loss, loss

    return LossOnly()
