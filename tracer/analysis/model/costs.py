"""FLOPs, bytes and time of a pass through a model, on each of the devices that share it.

Two ways to count. *Textbook*: every weight counts for every token, all weights are read in each
pass, and attention computes the masked half too; the figures that everyone quotes come from it.
*Exact*, as kernels do: the input embedding is only gathered from, the head runs for one position a
sequence, the masked half is skipped.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

import numpy as np

from tracer.analysis.model.devices import DEVICES, Device
from tracer.analysis.model.efficiency import Efficiency
from tracer.analysis.model.roofline import Roofline, combine
from tracer.analysis.model.shape import ModelShape, Number


class Counting(enum.StrEnum):
    TEXTBOOK = "textbook"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass, or many at once: FLOPs and bytes on each device, and the times that follow."""

    flops: Number
    bytes: Number
    arithmetic_ms: Number
    bandwidth_ms: Number
    link_ms: Number
    ms: Number


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of `model` on `device`, shared among `tp` of them. `ignore_kv` leaves reads of the KV
    cache out."""

    model: ModelShape
    device: Device
    efficiency: Efficiency
    counting: Counting = Counting.TEXTBOOK
    tp: int = 1
    ignore_kv: bool = False

    @classmethod
    def quantities(cls, model: ModelShape, tp: int = 1) -> Costs:
        """Return exact costs of which only FLOPs and bytes are asked, the same on every device."""
        return cls(model, next(iter(DEVICES.values())), Efficiency(), Counting.EXACT, tp)

    def matrix_flops(self, tokens: Number, rows: Number = 1.0) -> Number:
        """Return the FLOPs of the matrix products for `tokens` tokens, `rows` of which need logits
        (exact counting adds the LM head for them alone)."""
        if self.counting is Counting.TEXTBOOK:
            return 2.0 * self.model.active_params / self.tp * tokens
        return 2.0 * self.model.layer_params / self.tp * tokens + self.head_flops(rows)

    def head_flops(self, rows: Number) -> Number:
        return 2.0 * self.model.head_params / self.tp * rows

    def head_bytes(self) -> float:
        return self.model.head_bytes / self.tp

    def all_weight_bytes(self) -> float:
        """Return the bytes of weights that a pass with very many tokens reads: every expert."""
        return float(self.weight_bytes(math.inf))

    def weight_bytes(self, tokens: Number, *, head: bool = True) -> Number:
        """Return the bytes of weights that a pass over `tokens` tokens reads; of the experts only
        those that a token chose, taken to choose evenly. `head` includes the LM head."""
        model = self.model
        total: Number = model.weight_bytes
        if self.counting is Counting.EXACT and not model.tied:
            total -= model.embedding_bytes
        if not head:
            total -= model.head_bytes
        if model.experts:
            missed = 1.0 - model.experts_per_token / model.experts
            total = total - model.expert_bytes * missed ** np.maximum(tokens, 1.0)
        return total / self.tp

    def kv_bytes(self, context: Number) -> Number:
        """Return the bytes of the KV cache of `context` tokens that each device holds: heads are
        shared out, but never split."""
        shares = min(self.tp, max(1, self.model.kv_heads))
        return self.model.kv_bytes(context) / shares

    def prefill_attention(self, begin: Number, end: Number) -> Number:
        """Return the FLOPs of attention for the positions `begin` … `end` of a prompt: each attends
        to all before it.

        Textbook: 4·L·d·(end² − begin²), which includes the masked half; exact: half of it.
        """
        total: Number = 0.0
        for group in self.model.attention:
            if group.window is None:
                area = (end * end - begin * begin) / 2.0
            else:
                inside = np.minimum(end, group.window), np.minimum(begin, group.window)
                beyond = np.maximum(end - group.window, 0.0) - np.maximum(begin - group.window, 0.0)
                area = (inside[0] ** 2 - inside[1] ** 2) / 2.0 + group.window * beyond
            total = total + group.count * area
        masked = 2.0 if self.counting is Counting.TEXTBOOK else 1.0
        return 4.0 * self.model.attention_width * masked * total / self.tp

    def decode_attention(self, context: Number) -> Number:
        """Return the FLOPs of attention for one new token after `context` tokens."""
        total: Number = 0.0
        for group in self.model.attention:
            reach = context if group.window is None else np.minimum(context, group.window)
            total = total + group.count * reach
        return 4.0 * self.model.attention_width / self.tp * total

    def arithmetic_ms(self, matrix: Number, attention: Number = 0.0) -> Number:
        """Return the time of FLOPs of matrix products and of attention; attention runs in 16 bits
        at least."""
        model, device = self.model, self.device
        wide = "fp32" if model.compute_dtype == "fp32" else "bf16"
        rate = 1e3 / self.efficiency.mfu
        return rate * (matrix / device.peak(model.compute_dtype) + attention / device.peak(wide))

    def bandwidth_ms(self, size: Number) -> Number:
        return size * 1e3 / (self.efficiency.mbu * self.device.bandwidth)

    def link_ms(self, tokens: Number) -> Number:
        """Return the time of the two all-reduces that each layer needs when `tp` devices share it:
        first order, a ring."""
        if self.tp < 2:
            return 0.0 * tokens
        crossing = 2.0 * (self.tp - 1) / self.tp * self.model.hidden * 2.0 / self.device.link * 1e3
        return 2.0 * self.model.layers * (self.device.link_ms + crossing * tokens)

    def run(
        self, tokens: Number, *, rows: Number = 1.0, attention: Number = 0.0, kv_read: Number = 0.0,
        kv_write: Number = 0.0, head: bool = True,
    ) -> Pass:  # fmt: skip
        """Return a pass over `tokens` tokens: `attention` FLOPs, `kv_read` and `kv_write` bytes on
        each device."""
        matrix = self.matrix_flops(tokens, rows if head else 0.0)
        read = 0.0 if self.ignore_kv else kv_read
        size = self.weight_bytes(tokens, head=head) + read + kv_write
        arithmetic, bandwidth = self.arithmetic_ms(matrix, attention), self.bandwidth_ms(size)
        link = self.link_ms(tokens)
        return Pass(
            matrix + attention, size, arithmetic, bandwidth, link,
            combine(arithmetic, bandwidth, self.efficiency.roofline) + link,
        )  # fmt: skip

    def decode_step(
        self, context: Number, batch: float = 1.0, others: float = 0.0, draft: float = 0.0
    ) -> Pass:
        """Return a step in which `batch` sequences take one token each (or `draft` more, to
        verify): one of them after `context` tokens, the others after `others` each."""
        width = 1.0 + draft
        tokens = batch * width
        attention = self.decode_attention(context) + (batch - 1.0) * self.decode_attention(others)
        done = self.run(
            tokens, rows=tokens, attention=width * attention,
            kv_read=self.kv_bytes(context) + (batch - 1.0) * self.kv_bytes(others),
            kv_write=self.kv_bytes(1.0) * tokens,
        )  # fmt: skip
        if self.efficiency.roofline is Roofline.SINGLE:
            return replace(done, ms=done.bandwidth_ms + done.link_ms)
        return done

    def host_ms(self, batch: Number) -> Number:
        return self.efficiency.host_ms + self.efficiency.host_us * batch / 1e3

    def ridge(self, *, at_peak: bool = False) -> float:
        """Return the batch at which computing takes as long as reading the weights, with the KV
        cache left out."""
        compute = 1e3 * self.matrix_flops(1.0, 1.0) / self.device.peak(self.model.compute_dtype)
        read = 1e3 * self.all_weight_bytes() / self.device.bandwidth
        if not at_peak:
            compute, read = compute / self.efficiency.mfu, read / self.efficiency.mbu
        return float(read / compute)

    def ridge_at(self, context: float) -> float | None:
        """Return that batch when each sequence reads `context` tokens of KV cache in every step;
        None when no batch reaches it because the cache takes longer to read than a token to
        compute."""
        flops = self.matrix_flops(1.0, 1.0)
        each = float(self.arithmetic_ms(flops, self.decode_attention(context)))
        read = float(self.bandwidth_ms(self.kv_bytes(context)))
        weights = float(self.bandwidth_ms(self.all_weight_bytes()))
        return weights / (each - read) if each > read else None
