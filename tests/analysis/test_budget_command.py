"""``tracer budget``: flags in, table and document out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_hooks.protocol.stages import Stage
from tracer.analysis.budget.options import budget_of
from tracer.analysis.errors import AnalysisError
from tracer.cli.workload_options import add_workload_options
from tracer.export.budget_text import budget_document, budget_text
from tracer.format.text import cell_width


def options(*arguments: str) -> argparse.Namespace:
    """The flags as the command line reads them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_workload_options(parser)
    return parser.parse_args(arguments)


def budget_main(
    options: argparse.Namespace, *, width: int = 100, unicode: bool = True
) -> tuple[str, dict[str, Any]]:
    """The text and the document of a budget."""
    made = budget_of(options)
    return budget_text(made, width=width, unicode=unicode), budget_document(made)


def test_the_document_has_the_reference_figures() -> None:
    _, document = budget_main(
        options("--model", "llama-3.1-8b", "--device", "h100-sxm", "--prompt", "2000")
    )
    assert list(document["stages"]) == [stage.id for stage in Stage]
    assert document["stages"]["prefill"]["ms"] == pytest.approx(86.5, rel=0.005)
    assert document["stages"]["prefill"]["bound_by"] == "arithmetic"
    assert document["stages"]["decode"]["bound_by"] == "memory bandwidth"
    assert document["ridge_batch"] == pytest.approx(148, rel=0.005)
    assert document["kv_bytes"] == 2000 * 131_072
    assert document["users_worst_case"] == 53
    assert document["ttft_ms"] == pytest.approx(89, rel=0.01)
    assert sum(row["share"] for row in document["stages"].values()) == pytest.approx(1.0, abs=0.001)
    assert document["assumptions"]
    again = json.loads(msgspec.json.encode(document))
    assert again["total_ms"] == document["total_ms"]


def test_every_flag_reaches_the_budget() -> None:
    arguments = (
        "--model mixtral-8x7b --device h200 --prompt 32k --cached 1,000 --output 1_000 --batch 32 "
        "--context 2000 "
        "--chunk 4096 --draft 3 --accept 0.6 --draft-cost 0.1 --tp 2 --weights fp8 --kv-dtype fp8 "
        "--mfu 0.5 --mbu 0.7 "
        "--host-ms 1 --host-us 10 --front-end 5 --roofline max --count exact --ignore-kv --kv-pool "
        "100 --longest 4096 "
        "--mean-tokens 1000 --block-size 32"
    )
    text, document = budget_main(options(*arguments.split()))
    work, tuned = document["workload"], document["efficiency"]
    assert (work["prompt"], work["cached"], work["output"], work["batch"]) == (
        32_768,
        1000,
        1000,
        32,
    )
    assert work["speculation"]["draft"] == 3
    assert tuned == {
        "mfu": 0.5,
        "mbu": 0.7,
        "host_ms": 1.0,
        "host_us": 10.0,
        "roofline": "max",
        "count": "exact",
        "ignore_kv": True,
    }
    assert document["model"]["weight_dtype"] == document["model"]["kv_dtype"] == "fp8"
    assert document["device"]["count"] == 2
    assert document["kv_pool_bytes"] == 100 * 2**30
    assert document["longest"] == 4096
    assert document["kv_blocks"] == 1024
    assert "H200 SXM × 2" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_the_table_fits_and_needs_no_more_than_ascii(width: int, unicode: bool) -> None:
    text, _ = budget_main(options(), width=width, unicode=unicode)
    assert all(cell_width(line) <= width for line in text.splitlines())
    assert unicode or text.isascii()
    assert "modelled, not measured" in " ".join(text.split())


def test_the_longest_stage_has_the_longest_bar() -> None:
    text, _ = budget_main(options(), width=120)
    rows = [line for line in text.splitlines() if line[:3].strip().isdigit()]
    assert len(rows) == 12
    assert max(rows, key=lambda row: row.count("█")).split()[:2] == ["11", "decode"]


def test_a_folder_can_be_asked_about(tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b]0;name"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "vocab_size": 100,
            }
        )
    )
    text, document = budget_main(options("--model", str(folder), "--device", "l4"))
    assert "\x1b" not in text
    assert "\x1b" not in json.dumps(document, ensure_ascii=False)
    assert document["model"]["layers"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "gpt-17"],
        ["--device", "abacus"],
        ["--cached", "2000"],
        ["--chunk", "8", "--batch", "9"],
        ["--kv-pool", "1e99"],
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((AnalysisError, SystemExit)) as caught:
        budget_main(options(*arguments))
    said = (
        str(caught.value)
        if isinstance(caught.value, AnalysisError)
        else capsys.readouterr().err.splitlines()[-1]
    )
    assert said
    assert "\n" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt", "0"],
        ["--prompt", "-1"],
        ["--prompt", "many"],
        ["--prompt", "1e9"],
        ["--mfu", "0"],
        ["--mfu", "nan"],
        ["--mbu", "1.1"],
        ["--tp", "0"],
        ["--accept", "2"],
        ["--weights", "fp3"],
        ["--roofline", "flat"],
    ],
)
def test_a_flag_out_of_range_is_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options(*arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_weights_that_do_not_fit_are_said_to() -> None:
    _, document = budget_main(options("--model", "llama-3.3-70b", "--device", "l4"))
    assert not document["fits"]
    assert document["users_worst_case"] == 0
    assert "no room" in budget_main(options("--model", "llama-3.3-70b", "--device", "l4"))[0]


def test_the_text_of_a_budget_can_be_asked_for_alone() -> None:
    from tracer.analysis.budget.reference import reference

    assert "148 sequences" in budget_text(reference())
