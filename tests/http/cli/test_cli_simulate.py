"""`shoal simulate`: a table, JSON, and clear errors; no server is needed."""

from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE, LLAMA, RATES = (str(EXAMPLES / name) for name in ("trace.csv", "llama-70b.yaml", "failure-rates.yaml"))


def test_the_example_is_simulated(offline: Any) -> None:
    ran = offline("simulate", EXAMPLE)
    assert ran.code == 0
    assert "trace.csv  24 jobs, 4 nodes of 4 workers, a move costs 0.3 s, a start 4.3 s; times in minutes" in ran.out
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == ["policy", "shoal"]


def test_json_has_the_metrics_and_the_life_of_each_job(offline: Any) -> None:
    found = offline("simulate", EXAMPLE, "--json").json()
    assert [one["policy"] for one in found["policies"]] == ["shoal"]
    assert found["capacity"] == [[0, 16]]
    first = found["policies"][0]
    assert (first["num_jobs"], first["num_unfinished"]) == (24, 0)
    job = first["jobs"][0]
    assert job["submit_s"] == job["started_s"] == job["workers"][0][0]
    assert job["workers"][-1] == [job["finished_s"], 0]


def test_nodes_that_never_come_are_an_exit_code_and_a_sentence(offline: Any, tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text("at_h,nodes\n0,2\n0.3,0\n")
    ran = offline("simulate", EXAMPLE, "--capacity", str(tmp_path / "spot.csv"))
    assert ran.code == 1
    assert "never starts" in " ".join(ran.out.split())
    assert "0 to 2 nodes of 4 workers" in ran.out


def test_a_job_lives_through_failures(offline: Any, tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    options = ("--job", LLAMA, "--gpus", "1024", "--failures", RATES, "--days", "20", "--seed", "1")
    ran = offline("simulate", *options, "--picture", str(picture))
    assert ran.code == 0
    assert "in 20 days on 1,024 GPUs" in ran.out and "steps that no failure has undone" in ran.out
    assert picture.read_text().startswith("<svg") and "speed of each day" in picture.read_text()
    found = offline("simulate", *options, "--json").json()
    assert sum(found["seconds"].values()) == pytest.approx(20 * 86400, abs=0.1)
    assert f"goodput {found['goodput']:.2%}" in ran.out and 0.9 < found["goodput"] < 1
    assert found["incidents"] > 0 and found["failures"]["gpu"] > 0
    other = offline("simulate", *options[:-1], "2", "--json").json()
    assert other["seconds"] != found["seconds"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("nowhere.csv",), 4, "there is no file nowhere.csv"),
        ((EXAMPLE, "--nodes", "2", "--capacity", EXAMPLE), 2, "--nodes cannot be combined with --capacity"),
        ((EXAMPLE, "--capacity", EXAMPLE), 2, "a line before this one must name the columns"),
        ((str(Path(EXAMPLE).parent / "byte-lm.yaml"),), 2, "has no column submit_s"),
        ((EXAMPLE, "--projects", str(Path(EXAMPLE).parents[1] / "README.md")), 2, "is not YAML or JSON"),
        ((EXAMPLE, "--projects", EXAMPLE), 2, "must have one key for each project"),
        ((), 2, "simulate needs either TRACE, or --job and --failures"),
        ((EXAMPLE, "--job", LLAMA, "--failures", RATES), 2, "simulate needs either TRACE, or --job and --failures"),
        (("--job", LLAMA), 2, "simulate needs either TRACE, or --job and --failures"),
        (("--job", LLAMA, "--failures", EXAMPLE), 2, "must have one key for each cause"),
        (("--job", LLAMA, "--failures", LLAMA), 2, "cause name: 'llama-70b' is not a mapping of settings"),
        (("--job", LLAMA, "--failures", RATES, "--gpus", "7"), 2, "gpus 7 is less than a node"),
    ],
)
def test_errors_name_the_option_or_the_file(offline: Any, options: tuple[str, ...], code: int, message: str) -> None:
    ran = offline("simulate", *options)
    assert ran.code == code
    assert message in " ".join(ran.err.split())
