"""The workload of a budget: one request, the sequences beside it, and how the engine runs them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tracer.analysis.errors import AnalysisError

MOST_TOKENS = 100_000_000
MOST_SEQUENCES = 1_000_000


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: `draft` tokens proposed a step, each accepted with probability
    `accept`; proposing one costs `cost` of a step of the target model."""

    draft: int = 4
    accept: float = 0.7
    cost: float = 0.05

    @property
    def tokens_per_step(self) -> float:
        """Tokens of an average step: those accepted before the first refusal, and one of the
        target's."""
        if self.accept >= 1.0:
            return self.draft + 1.0
        return float((1.0 - self.accept ** (self.draft + 1)) / (1.0 - self.accept))


@dataclass(frozen=True, slots=True)
class Workload:
    """One request among others. Tokens: `prompt`, `cached` of them found in the prefix cache,
    `output`. `batch` sequences run in a step, this one included; the others hold `context` tokens
    each. `chunk` tokens a step at most (0: the prompt in one pass)."""

    prompt: int = 2000
    cached: int = 0
    output: int = 300
    batch: int = 1
    context: int = 0
    chunk: int = 0
    speculation: Speculation | None = None

    @property
    def computed(self) -> int:
        return self.prompt - self.cached

    @property
    def chunk_room(self) -> int:
        """Prompt tokens of a full pass: what the sequences that decode leave of a chunk."""
        return max(1, self.chunk - (self.batch - 1)) if self.chunk else self.prompt

    def __post_init__(self) -> None:
        for name in ("prompt", "cached", "output", "batch", "context", "chunk"):
            value = getattr(self, name)
            least = 1 if name in ("prompt", "output", "batch") else 0
            most = MOST_SEQUENCES if name == "batch" else MOST_TOKENS
            if not least <= value <= most:
                raise AnalysisError(f"{name} must be between {least:,} and {most:,}, not {value:,}")
        if self.cached >= self.prompt:
            raise AnalysisError(
                f"cached ({self.cached:,}) must be below the prompt ({self.prompt:,}): its last "
                "token is computed"
            )
        if 0 < self.chunk <= self.batch - 1:
            raise AnalysisError(
                f"chunks of {self.chunk:,} tokens leave no room for a prompt beside "
                f"{self.batch - 1:,} sequences"
            )
        spec = self.speculation
        if spec is None:
            return
        possible = 0.0 <= spec.accept <= 1.0 and 0.0 <= spec.cost < math.inf
        if not 1 <= spec.draft <= 64 or not possible:
            raise AnalysisError(
                "speculation: 1 to 64 draft tokens, an acceptance of 0 to 1, a cost of 0 or more"
            )
