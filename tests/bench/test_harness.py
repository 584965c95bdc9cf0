import json

import attrs
import pytest
import torch
from click.testing import CliRunner

from bench import providers, run
from bench.cli import main
from bench.compare import compare
from bench.providers import Provider, Unavailable
from bench.report import markdown
from bench.results import Results, Row, compare_to, environment, geometric_means
from bench.suites import SUITES
from bench.timing import Sample

CPU = torch.device("cpu")


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    result = invoke("--quick", "--json", folder / "r.json", "--plot", folder / "r.png")
    assert result.exit_code == 0, result.output
    return folder


def row(provider="ours", median=10.0, **changes):
    made = Row("scatter", "64_of_128", provider, "kernel", "shape", 64, 8192)
    return attrs.evolve(made.timed(Sample(median, median * 0.99, median * 1.01, 50)), **changes)


def results(*rows):
    return Results(list(rows), environment(CPU, quick=True))


def test_a_quick_run_goes_through_every_suite_and_leaves_json_and_a_plot(quick):
    document = json.loads((quick / "r.json").read_text())
    assert set(document) == {"format", "environment", "results", "geometric_mean_ratio"}
    assert {"device", "versions", "clocks", "quick", "date", "threads", "l2_bytes"} <= set(document["environment"])
    assert {"python", "torch", "triton", "numpy"} <= set(document["environment"]["versions"])
    assert {result["suite"] for result in document["results"]} == set(SUITES)
    for result in document["results"]:
        assert {"case", "provider", "metric", "median", "p10", "p90", "repeats", "ratio", "within"} <= set(result)
        if result["missing"] is None:
            assert 0 < result["p10"] <= result["median"] <= result["p90"]
    assert document["geometric_mean_ratio"]["scatter"]["floor"] == pytest.approx(1.0)
    assert (quick / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_quick_run_times_every_provider_that_can_run_here(quick):
    rows = [row for row in Results.load(quick / "r.json").rows if row.suite == "scatter"]
    timed = {row.provider for row in rows if row.median is not None}
    assert timed == {"ours", "ours_no_report", "ours_launcher", "ours_torch", "floor", "index_put", "loop"}
    assert {row.provider for row in rows if row.missing} == set(providers.PROVIDERS) - timed


def test_the_table_of_a_result_is_markdown_and_names_what_is_missing(quick):
    text = invoke("table", quick / "r.json").output
    assert text == markdown(Results.load(quick / "r.json"))
    assert "### scatter" in text
    assert "| quick_mixed | kernel | 5 | 23 |" in text
    assert "- vllm is missing: a Triton kernel, needs a CUDA device, not cpu" in text


def test_without_arguments_it_lists_suites_providers_and_cases():
    result = invoke()
    assert result.exit_code == 0
    for name in (*SUITES, *providers.PROVIDERS, "one_long_among_short"):
        assert name in result.output


def test_options_pick_the_suite_the_providers_and_the_cases(tmp_path):
    invoke("scatter", "--quick", "--providers", "ours", "--cases", "*decode", "--json", tmp_path / "r.json")
    rows = Results.load(tmp_path / "r.json").rows
    assert {(row.case, row.provider) for row in rows} == {("quick_decode", "ours"), ("quick_decode", "floor")}


def test_globs_name_several_cases_and_each_row_is_seen_as_it_comes():
    seen = []
    found = run(
        ["guards", "build"],
        cases=["quick_dec*", "quick_join"],
        quick=True,
        on_row=lambda row, so_far: seen.append((row, len(so_far.rows))),
    )
    assert [row for row, _ in seen] == found.rows
    assert [number for _, number in seen] == list(range(1, len(found.rows) + 1))
    assert {row.case for row in found.rows} == {"quick_decode", "quick_join"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"suites": ["speed"]}, "unknown suite speed; known: scatter"),
        ({"providers": ["nobody"]}, "unknown provider nobody; known: ours"),
        ({"device": "tpu"}, "'tpu' is no device"),
    ],
)
def test_a_name_that_is_none_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(**arguments, quick=True)


def test_an_unknown_provider_is_refused():
    result = CliRunner().invoke(main, ["scatter", "--quick", "--providers", "nobody"])
    assert result.exit_code == 2
    assert "unknown provider nobody" in result.output


class Wrong(Provider):
    name = "wrong"
    summary = "leaves out the last request"

    def prepare(self, inputs):
        right = providers.PROVIDERS["loop"]().prepare(inputs)
        row = int(inputs.batch.layout.req_pool_indices[-1])
        return lambda: (right(), inputs.pool[row].fill_(-1))


class Absent(Provider):
    name = "absent"
    summary = "never there"

    def require(self, device):
        raise Unavailable("not installed here")


def run_with(monkeypatch, provider):
    monkeypatch.setitem(providers.PROVIDERS, provider.name, provider)
    results = run(["scatter"], providers=[provider.name], cases=["quick_mixed"], quick=True)
    return {row.provider: row for row in results.rows}


def test_a_provider_with_a_wrong_result_is_not_timed_and_fails_the_command(monkeypatch):
    wrong = run_with(monkeypatch, Wrong)["wrong"]
    assert (wrong.median, wrong.failed) == (None, True)
    assert wrong.missing == "WrongResult: wrong: 32 of 160 cells are wrong"
    result = CliRunner().invoke(main, ["scatter", "--quick", "--providers", "wrong", "--cases", "quick_mixed"])
    assert result.exit_code == 1
    assert "32 of 160 cells are wrong" in result.output


def test_a_missing_provider_is_shown_as_missing_with_the_reason(monkeypatch):
    rows = run_with(monkeypatch, Absent)
    assert rows["absent"].missing == "not installed here"
    assert rows["absent"].median is None
    assert "- absent is missing: not installed here" in markdown(results(*rows.values()))


def test_another_project_s_kernel_is_found_in_the_file_that_its_variable_names(tmp_path, monkeypatch):
    from bench.providers.found import find

    (tmp_path / "kernel.py").write_text("def launch(): return 7\n")
    monkeypatch.setenv("BENCH_TEST_FOUND", str(tmp_path / "kernel.py"))
    launch, module = find("launch", ("no_such_package",), "BENCH_TEST_FOUND")
    assert launch() == 7 and module.launch is launch
    monkeypatch.delenv("BENCH_TEST_FOUND")
    with pytest.raises(Unavailable, match=r"No module named 'no_such_package'.*set BENCH_TEST_FOUND"):
        find("launch", ("no_such_package",), "BENCH_TEST_FOUND")


@pytest.mark.parametrize(("median", "verdict"), [(10.1, "same"), (12.0, "slower"), (8.0, "faster")])
def test_a_change_is_one_beyond_the_spread(median, verdict):
    (change,) = compare(results(row()), results(row(median=median))).changes
    assert change.verdict == verdict


def test_compare_says_what_changed_and_what_only_one_has(tmp_path):
    results(row(), row("floor")).save(tmp_path / "old.json")
    results(row(median=20.0), row("loop")).save(tmp_path / "new.json")
    output = invoke("compare", tmp_path / "old.json", tmp_path / "new.json").output
    assert "2.00x" in output and "slower" in output
    assert "1 of 1 changed beyond the spread" in output
    assert "only in OLD: scatter 64_of_128 floor kernel" in output
    assert "only in NEW: scatter 64_of_128 loop kernel" in output


def test_ratios_are_to_the_baseline_and_a_missed_target_is_marked():
    floor, ours = compare_to([row("floor", 4.0), row("ours", 6.0)], "floor")
    assert (floor.ratio, ours.ratio) == (1.0, 1.5)
    assert ours.within is None
    ours = attrs.evolve(ours, limit=1.25)
    assert ours.within is False
    text = markdown(results(floor, ours))
    assert "6.00 (1.50x) !" in text
    assert "! 64_of_128, kernel, ours: 1.50x, target at most 1.25x" in text
    assert geometric_means([floor, ours]) == {"scatter": {"floor": pytest.approx(1.0), "ours": pytest.approx(1.5)}}


def test_results_survive_their_json(tmp_path):
    kept = results(row(), row("vllm", missing="no GPU"))
    kept.save(tmp_path / "r.json")
    assert Results.load(tmp_path / "r.json") == kept
