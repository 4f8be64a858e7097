"""Marks inside a forward pass: module hooks on the embedding, the first and last layer, and the
head.

They stamp the step that is being launched and nothing else. Under CUDA graphs or `torch.compile`
Python hooks do not run (or would break the compilation), so they are not installed at all and the
pass stays one span.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from engine_hooks.base.device_timer import DeviceTimer
from engine_hooks.protocol import events
from engine_hooks.protocol.clock import now


class MarkedStep(Protocol):
    """A step whose parts are stamped, and its timer on a device."""

    event: events.Step
    device: DeviceTimer | None


class ModuleMarks:
    """The hooks on one model. `step` is the step being launched, None between launches."""

    def __init__(self, model: Any, on_fault: Callable[[str, BaseException], None]) -> None:
        self.step: MarkedStep | None = None
        self._thread = 0
        self._on_fault = on_fault
        self._handles: list[Any] = []
        self.missing: dict[str, str] = {}
        """Part → reason, for parts of the model that were not found."""
        self._install(model)

    def enter(self, step: MarkedStep) -> None:
        """Start stamping `step`, whose forward pass runs on this thread."""
        self._thread = threading.get_ident()
        self.step = step

    def leave(self) -> None:
        """Stop stamping: the forward pass is launched."""
        self.step = None

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _install(self, model: Any) -> None:
        embedding = _call(model, "get_input_embeddings")
        head = _call(model, "get_output_embeddings")
        layers = decoder_layers(model)
        if embedding is None:
            self.missing["embed"] = "the model names no input embedding"
        else:
            self._handles.append(embedding.register_forward_pre_hook(self._stamping("embed")))
        if layers is None:
            self.missing["layers"] = "the decoder layers were not found"
        else:
            self._handles.append(layers[0].register_forward_pre_hook(self._stamping("layers")))
            self._handles.append(layers[-1].register_forward_hook(self._stamping("head")))
        if head is None:
            self.missing["logits"] = "the model names no output embedding"
        else:
            self._handles.append(head.register_forward_hook(self._stamping("logits")))

    def _stamping(self, part: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            step = self.step
            if step is None or threading.get_ident() != self._thread:
                return
            try:
                setattr(step.event, part, now() - step.event.t)
                if step.device is not None:
                    step.device.mark(part)
            except Exception as error:
                self._on_fault(f"module:{part}", error)

        return hook


def _call(model: Any, name: str) -> Any:
    try:
        return getattr(model, name)()
    except (NotImplementedError, AttributeError):
        return None


def decoder_layers(model: Any) -> Any:
    """Return the outermost module list as long as the config says; None if there is none."""
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", lambda: config)()
    count = getattr(text_config, "num_hidden_layers", 0)
    for module in model.modules():
        if type(module).__name__ == "ModuleList" and len(module) == count and count > 0:
            return module
    return None
