"""A trace as one self-contained page: a waterfall to hover and to walk through with the keys, light
or dark.

Nothing is fetched: a content security policy forbids it, and lets run no script but the one that is
in the page. All text of the trace is in a block of JSON that no parser takes for markup, and gets
onto the page as text only; the totals are plain markup, so that they are there without scripts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any, Final

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import STAGES
from tracer.export.fields import fields
from tracer.export.stage_colours import STAGE_COLOURS_DARK, STAGE_COLOURS_LIGHT
from tracer.export.summary import TIMERS, context, quantiles, totals_line
from tracer.export.whole import RequestRow, Whole
from tracer.format.figures import milliseconds, percentage
from tracer.format.text import clean

_DIGITS: Final = 4
"""Decimals of a millisecond: tenths of a microsecond."""


def page_text(whole: Whole) -> str:
    folder = files("tracer.export") / "web"
    template, style, script = (
        (folder / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    style = style.replace("{{light}}", _LIGHT).replace("{{dark}}", _DARK)
    values = {
        "policy": _policy(style, script),
        "title": _html(f"{whole.name} · tracer"),
        "context": _html(" · ".join(context(whole))),
        "totals": _html(totals_line(whole.totals())),
        "timers": "".join(_timer(whole, name, label) for name, label in TIMERS.items()),
        "legend": "".join(
            f'<li><button aria-pressed="false" title="{_html(f"{known.begins} → {known.ends}")}">'
            f'<i class="s{known.stage.value}"></i>{_html(known.label)}</button></li>'
            for known in STAGES
        ),
        "stages": _stages(whole),
        "style": style,
        "script": script,
        "data": _json(_data(whole)),
    }
    pieces = template.split("{{")
    return pieces[0] + "".join(
        values[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:])
    )


def _policy(style: str, script: str) -> str:
    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")

    return (
        f"default-src 'none'; style-src 'sha256-{digest(style)}'; script-src "
        f"'sha256-{digest(script)}'; base-uri 'none'; form-action 'none'"
    )


def _timer(whole: Whole, name: str, label: str) -> str:
    figures = " / ".join(quantiles(whole.snapshot.timers.get(name)))
    return f"<li><b>{_html(label)} ms · p50 / p95 / p99</b><span>{_html(figures)}</span></li>"


def _stages(whole: Whole) -> str:
    totals = whole.totals()
    everything = sum(whole.length_ms(row.view) for row in whole.requests)
    lines = []
    for known in STAGES:
        count = sum(row.view.stages[known.stage - 1].ms is not None for row in whole.requests)
        ms = totals.stage_ms[known.stage]
        share = _html(percentage(ms / everything if everything else None))
        lines.append(
            f'<tr data-stage="{known.stage.id}"><td class="n">{known.stage.value}</td>'
            f'<td><i class="s{known.stage.value}"></i>{_html(known.label)}</td>'
            f'<td class="n">{count:,}</td>'
            f'<td class="n" title="{ms!r}">{milliseconds(ms)}</td><td class="n">{share}</td>'
            f"<td>{_html(known.bounded_by)}</td><td>{_html(known.worse)}</td></tr>"
        )
    return "\n".join(lines)


def _data(whole: Whole) -> dict[str, Any]:
    return {
        "stages": [
            {"id": known.stage.id, "label": known.label, "bounded": known.bounded_by}
            for known in STAGES
        ],
        "requests": [_request(whole, row) for row in whole.requests],
    }


def _request(whole: Whole, row: RequestRow) -> dict[str, Any]:
    view = row.view

    def since(t: int) -> float:
        return round((t - whole.began) / NS_PER_MS, _DIGITS)

    stages = [
        (
            stage.stage.value,
            None if stage.begin is None else since(stage.begin),
            _rounded(stage.ms),
            stage.status.value,
            _rounded(stage.wait_ms),
            clean(stage.reason),
        )
        for stage in view.stages
    ]
    made: dict[str, Any] = {
        **fields(view, "id phase"),
        "received": since(view.received),
        "length": _rounded(whole.length_ms(view)),
        **fields(view, prompt="prompt_tokens", cached="cached_tokens", output="output_tokens"),
        **fields(view, reason="finish_reason", error="error", model="model"),
        **fields(view, "preemptions incomplete"),
        **{
            name: _rounded(getattr(view, f"{name}_ms"))
            for name in ("queue", "prefill", "ttft", "tpot", "e2e", "unattributed")
        },
        "bar": [
            (segment.stage.value, since(segment.begin), since(stop), int(segment.waiting))
            for segment, stop in whole.segments(view)
        ],
        "all": stages,
        "stages": [stage for stage in stages if stage[2] is not None],
    }
    return made | {name: clean(text, keep_newlines=True) for name, text in row.texts()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _html(text: str) -> str:
    return html.escape(clean(text))


def _json(data: dict[str, Any]) -> str:
    """JSON in which no character means anything to a parser of HTML."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _variables(stages: tuple[str, ...], **roles: str) -> str:
    colours = {f"s{number}": colour for number, colour in enumerate(stages, 1)}
    return " ".join(f"--{name}: {value};" for name, value in (roles | colours).items())


_LIGHT: Final = _variables(
    STAGE_COLOURS_LIGHT, back="#fafaf7", panel="#efefea", chosen="#dbe6f5", text="#1d2530",
    dim="#59636f", line="#cfd2cd", grid="#e4e5e1", accent="#0b6f99", veil="rgb(250 250 247 / .7)",
)  # fmt: skip
_DARK: Final = _variables(
    STAGE_COLOURS_DARK, back="#0d1117", panel="#141b24", chosen="#1e2d42", text="#d5dce6",
    dim="#8b97a7", line="#2b3542", grid="#1d2530", accent="#76dbf6", veil="rgb(13 17 23 / .7)",
)  # fmt: skip
