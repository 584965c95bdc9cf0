"""The command line: what it prints, where, and with which exit code."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kv_canary import cli, pool
from kv_canary.replay import run
from kv_canary.replay.inject import KINDS
from kv_canary.replay.ranks import RanksResult
from kv_canary.selftest import PERTURBATIONS, Trial

SRC = Path(__file__).resolve().parents[2] / "src"
SMALL = ["--requests", "20", "--max-running", "8", "--prefill-budget", "2048"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,2\n2023-11-16 18:17:04,9,1\n"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["replay", *map(str, arguments)])


def process(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with its output in pipes."""
    start = ["-m", "kv_canary"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SRC)},
        timeout=120,
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    return path


# ---- all is right -----------------------------------------------------------------------


def test_without_a_trace_a_synthetic_one_is_replayed_clean() -> None:
    result = invoke(*SMALL)
    assert result.exit_code == 0, result.output
    assert "synthetic (seed 0), 20 requests" in result.stdout
    assert "clean" in result.stdout
    assert result.stderr == ""


def test_the_table_says_what_happened(trace: Path) -> None:
    lines = invoke(trace, "--max-context", 8).stdout.splitlines()
    table = {line[:18].strip(): line[18:].strip() for line in lines}
    assert table["trace"] == "trace.csv, 2 requests"
    assert table["requests finished"] == "1"
    assert table["requests refused"] == "1 (1 longer than max_context)"
    assert table["tokens sent"].startswith("7; a step 2, a full re-scatter ")
    assert table["steps"].startswith("3 in ")
    assert table["host us a step"].startswith("p50 ")
    assert table["verification"] == "clean; 7 tokens of 1 requests compared"
    assert int(table["bytes copied"].partition(";")[0].replace(",", "")) >= 7 * 8
    assert len(lines) == 8


def test_when_nothing_was_compared_the_table_does_not_say_clean(trace: Path) -> None:
    result = invoke(trace, "--max-context", 1)
    assert result.exit_code == 0
    assert "NOTHING WAS COMPARED" in result.stdout
    assert "clean" not in result.stdout


def test_a_file_name_is_printed_as_it_is(trace: Path) -> None:
    odd = trace.rename(trace.with_name("[red]x[bold]"))
    assert "[red]x[bold], 2 requests" in invoke(odd).stdout


def test_requests_takes_the_first_of_the_trace(trace: Path) -> None:
    assert "trace.csv, 1 requests" in invoke(trace, "--requests", 1).stdout


def test_json_holds_the_figures_and_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert invoke(*SMALL, "--seed", 3, "--verify-every", 7, "--json", path).exit_code == 0
    figures = json.loads(path.read_text())
    assert figures["requests_finished"] == 20
    assert figures["violations"] == 0
    assert figures["settings"]["seed"] == 3
    assert figures["settings"]["verify_every"] == 7


def test_in_a_pipe_there_is_no_progress_bar_and_no_escape_code() -> None:
    done = process("replay", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""


def test_on_a_terminal_there_is_a_progress_bar() -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "kv_canary", "replay", *SMALL]
    environment = os.environ | {"PYTHONPATH": str(SRC), "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as child:
        os.close(follower)
        output = b""
        try:
            while chunk := os.read(leader, 4096):
                output += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(leader)
    assert child.returncode == 0, output
    assert b"/20" in output, "the bar counts requests"
    assert b"clean" in output


# ---- something was found ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_injected_fault_ends_with_exit_1_and_lines_that_name_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = invoke(*SMALL, "--inject", kind, "--json", path)
    assert result.exit_code == 1, result.output
    figures = json.loads(path.read_text())
    lines = result.stderr.splitlines()
    assert all(line.startswith("step ") for line in figures["findings"])
    assert lines[: len(figures["findings"])] == figures["findings"] != []
    assert f"FAILED, {figures['violations']:,} violations" in result.stdout
    if kind not in ("stale-row", "lost-token", "swapped-rows"):  # those break many cells at once
        assert (figures["violations"], len(lines)) == (1, 1)


def test_the_plot_is_drawn_whether_clean_or_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    clean, found = tmp_path / "clean.png", tmp_path / "found.png"
    assert invoke(*SMALL, "--plot", clean).exit_code == 0
    assert invoke(*SMALL, "--inject", "swapped-rows", "--plot", found).exit_code == 1
    assert clean.read_bytes()[:4] == found.read_bytes()[:4] == b"\x89PNG"
    result = invoke(*SMALL, "--plot", tmp_path / "picture.nonsense")
    assert result.exit_code == 2
    assert "picture.nonsense: cannot be drawn: " in result.stderr


def test_without_matplotlib_a_plot_is_a_bad_call_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    result = invoke(*SMALL, "--plot", tmp_path / "p.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "needs matplotlib, which is not installed; pip install 'ragged-kv-canary[plot]'" in result.stderr


def test_more_violations_than_lines_are_counted_in_a_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "scatter_checked", lambda *args, **keywords: None)
    result = invoke(*SMALL)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == run.MAX_FINDINGS + 1
    assert lines[-1].startswith("and ") and lines[-1].endswith(" more")


def test_ctrl_c_prints_the_figures_so_far_and_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "scatter_checked", press)
    result = invoke(*SMALL)
    assert result.exit_code == 130
    assert "requests finished" in result.stdout
    assert "interrupted" in result.stderr


# ---- a bad call -------------------------------------------------------------------------


def test_a_bad_line_of_a_trace_is_one_line_with_file_and_number_and_exit_2(trace: Path) -> None:
    trace.write_text(AZURE + "2023-11-16 18:17:05,many,3\n")
    result = invoke(trace)
    assert result.exit_code == 2
    assert result.stderr == (f"Error: {trace}:4: ContextTokens must be an integer from 0 to 2147483647, got 'many'\n")
    assert result.stdout == ""


def test_a_missing_trace_is_one_line_and_exit_2(tmp_path: Path) -> None:
    result = invoke(tmp_path / "absent.csv")
    assert result.exit_code == 2
    assert result.stderr == (f"Error: {tmp_path}/absent.csv: cannot be read: No such file or directory\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--inject", "rust"], "'rust' is not one of", id="unknown_fault"),
        pytest.param(["--mode", "lenient"], "'lenient' is not one of", id="unknown_mode"),
        pytest.param(["--max-running", "0"], "0 is not in the range", id="no_rows"),
        pytest.param(["--verify-every", "0"], "0 is not in the range", id="never_verified"),
        pytest.param(["--requests", "x"], "'x' is not a valid integer", id="no_number"),
        pytest.param(["--device", "toaster"], "'toaster' cannot be used: ", id="unknown_device"),
        pytest.param(["--device", "cuda:99"], "'cuda:99' cannot be used: ", id="absent_device"),
        pytest.param(["--device", "meta"], "'meta' cannot be used: ", id="device_without_data"),
        pytest.param(["--json", "/nowhere/x.json"], "/nowhere is not a folder", id="no_folder"),
        pytest.param(["--bogus"], "No such option", id="unknown_option"),
        pytest.param(["a", "b"], "unexpected extra argument", id="two_traces"),
    ],
)
def test_a_bad_option_is_said_and_exit_2(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_pool_that_does_not_fit_is_said_and_exit_2() -> None:
    result = invoke("--max-running", 2**31 - 1, "--max-context", 2**31 - 1)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: a pool of 2147483648 x 2147483647 int32, ")
    assert result.stderr.endswith("does not fit cpu\n")


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_click_or_rich_one_line_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from kv_canary.cli import main; main()"
    done = process(code=code)
    assert done.returncode == 2
    assert done.stderr == (
        f"kv-canary: the command line needs {missing}, which is not installed; pip install 'ragged-kv-canary[cli]'\n"
    )


def test_help_says_what_the_exit_codes_mean() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Exit code 0: all is right. 1:" in result.stdout


# ---- the canary -------------------------------------------------------------------------


def test_the_table_says_what_the_canary_compared() -> None:
    result = invoke(*SMALL, "--canary")
    assert result.exit_code == 0, result.output
    assert "slots stamped; compared" in " ".join(result.stdout.split())


def test_a_perturbed_slot_ends_with_exit_code_1_and_a_line() -> None:
    result = invoke(*SMALL, "--perturb", "kv-bytes")
    assert result.exit_code == 1
    assert "kv-canary: 1 violations: kv at request" in result.stderr


def test_the_doctor_breaks_a_canary_in_every_way_and_is_satisfied() -> None:
    result = CliRunner().invoke(cli.main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.stdout.splitlines() if " ok " in line] == [
        [name, "ok"] for name in ("clean", *PERTURBATIONS)
    ]


def test_a_blind_canary_fails_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = [Trial("clean", 0, (), "", True), Trial("kv-bytes", 0, (), "", False)]
    monkeypatch.setattr(cli, "selftest", lambda device: blind)
    result = CliRunner().invoke(cli.main, ["doctor"])
    assert result.exit_code == 1
    assert "FAILED" in result.stdout


# ---- several ranks ----------------------------------------------------------------------


def test_ranks_replay_the_same_pool() -> None:
    done = process("replay", *SMALL, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert "broadcast to 2 ranks; all pools are the same" in done.stdout


def test_pools_that_differ_end_with_exit_code_1_and_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    differing = RanksResult(steps=1, requests_finished=1, tokens_scattered=1, bytes_broadcast=8, digests=("aa", "bb"))
    monkeypatch.setattr(cli, "replay_ranks", lambda *_: differing)
    result = invoke(*SMALL, "--ranks", 2)
    assert result.exit_code == 1
    assert "the pools DIFFER" in result.stdout
    assert result.stderr == "rank 0: aa\nrank 1: bb\n"


def test_ranks_go_with_nothing_that_they_would_not_do(tmp_path: Path) -> None:
    result = invoke(*SMALL, "--ranks", 2, "--inject", "flip", "--json", tmp_path / "r.json")
    assert result.exit_code == 2
    assert result.stderr == "Error: --ranks does not go with --inject, --json\n"
