"""How long one engine step takes, from what is in it: by theory (`step_model`) or as a fit found in
a trace (`fit`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tracer.analysis.model.costs import Costs, Counting
from tracer.analysis.model.devices import Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.roofline import Roofline, combine
from tracer.analysis.model.shape import ModelShape, Number


@dataclass(frozen=True, slots=True)
class StepModel:
    """ms. In the layers: `weights_ms` one read of their weights; for each token `token_ms`, for
    each token of context that is read `context_ms`, for each query-key pair `pair_ms`. In the LM
    head, which comes after them: `head_ms` one read of its weights, `sequence_ms` for each sequence
    that gets logits. On the host: `host_ms` and `host_sequence_ms` before the token is known,
    `after_ms` behind it, `gap_ms` until the next step.

    `dense`: attention multiplies every query of the step with every key of the step, whoever's they
    are (masked matrix products, as on CPUs): the caches of its batch-mates make a prompt more
    expensive.
    """

    weights_ms: float
    token_ms: float
    context_ms: float
    pair_ms: float
    head_ms: float = 0.0
    sequence_ms: float = 0.0
    host_ms: float = 0.0
    host_sequence_ms: float = 0.0
    after_ms: float = 0.0
    gap_ms: float = 0.0
    roofline: Roofline = Roofline.SMOOTH
    dense: bool = False

    def device_ms(
        self, tokens: Number, sequences: Number, context: Number, pairs: Number
    ) -> Number:
        """Return embedding, layers and LM head of a step: `tokens` run, of `sequences` that hold
        `context` tokens together when it ends; `pairs` query-key pairs when attention is not
        dense."""
        if self.dense:
            pairs = tokens * context
        bandwidth = self.weights_ms + self.context_ms * context
        arithmetic = self.token_ms * tokens + self.pair_ms * pairs
        return combine(arithmetic, bandwidth, self.roofline) + self.lm_head_ms(sequences)

    def lm_head_ms(self, sequences: Number) -> Number:
        return combine(self.sequence_ms * sequences, self.head_ms, self.roofline)

    def token_instant_ms(
        self, tokens: Number, sequences: Number, context: Number, pairs: Number
    ) -> Number:
        """Return the time from the start of a step until its tokens are known."""
        host = self.host_ms + self.host_sequence_ms * sequences
        return host + self.device_ms(tokens, sequences, context, pairs)

    def cycle_ms(self, tokens: Number, sequences: Number, context: Number, pairs: Number) -> Number:
        """Return the time from the start of a step to that of the next when there is more to do."""
        known = self.token_instant_ms(tokens, sequences, context, pairs)
        return known + self.after_ms + self.gap_ms


def step_model(
    model: ModelShape, device: Device, efficiency: Efficiency | None = None, tp: int = 1
) -> StepModel:
    """Return what theory says, counted exactly. First order where layers look back over a window
    only: the slope at no context."""
    efficiency = efficiency or Efficiency.usual(device)
    costs = Costs(model, device, efficiency, Counting.EXACT, tp)
    link = float(costs.link_ms(1.0)) - float(costs.link_ms(0.0))
    return StepModel(
        weights_ms=float(costs.bandwidth_ms(costs.weight_bytes(math.inf, head=False))),
        head_ms=float(costs.bandwidth_ms(costs.head_bytes())),
        token_ms=float(costs.arithmetic_ms(costs.matrix_flops(1.0, 0.0))) + link,
        sequence_ms=float(costs.arithmetic_ms(costs.head_flops(1.0))),
        context_ms=float(costs.bandwidth_ms(costs.kv_bytes(1.0))),
        pair_ms=float(costs.arithmetic_ms(0.0, costs.decode_attention(1.0))),
        host_ms=efficiency.host_ms + float(costs.link_ms(0.0)),
        host_sequence_ms=efficiency.host_us / 1e3,
        roofline=Roofline.MAX if efficiency.roofline is Roofline.SINGLE else efficiency.roofline,
    )  # fmt: skip
