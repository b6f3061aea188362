from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from rich.console import Console

from testbed.common.errors import InputError
from testbed.scenario.expand import repetition_seed
from testbed.trace.events import Event
from testbed.trace.metrics_spec import Metric, MetricsSpec
from testbed_controller.cli.export import export as export_command
from testbed_controller.cli.report import compare as compare_command
from testbed_controller.cli.report import report as report_command
from testbed_controller.report import drawing, sweep
from testbed_controller.report.charts import Axis, Line, LinePlot
from testbed_controller.report.comparison import metrics_of, plots, render, show
from testbed_controller.report.tables import Column, VisibleConsole, latex, plain_table
from testbed_controller.results import files
from testbed_controller.results.comparison import compare, side_by_side
from testbed_controller.results.run import Run, run_name
from testbed_controller.results.summary import summarize, summary_of
from tests.helpers import recorded


def written(
    folder: Path, scenario: dict[str, Any] | None = None, **changes: Any
) -> Run:
    trial = recorded.make_trial(**(scenario or {}))
    return files.load(
        recorded.write_run(
            folder, trial, recorded.make_plan(), recorded.make_outcome(**changes)
        )
    )


def test_ratios_are_to_the_first_run(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / "a"),
        written(tmp_path / "b", events=recorded.slow_down(recorded.make_events(), 2.0)),
    ]
    compared = compare(side_by_side(runs))
    figures = {row["name"]: row for row in compared["metrics"]}
    assert figures["step_time"]["values"] == pytest.approx([1.0, 2.0])
    assert figures["step_time"]["ratios"] == pytest.approx([1.0, 2.0])
    assert figures["recovery_time"]["ratios"][1] == pytest.approx(2.0)
    assert compared["differences"] == {}
    [warning] = compared["warnings"]
    assert warning.startswith("b is not trusted: the host added"), (
        "its messages took twice what their links take"
    )
    assert compared["devices"]["a"][0]["compute"] == pytest.approx(2.6 / 8.6)


def test_processors_and_kernels_that_differ_are_named(tmp_path: Path) -> None:
    kinds = [
        {"processor": "EPYC", "instruction_set": name, "torch": "2.13.0"}
        for name in ("AVX512", "AVX2")
    ]
    runs = [
        written(
            tmp_path / kind["instruction_set"],
            # A device without torch records null.
            host={"backend": "userspace", "computing": [None, kind]},
        )
        for kind in kinds
    ]
    [warning] = compare(side_by_side(runs))["warnings"]
    assert "EPYC (AVX2, torch 2.13.0) | EPYC (AVX512, torch 2.13.0)" in warning


def test_differences_that_nobody_swept_are_warned_of(tmp_path: Path) -> None:
    other = written(
        tmp_path / "b",
        {"seed": 4, "network": {"link": {"rate": "9mbit", "delay": "10ms"}}},
    )
    runs = [written(tmp_path / "a"), other]
    assert compare(side_by_side(runs))["warnings"] == [
        "the scenarios differ in seed: 3 | 4",
        "the scenarios differ in network.link.rate: 8mbit | 9mbit",
    ]
    swept = [
        replace(
            run,
            trial=replace(
                run.trial, point={"network.link.rate": "x"}, repetition=index
            ),
        )
        for index, run in enumerate(runs)
    ]
    assert compare(side_by_side(swept))["warnings"] == []


def test_repetitions_hide_no_difference_between_seeds_of_scenarios(
    tmp_path: Path,
) -> None:
    def write_repetitions(name: str, seed: int) -> list[Run]:
        runs = []
        for repetition in range(2):
            folder = tmp_path / name / str(repetition)
            run = written(folder, {"seed": repetition_seed(seed, repetition)})
            trial = replace(run.trial, repetition=repetition)
            runs.append(replace(run, trial=trial))
        return runs

    same = [*write_repetitions("a", 3), *write_repetitions("b", 3)]
    assert compare(side_by_side(same))["warnings"] == []
    # Some repetitions of one scenario, each as a column of its own.
    assert compare({"1": same[:1], "2": same[1:2]})["warnings"] == []
    assert compare({"2": same[1:2]})["warnings"] == []
    other = [*write_repetitions("c", 3), *write_repetitions("d", 9)]
    assert compare(side_by_side(other))["warnings"] == [
        "the scenarios differ in seed: 3 | 9"
    ]


def test_names_of_compared_scenarios_may_differ(tmp_path: Path) -> None:
    runs = [written(tmp_path / "a"), written(tmp_path / "b", {"name": "other"})]
    compared = compare(side_by_side(runs))
    assert compared["warnings"] == []
    assert compared["differences"] == {"name": ["recorded", "other"]}


@pytest.mark.parametrize(
    ("values", "ratios"),
    [
        (["relu", "tanh"], [None, None]),
        ([True, False], [None, None]),
        ([2.0, "none"], [1.0, None]),
        ([0, 3], [None, None]),
    ],
)
def test_values_that_are_not_numbers_have_no_ratio(
    values: list[object], ratios: list[float | None], tmp_path: Path
) -> None:
    metric = Metric("kind", "text", "any value", lambda _: None, compared=True)
    runs = []
    for number, value in enumerate(values):
        run = written(tmp_path / str(number))
        runs.append(
            replace(
                run,
                metrics={**run.metrics, "kind": value},
                declared=MetricsSpec((metric,)),
            )
        )
    compared = compare(side_by_side(runs))
    [row] = [row for row in compared["metrics"] if row["name"] == "kind"]
    assert (row["values"], row["ratios"]) == (values, ratios)
    assert metrics_of(compared).rows


def test_metrics_of_the_scenario_are_compared_and_summarized(tmp_path: Path) -> None:
    runs = []
    for number, value in enumerate((0.5, 0.25)):
        run = written(tmp_path / str(number))
        runs.append(replace(run, metrics={**run.metrics, "metrics": {"f1": value}}))
    compared = compare(side_by_side(runs))
    [row] = [row for row in compared["metrics"] if row["name"] == "metrics.f1"]
    assert (row["values"], row["ratios"]) == ([0.5, 0.25], [1.0, 0.5])
    [point] = summary_of(runs)["points"]
    assert point["metrics"]["metrics.f1"]["mean"] == 0.375


def test_another_congestion_control_is_warned_of(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / "a", fidelity={"congestion_control": "reno"}),
        written(tmp_path / "b", fidelity={"congestion_control": "reno"}),
        written(tmp_path / "c", runtime="simulate", links=[], fidelity={}),
    ]
    assert compare(side_by_side(runs))["warnings"] == []
    [warning] = compare(side_by_side([*runs, written(tmp_path / "d", fidelity={})]))[
        "warnings"
    ]
    assert "congestion control" in warning, "an earlier release left it to the host"


def test_two_clocks_are_held_against_each_other(tmp_path: Path) -> None:
    emulated = written(
        tmp_path / "a", events=recorded.slow_down(recorded.make_events(), 1.05)
    )
    simulated = written(tmp_path / "b", runtime="simulate", links=[], fidelity={})
    clocks = compare(side_by_side([emulated, simulated]))["clocks"]
    assert clocks["ratio"] == pytest.approx(1.05)
    assert clocks["agree"]
    assert compare(side_by_side([emulated, emulated]))["clocks"] is None
    far = written(
        tmp_path / "c", events=recorded.slow_down(recorded.make_events(), 1.2)
    )
    assert not compare(side_by_side([far, simulated]))["clocks"]["agree"]
    other = written(tmp_path / "d", {"seed": 9}, runtime="simulate")
    assert compare(side_by_side([emulated, other]))["clocks"] is None


def test_the_compare_command(tmp_path: Path) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b", runtime="simulate", links=[], fidelity={})
    page = tmp_path / "out" / "compare.html"
    done = CliRunner().invoke(
        compare_command, [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(page)]
    )
    assert done.exit_code == 0, done.output
    assert "step time" in done.output
    assert "emulated and simulated agree" in done.output
    assert "<h1>2 runs side by side</h1>" in page.read_text()
    latex_file = tmp_path / "another" / "table.tex"
    done = CliRunner().invoke(
        compare_command,
        [str(tmp_path / "a"), str(tmp_path / "b"), "--latex", str(latex_file)],
    )
    assert done.exit_code == 0, done.output
    assert "step time" in latex_file.read_text()
    done = CliRunner().invoke(compare_command, [str(tmp_path), "--json"])
    assert [run["label"] for run in json.loads(done.stdout)["runs"]] == ["a", "b"]
    done = CliRunner().invoke(compare_command, [str(tmp_path / "a")])
    assert isinstance(done.exception, InputError)


def test_the_report_command_rebuilds(tmp_path: Path) -> None:
    run = written(tmp_path / "a")
    for name in ("report.html", "metrics.json", "trace.json", "fidelity.json"):
        (run.path / name).unlink(missing_ok=name != "fidelity.json")
    done = CliRunner().invoke(report_command, [str(run.path)])
    assert done.exit_code == 0, done.output
    assert "Step time" in done.output
    for name in ("report.html", "metrics.json", "trace.json", "fidelity.json"):
        assert (run.path / name).is_file()
    done = CliRunner().invoke(report_command, [str(run.path), "--json"])
    assert json.loads(done.stdout)["steps"] == 5


def test_the_report_command_summarizes_a_sweep(tmp_path: Path) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b")
    done = CliRunner().invoke(report_command, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "Accuracy (%)" in done.output
    assert (tmp_path / "summary.csv").is_file()
    assert (tmp_path / "sweep.html").is_file()
    done = CliRunner().invoke(report_command, [str(tmp_path), "--json"])
    assert json.loads(done.stdout)["points"][0]["runs"] == ["a", "b"]


def test_a_folder_without_a_run_is_bad_input(tmp_path: Path) -> None:
    done = CliRunner().invoke(report_command, [str(tmp_path / "nothing")])
    assert isinstance(done.exception, InputError)
    assert "has no run" in str(done.exception)


def test_charts_of_accuracy_and_of_the_steps_around_a_fault(tmp_path: Path) -> None:
    events = sorted(
        [
            *recorded.make_events(),
            Event(1.5, "a", "evaluate", {"step": 1, "accuracy": 0.5, "loss": 1.0}),
        ],
        key=lambda event: event.time,
    )
    runs = [
        written(tmp_path / "a", events=events),
        written(tmp_path / "b", events=events),
    ]
    page = render(side_by_side(runs), compare(side_by_side(runs)))
    drawn = {
        title: drawing.draw(plot).axes[0]
        for title, _, plot in plots(side_by_side(runs))
    }
    assert all(f'aria-label="{title}"' in page for title in drawn)
    assert drawn["Accuracy over time"].lines[0].get_xydata().tolist() == [
        [1.5, 50.0],
        [8.5, 95.0],
    ]
    around = drawn["Time per step around the fault"]
    assert around.get_xlabel() == "step"
    # Step 1 is done again after the outage: 3 s from the step before it.
    assert around.lines[1].get_xydata().tolist()[:2] == [[0.0, 1.0], [1.0, 3.0]]
    calm = [
        written(
            tmp_path / name, {"faults": ()}, events=recorded.make_events(faulty=False)
        )
        for name in ("c", "d")
    ]
    assert "around the fault" not in render(
        side_by_side(calm), compare(side_by_side(calm))
    )
    assert 'aria-label="Accuracy over time"' not in render(
        side_by_side(calm), compare(side_by_side(calm))
    )


def test_runs_of_a_sweep_are_called_by_what_differs(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / name)
        for name in ("sweep,rate=10mbit,loss=0", "sweep,rate=10mbit,loss=1")
    ]
    assert [run["label"] for run in compare(side_by_side(runs))["runs"]] == [
        "loss=0",
        "loss=1",
    ]
    runs = [written(tmp_path / name) for name in ("one", "one,more")]
    assert [run["label"] for run in compare(side_by_side(runs))["runs"]] == [
        "one",
        "one,more",
    ]


def repeated(folder: Path) -> list[Run]:
    """Two rates, run twice each; the second takes twice the time."""
    runs = []
    for rate, factor in (("5mbit", 2.0), ("500kbit", 4.0)):
        for repetition in (0, 1):
            trial = replace(
                recorded.make_trial(),
                point={"network.link.rate": rate},
                repetition=repetition,
            )
            outcome = recorded.make_outcome(
                events=recorded.slow_down(
                    recorded.make_events(), factor * (1 + repetition)
                )
            )
            runs.append(
                files.load(
                    recorded.write_run(
                        folder / run_name(trial), trial, recorded.make_plan(), outcome
                    )
                )
            )
    return runs


def test_repetitions_stand_side_by_side_as_one(tmp_path: Path) -> None:
    compared = compare(side_by_side(repeated(tmp_path)))
    assert [(run["label"], run["count"]) for run in compared["runs"]] == [
        ("rate=5mbit", 2),
        ("rate=500kbit", 2),
    ]
    [step_time] = [row for row in compared["metrics"] if row["name"] == "step_time"]
    assert step_time["values"] == pytest.approx([3.0, 6.0])
    assert step_time["half_widths"] == pytest.approx([12.706, 25.412], rel=1e-4)
    assert step_time["ratios"] == pytest.approx([1.0, 2.0])
    assert [warning.partition(" are")[0] for warning in compared["warnings"]] == [
        "rate=5mbit: 2 of 2 runs",
        "rate=500kbit: 2 of 2 runs",
    ]


def test_all_columns_fit_a_narrow_terminal(tmp_path: Path) -> None:
    for index in range(6):
        written(tmp_path / f"sweep,method.schedule=1f1b,rate={index}mbit,loss=1%")
    text = io.StringIO()
    show(
        Console(file=text, width=80),
        compare(
            side_by_side(
                [files.load_metrics(place) for place in files.places(tmp_path)]
            )
        ),
    )
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("rate=") for line in lines) == 6
    assert not any("schedule" in line or "loss=" in line for line in lines), (
        "what all have in common"
    )


def test_a_sweep_is_a_page_of_its_own(tmp_path: Path) -> None:
    runs = repeated(tmp_path)
    drawn = {
        title: drawing.draw(plot).axes[0]
        for title, _, plot in sweep.charts(summary_of(runs), runs)
    }
    axes = drawn["Step time"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rate (mbit/s)", "step time (s)")
    [line] = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert line.get_xydata().tolist() == [[0.5, 6.0], [5.0, 3.0]]
    assert axes.containers, "whiskers"
    page = sweep.render(summary_of(runs), runs)
    assert page.count("<tr>") == 3
    assert 'data-value="0.5">500kbit' in page
    assert f'href="{quote(runs[0].path.name)}/report.html"' in page


def test_keys_that_change_together_are_drawn_as_one_line(tmp_path: Path) -> None:
    runs = [
        replace(
            run,
            trial=replace(
                run.trial,
                point={"network.link.rate": f"{step}mbit", "seed": step},
                repetition=0,
            ),
        )
        for step, run in enumerate(repeated(tmp_path)[::2], 1)
    ]
    title, note, plot = next(iter(sweep.charts(summary_of(runs), runs)))
    [line] = [
        line
        for line in drawing.draw(plot).axes[0].lines
        if not str(line.get_label()).startswith("_")
    ]
    assert len(line.get_xdata()) == 2, title
    assert note == "Varied together: seed."


def test_what_was_swept_may_be_words(tmp_path: Path) -> None:
    runs = [
        replace(
            run,
            trial=replace(
                run.trial, point={"workload.method": {"name": name}}, repetition=0
            ),
        )
        for name, run in zip(("gpipe", "1f1b"), repeated(tmp_path)[::2], strict=True)
    ]
    axes = {
        title: drawing.draw(plot).axes[0]
        for title, _, plot in sweep.charts(summary_of(runs), runs)
    }["Step time"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["gpipe", "1f1b"]
    assert [bar.get_height() for bar in axes.patches] == [2.0, 4.0]


def test_all_points_of_a_sweep_are_drawn_in_the_order_of_the_scenario(
    tmp_path: Path,
) -> None:
    rates = [f"{rate}mbit" for rate in (5, 500, 50, 1, 7, 3, 20, 9)]
    runs = []
    for rate in rates:
        trial = replace(recorded.make_trial(), point={"network.link.rate": rate})
        runs.append(
            files.load(
                recorded.write_run(
                    tmp_path / run_name(trial),
                    trial,
                    recorded.make_plan(),
                    recorded.make_outcome(),
                )
            )
        )
    summarize(tmp_path, runs)
    again = [files.load_metrics(place) for place in files.places(tmp_path)]
    labels = [f"rate={rate}" for rate in rates]
    drawn = drawing.draw(next(iter(plots(side_by_side(again))))[2])
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == labels
    looks = {(line.get_color(), line.get_linestyle()) for line in drawn.axes[0].lines}
    assert len(looks) == len(rates), "no two lines look alike"
    done = CliRunner().invoke(
        compare_command,
        [
            str(tmp_path),
            "--json",
            "--series",
            "rate=50mbit: Fast",
            "--series",
            "rate=5mbit",
        ],
    )
    assert [run["label"] for run in json.loads(done.stdout)["runs"]] == [
        "Fast",
        "rate=5mbit",
    ]
    with pytest.raises(
        InputError,
        match="--series: unknown group 'rate=6mbit': choose one of rate=5mbit; rate=500mbit",
    ):
        side_by_side(again, ["rate=6mbit"])


def test_more_series_than_can_be_distinguished_are_said_to_be_left_out(
    tmp_path: Path,
) -> None:
    run = written(tmp_path / "a")
    _, note, plot = next(iter(plots({str(number): [run] for number in range(20)})))
    assert note == "2 more are not drawn: select with --series."
    assert len(drawing.draw(plot).axes[0].lines) == 18


def test_tables_of_sweeps_and_comparisons_are_written_for_latex(tmp_path: Path) -> None:
    runs = repeated(tmp_path)
    table = latex(sweep.section(summary_of(runs)))
    assert table.startswith("\\begin{tabular}{lrr")
    assert "& Accuracy (\\%) &" in table
    assert "5mbit & 2 (2 not trusted) & 95 $\\pm$ 0 &" in table
    page = tmp_path / "table.tex"
    done = CliRunner().invoke(compare_command, [str(tmp_path), "--latex", str(page)])
    assert done.exit_code == 0, done.output
    assert (
        "step time (s) & 3 $\\pm$ 12.7 & 6 $\\pm$ 25.4 2.00$\\times$ \\\\"
        in page.read_text()
    )


def test_latex_tables_hold_no_sign_that_pdflatex_refuses(tmp_path: Path) -> None:
    simulated = written(tmp_path / "b", runtime="simulate", links=[], fidelity={})
    compared = compare(side_by_side([written(tmp_path / "a"), simulated]))
    table = latex(metrics_of(compared))
    assert "simulated" in table
    assert table.isascii()


def test_latex_tables_show_where_pdflatex_knows_no_sign() -> None:
    section = plain_table([Column("α")], [["−5 °C"], ["3 m²"], ["Ħa"], ["日"]])
    rows = [line for line in latex(section).splitlines() if line.endswith(r"\\")]
    assert rows == [
        r"? \\",
        r"$-$5 \textdegree{}C \\",
        r"3 m\textsuperscript{2} \\",
        r"Ha \\",
        r"? \\",
    ]


def test_headings_show_no_escaped_spaces(tmp_path: Path) -> None:
    simulated = written(tmp_path / "b", runtime="simulate", links=[], fidelity={})
    console = VisibleConsole(file=io.StringIO(), width=100)
    show(console, compare(side_by_side([written(tmp_path / "a"), simulated])))
    assert isinstance(console.file, io.StringIO)
    assert "\\x" not in console.file.getvalue()


def labelled_runs(tmp_path: Path) -> list[Run]:
    """Return runs of two labelled methods at two rates each."""
    runs = []
    for label in ("FedAvg", "SCAFFOLD"):
        for rate in ("5mbit", "50mbit"):
            method = {
                "label": label,
                "value": {"name": "single", "file": f"../{label}.py"},
            }
            trial = replace(
                recorded.make_trial(),
                point={"workload.method": method, "network.link.rate": rate},
            )
            runs.append(
                files.load(
                    recorded.write_run(
                        tmp_path / run_name(trial),
                        trial,
                        recorded.make_plan(),
                        recorded.make_outcome(),
                    )
                )
            )
    return runs


def test_labels_of_sweep_values_name_series_folders_and_columns(tmp_path: Path) -> None:
    runs = labelled_runs(tmp_path)
    assert runs[0].path.name == "recorded,method=FedAvg,rate=5mbit"
    assert next(iter(side_by_side(runs))) == "method=FedAvg,rate=5mbit"
    figure = {
        title: drawing.draw(plot)
        for title, _, plot in sweep.charts(summary_of(runs), runs)
    }["Step time"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "FedAvg",
        "SCAFFOLD",
    ]
    assert "FedAvg & 5mbit &" in latex(sweep.section(summary_of(runs)))


def test_export_chooses_metrics_and_their_headings(tmp_path: Path) -> None:
    labelled_runs(tmp_path)
    arguments = [
        "run",
        str(tmp_path),
        "--latex",
        "--metric",
        "step_time: Time per step",
        "--metric",
        "accuracy",
    ]
    done = CliRunner().invoke(export_command, arguments)
    assert done.exit_code == 0, done.output
    heading = (tmp_path / "export" / "points.tex").read_text().splitlines()[2]
    assert heading == r"method & rate & Runs & Time per step (s) & Accuracy (\%) \\"
    done = CliRunner().invoke(
        export_command, ["run", str(tmp_path), "--plots", "--metric", "speed"]
    )
    assert "unknown metric" in str(done.exception)


def test_whiskers_at_the_edges_of_a_plot_are_not_clipped() -> None:
    line = Line(
        "a", [(0, 1.0), (1, 5.0)], "blue", mark_points=True, half_widths=[0.5, 0.5]
    )
    axes = drawing.draw(LinePlot([line], x_range=(0, 1), y=Axis("a"), swept=True)).axes[
        0
    ]
    whiskers = [*axes.collections, *axes.containers[0].get_children()]
    assert not any(artist.get_clip_on() for artist in whiskers)
