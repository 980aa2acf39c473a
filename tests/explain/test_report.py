"""What explain says is what the plan does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from kvflow.cli import main
from kvflow.explain.prices import price_links, synthetic_binding
from kvflow.explain.render import nbytes_text, render, seconds_text
from kvflow.explain.report import Report, explain
from kvflow.layouts import KVCacheSpec, KVLayout, Paged, Placement, Replicated
from kvflow.layouts.text import parse_layout
from kvflow.testing import Case, cases
from kvflow.transfers.cost import STRATEGIES, Costs, Rate
from kvflow.transfers.plan import Plan
from kvflow.transfers.planner import plan_transfer


def planned(src: str, dst: str, tokens: tuple[int, int], model: str = "tiny/fp8") -> Plan:
    return plan_transfer(*(parse_layout(f"{side} {model}") for side in (src, dst)), tokens)


def explained(src: str, dst: str, tokens: tuple[int, int], model: str = "tiny/fp8") -> Report:
    return explain(planned(src, dst, tokens, model))


@settings(max_examples=25)
@given(cases(max_tokens=30, max_shards=4))
def test_the_numbers_of_any_plan_add_up(case: Case) -> None:
    plan = plan_transfer(case.src.layout, case.dst.layout, case.tokens)
    report = explain(plan)
    assert (report.digest, report.nbytes, report.num_runs) == (
        plan.digest, plan.nbytes, plan.num_runs,
    )  # fmt: skip
    assert sum(link.nbytes for link in report.links) == plan.link_nbytes
    assert [(link.src_rank, link.dst_rank) for link in report.links] == list(plan.links)
    assert sum(source.nbytes for source in report.sources) == plan.link_nbytes
    assert [source.rank for source in report.sources] == list(plan.src.ranks)
    runs = {id(part.runs): part.runs for part in plan.parts}.values()
    assert sum(r.num_runs for r in report.run_lengths) == sum(map(len, runs))
    assert sum(r.num_tokens for r in report.run_lengths) == sum(r.num_tokens for r in runs)
    assert report.pick_seconds == min(s.seconds for s in report.strategies)
    assert render(report)
    assert json.loads(json.dumps(report.as_json()))["digest"] == plan.digest


def test_golden_report() -> None:
    report = explained("dcp8(i=1) paged(64)", "replicated paged(64)", (0, 2000), "glm-5.3/fp8")
    assert report.nbytes == report.link_nbytes == 2000 * 54728
    assert [link.num_tokens for link in report.links] == [250] * 8
    assert [(r.low, r.num_runs, r.num_tokens) for r in report.run_lengths] == [
        (2, 8, 16), (8, 248, 1984),
    ]  # fmt: skip
    totals = {s.name: s for s in report.strategies}
    assert totals["stage"].num_descriptors == 8 * 4 * 101  # 4 pages of 64 a rank, 101 components
    assert totals["stage"].staging_nbytes == 8 * 4 * 3_502_592
    assert totals["pack"].staging_nbytes == 2000 * 54728
    assert totals["runs"].staging_nbytes == 0
    assert totals["runs"].num_descriptors == 2000 * (79 + 2 * 22)  # rows, and two planes a key
    assert report.components.moved == "all"
    text = render(report)
    assert "page j of 64 tokens is on shard j mod 8             1,969     98%" in text
    assert "the stride is that of one axis of 4, not of all 8   1,996    100%" in text
    assert "0 -> 0" in text
    assert text.index("from  dcp8(i=1)") < text.index("to    replicated") < text.index("links: 8")


def test_prices_follow_the_costs() -> None:
    plan = planned("dcp2(i=1) paged(4)", "replicated paged(8)", (0, 30))
    free, dear = Rate(0, 0), Rate(1, 0)
    for costs, wanted in (
        (Costs(wire=dear, copy=free, round_trip=0), ("pack", "stage")),
        (Costs(wire=free, copy=dear, round_trip=9), ("pages", "strided", "runs")),
    ):
        report = explain(plan, costs)
        assert report.pick in wanted
        assert all(link.pick in wanted for link in report.links)
    packed = explain(plan, Costs(wire=free, copy=free, round_trip=7.0))
    seconds = {s.name: s.seconds for s in packed.strategies}
    assert seconds["pack"] == 14.0  # one request a link, both links into one target
    assert max(link.seconds["pack"] for link in packed.links) == 7.0


def test_links_into_one_target_follow_each_other_and_targets_do_not_wait() -> None:
    costs = Costs(wire=Rate(1.0, 0.0), copy=Rate(0, 0), round_trip=0)
    one = explain(planned("dcp2(i=4) paged(4)", "replicated paged(4)", (0, 32)), costs)
    two = explain(planned("dcp2(i=4) paged(4)", "replicated(2) paged(4)", (0, 32)), costs)
    seconds = [{s.name: s.seconds for s in r.strategies}["pages"] for r in (one, two)]
    assert seconds[0] == seconds[1] == sum(link.seconds["pages"] for link in one.links)
    staged = [{s.name: s.staging_nbytes for s in r.strategies}["pack"] for r in (one, two)]
    assert staged[0] == staged[1] == one.nbytes


def test_replicas_are_used_and_copies_on_a_host_are_told() -> None:
    report = explained("replicated(4) paged(4)", "replicated paged(4)", (0, 64))
    assert [s.num_tokens for s in report.sources] == [16, 16, 16, 16]
    text = render(report)
    assert "source ranks read: 4 of 4, the busiest gives 1.00x the mean of those" in text
    assert "replicas of one shard: rank 0 16, rank 1 16, rank 2 16, rank 3 16 tokens" in text
    hosted = explained("replicated paged(4)", "replicated(2) paged(4) hosts(0,1)", (0, 64))
    assert hosted.link_nbytes * 2 == hosted.nbytes
    assert "then copied on the targets' hosts" in render(hosted)


def test_absent_components_are_named_with_their_bytes() -> None:
    src = parse_layout("dcp2 paged(4) glm-5.3/fp8")
    main = [c for c in src.spec.components if (c.kind, c.part) == ("latent", "main")]
    dst = KVLayout.uniform(
        KVCacheSpec(main, src.spec.content), Placement.simple(Replicated()), Paged(4)
    )
    gone = set(src.spec.names) - set(dst.spec.names)
    report = explain(plan_transfer(src, dst, (0, 8), absent=gone))
    assert report.components.moved == "all"
    assert report.components.moved_nbytes == 78 * 656
    assert report.components.absent_nbytes == 22 * 132 + 656
    assert f"components absent: indexer.0-2+6-74/4,all.78 ({22 * 132 + 656:,} bytes" in render(
        report
    )


def test_an_empty_transfer_is_explained() -> None:
    report = explained("dcp2 paged(4)", "replicated paged(4)", (7, 7))
    assert (report.links, report.run_lengths, report.nbytes) == ((), (), 0)
    assert "links: 0" in render(report)


def test_many_links_are_cut_short() -> None:
    text = render(explained("dcp8 paged(4)", "dcp5 paged(4)", (0, 200)))
    assert "and 24 more" in text


def test_the_synthetic_request_is_permuted_and_always_the_same() -> None:
    layout = parse_layout("dcp2 latent:paged(4) indexer:pool(8) tiny")
    tables = [dict(synthetic_binding(layout, 400).tables) for _ in range(2)]
    for name, ids in tables[0].items():
        assert sorted(ids) == list(range(len(ids)))
        assert list(ids) != sorted(ids)
        assert list(ids) == list(tables[1][name])
    assert synthetic_binding(layout, 0).num_blocks == {"latent": 1, "indexer": 1}


def test_units() -> None:
    assert [nbytes_text(n) for n in (0, 999, 1000, 2**20, 3 * 2**40)] == [
        "0 B", "999 B", "1.0 KiB", "1.0 MiB", "3.0 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (2.5, 0.0125, 3.2e-6)] == ["2.5 s", "12.5 ms", "3.2 us"]


def test_every_strategy_is_priced_on_every_link() -> None:
    plan = planned("tp2*dcp2(i=4) paged(4)", "replicated paged(16)", (5, 60))
    for link in price_links(plan, Costs()):
        for by_strategy in (link.seconds, link.num_descriptors, link.staged):
            assert tuple(by_strategy) == STRATEGIES
        assert link.seconds[link.pick] == min(link.seconds.values())


# --- the command ----------------------------------------------------------------------------------

PAIR = ["dcp8(i=1) paged(64)", "replicated paged(64)", "--tokens", "2000"]


def test_the_command_prints_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *PAIR]) == 0
    assert "what a simpler formula would misplace" in capsys.readouterr().out
    assert main(["explain", *PAIR, "--start", "1999", "--json", "--model", "tiny"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == [1999, 2000]
    assert told["src"] == "dcp8(i=1) paged(64) tiny/fp8"
    assert [n["name"] for n in told["naive"]][:2] == ["page", "width"]
    assert told["links"][0]["pick"] in STRATEGIES


def test_the_command_reads_costs_models_and_absent_components(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(Costs(wire=Rate(1.0, 0.0)).to_json())
    config = Path(__file__).parents[2] / "examples/models/tiny-glm-python/config.json"
    model = ["--model", f"{config}/bfloat16", "--absent", "all.4"]
    assert main(["explain", *PAIR, "--costs", str(costs), *model, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["components"] == {
        "moved": "all.0-3", "moved_nbytes": 4 * 1152 + 2 * 256,
        "absent": "all.4", "absent_nbytes": 1152 + 256,
    }  # fmt: skip
    assert {s["name"]: s["seconds"] for s in told["strategies"]}["runs"] == 2000 * 6


def test_files_that_hold_something_else_end_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.json"
    for held, says in ((b"[1]", "holds a list, must be"), (b"\xff", "decode"), (b"{", "no JSON")):
        path.write_bytes(held)
        assert main(["explain", *PAIR, "--model", str(path)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: "dcp8 pagd(64)"}, "'pagd(64)' at column 6 of 'dcp8 pagd(64)': expected a paging"),
        ({3: "-1"}, "--start 0 is behind --tokens -1"),
        ({4: ["--start", "2001"]}, "--start 2001 is behind --tokens 2000"),
        ({4: ["--start", "-1"]}, "tokens [-1, 2000) must be a range inside"),
        ({4: ["--model", "glm-9"]}, "'glm-9' at column 1 of 'glm-9': expected a model"),
        ({4: ["--absent", "foo"]}, "'foo' at column 1 of 'foo': expected one of latent"),
        ({1: "replicated paged(4) tiny"}, "are neither moved nor named absent"),
        ({4: ["--costs", "/nowhere.json"]}, "No such file"),
    ],
)
def test_bad_input_ends_with_status_2(
    changes: dict[int, str | list[str]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words: list[str] = []
    for i, word in enumerate([*PAIR, []]):
        said = changes.get(i, word)
        words += said if isinstance(said, list) else [said]
    for command in ("explain", "draw"):
        if command == "draw" and "--costs" in words:
            continue
        assert main([command, *words]) == 2
        told = capsys.readouterr()
        assert told.err.startswith(f"kvflow {command}: ")
        assert message in told.err
        assert not told.out


def test_bad_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    for held in (b"{", b"\xff", b"[" * 10**5, b"9" * 5000):
        bad.write_bytes(held)
        for flag, says in (("--costs", "no costs: "), ("--model", "bad.json is no JSON: ")):
            assert main(["explain", *PAIR, flag, str(bad)]) == 2
            assert says in capsys.readouterr().err


def test_who_stops_reading_gets_no_complaint() -> None:
    """As `kvflow explain ... | head -1`: here nobody reads a byte."""
    unread, output = os.pipe()
    os.close(unread)
    command = ["explain", "dcp2(i=1) paged(4) tiny/fp8", "replicated(1) paged(4) tiny/fp8"]
    run = f"import sys; from kvflow.cli import main; sys.exit(main({[*command, '--tokens', '9']}))"
    with os.fdopen(output, "w") as stdout:
        ended = subprocess.run(
            [sys.executable, "-c", run], stdout=stdout, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_command_without_an_output_does_its_work() -> None:
    run = "import sys; sys.stdout = None; from kvflow.cli import main; sys.exit(main(['doctor']))"
    ended = subprocess.run([sys.executable, "-c", run], stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
