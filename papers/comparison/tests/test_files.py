"""Loading the papers' figures, recording results and writing pages from both."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import yaml

from testbed import InputError
from testbed.common.seeds import derive
from testbed_comparison.clocks import Clocks, load_clocks
from testbed_comparison.commands import PAGE, open_system, system_folders
from testbed_comparison.plots import draw_plots
from testbed_comparison.results import RUNS, Results, metric_of
from testbed_comparison.rows import load
from testbed_comparison.tables import (
    System,
    all_papers_page,
    fill_in,
    headline_page,
    system_page,
)
from testbed_comparison.words import OurValue

FIGURES = {
    "paper": "Somebody (2020), a system",
    "conditions": [{"condition": "batches of 100", "reason": "Section IV"}],
    "rows": [
        {
            "item": "Table 1",
            "name": "run time",
            "kind": "measured",
            "paper": "1.0",
            "unit": "min",
            "scenario": "one",
            "ours": {"metric": "duration", "at": {"workload.method.name": "fast"}},
        },
        {
            "item": "Table 1",
            "name": "fast above slow",
            "kind": "ranking",
            "paper": "larger",
            "unit": "points",
            "scenario": "one",
            "ours": {
                "difference": [
                    {"metric": "accuracy", "at": {"workload.method.name": "fast"}},
                    {"metric": "accuracy", "at": {"workload.method.name": "slow"}},
                ]
            },
        },
    ],
    "headlines": [{"claim": "fast", "rows": ["run time"], "differs": "links"}],
}
SCENARIO = """\
name: one
seed: 1
devices: {a: {speed: 1gflops}}
workload: {task: train, model: {name: mlp}, data: {name: digits}, method: {name: single}, batch_size: 100, epochs: 1}
sweep: {workload.epochs: [1, 2]}
expect: {steps: "== 15"}
"""


def with_row(**keys):
    return FIGURES | {"rows": [FIGURES["rows"][0] | keys, FIGURES["rows"][1]]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "one.yaml").write_text(SCENARIO)
    write_figures(tmp_path, FIGURES)
    return tmp_path


def write_figures(folder, figures):
    (folder / "figures.yaml").write_text(yaml.safe_dump(figures))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"note": "theirs 1.03 min with other links"}, "remove it from the note"),
        ({"note": "the paper prints 58 min"}, "remove it from the note"),
        ({"unit": "hours"}, "unknown unit 'hours'"),
        ({"paper": "larger"}, "'paper' must be 'larger' or 'similar'"),
        ({"kind": "ranking", "paper": "larger"}, "'ours' of a ranking must be a ratio"),
        (
            {"name": "fast above slow"},
            "each row needs a name of its own: fast above slow",
        ),
        ({"name": "renamed"}, "unknown rows: run time"),
        ({"ours": {"at": {"seed": 1}}}, "a value needs a metric"),
    ],
)
def test_invalid_row_is_rejected(folder, keys, reason):
    write_figures(folder, with_row(**keys))
    with pytest.raises(InputError, match=reason):
        load(folder)


def test_values_inherit_keys_of_row(folder):
    row = {
        **FIGURES["rows"][1],
        "metric": "accuracy",
        "at": {"workload.model.name": "mlp"},
        "each": {"network.link.preset": ["4g", "wifi"]},
        "ours": {
            "difference": [
                {"at": {"workload.method.name": "fast"}},
                {"metric": "loss", "at": {"workload.method.name": "slow"}},
            ]
        },
    }
    write_figures(folder, FIGURES | {"rows": [FIGURES["rows"][0], row]})
    terms = []
    for expression in load(folder).row("fast above slow").expressions:
        terms.extend(
            (value.metric, *value.at.values()) for value in expression.difference
        )
    assert terms == [
        ("accuracy", "mlp", "4g", "fast"),
        ("loss", "mlp", "4g", "slow"),
        ("accuracy", "mlp", "wifi", "fast"),
        ("loss", "mlp", "wifi", "slow"),
    ]


def test_largest_value_of_range_is_compared_with_maximum(folder, monkeypatch):
    values = {"each": {"workload.epochs": [1, 2]}, "ours": {"metric": "duration"}}
    write_figures(folder, with_row(**values, largest=True))
    system = open_system(folder)
    monkeypatch.setattr(
        system.results, "ours", lambda *arguments: OurValue(1.0, 3.0, None, runs=1)
    )
    ours = system.ours(system.figures.row("run time"))
    assert (ours.low, ours.high) == (3.0, 3.0)


def test_sensitivity_trial_inherits_expression_of_row(folder):
    trial = {"value": "8", "scenario": "one", "at": {"workload.batch_size": 8}}
    parameter = {"row": "run time", "parameter": "batch size", "values": [trial]}
    write_figures(folder, FIGURES | {"sensitivity": [parameter]})
    figures = load(folder)
    (expression,) = (
        figures.sensitivity[0].values[0].expressions(figures.row("run time"))
    )
    assert expression.metric == "duration"
    assert expression.at == {"workload.batch_size": 8, "workload.method.name": "fast"}


def test_note_with_number_of_figure_or_equation_is_accepted(folder):
    write_figures(
        folder, with_row(note="the paper's Figure 6(b) and equation (9) leave it out")
    )
    assert load(folder).rows[0].note


def write_results(folder, **values):
    fast = 'at {"workload.method.name": "fast"}'
    slow = 'at {"workload.method.name": "slow"}'
    keys = {
        f"duration {fast}": values["duration"],
        f"accuracy {fast}": values["fast"],
        f"accuracy {slow}": values["slow"],
    }
    computing = [
        {"processor": "A processor", "instruction_set": "AVX2", "torch": "2.9"}
    ]
    about = {
        "date": "2026-11-27",
        "revision": "abc",
        "computing": computing,
        "seeds": [1],
        "runs": 4,
        "trains": True,
    }
    (folder / "results.json").write_text(
        json.dumps({"one": {**about, "digest": "", "values": keys}})
    )


def test_page_shows_words_intervals_and_provenance(folder):
    write_results(
        folder, duration=[59.0, 61.0, 60.5], fast=[0.9, 0.8], slow=[0.7, 0.61]
    )
    page = system_page(System(folder, load(folder), Results(folder)), {})
    assert "| batches of 100 | Section IV |" in page
    assert "| Table 1 | run time | 1.0 min | 1.003 ± 0.043 min | 3 | agrees |" in page
    assert (
        "|  | fast above slow | larger | 19.5 ± 6.4 points | 2 | same ranking |" in page
    )
    assert "A processor (AVX2) | 2.9 |" in page


def test_page_lists_missing_rows_and_scenarios(folder):
    page = system_page(System(folder, load(folder), Results(folder)), {})
    assert "2 rows: 2 not run." in page
    assert "Not run yet, or stale: one." in page


def test_plot_of_rankings_skips_rows_without_results(folder):
    pytest.importorskip("matplotlib")
    missing = FIGURES["rows"][1] | {"name": "missing", "scenario": "two"}
    series = {"label": "fast", "rows": ["fast above slow", "missing"]}
    plot = {"title": "Figure 1", "x": ["here", "there"], "series": [series]}
    write_figures(
        folder, FIGURES | {"rows": [*FIGURES["rows"], missing], "plots": [plot]}
    )
    system = System(folder, load(folder), Results(folder))
    assert draw_plots(system) == {}
    write_results(folder, duration=[60.0], fast=[0.9, 0.8], slow=[0.7, 0.61])
    system = System(folder, load(folder), Results(folder))
    assert draw_plots(system) == {"Figure 1": "plots/figure-1.svg"}
    image = (folder / "plots" / "figure-1.svg").read_text()
    assert "here" in image
    assert "paper" not in image


def test_headline_page_has_one_row_per_headline(folder):
    write_results(folder, duration=[80.0], fast=[0.9], slow=[0.7])
    page = headline_page({"system": System(folder, load(folder), Results(folder))})
    assert page.endswith(
        "(../papers/system/README.md) | fast | 1.0 min | 1.333 min | 1.33 | links | differs |"
    )


def test_fill_in_replaces_only_text_between_marks():
    page = fill_in("# Title\n\nText.\n", "one")
    assert fill_in(page + "\nEnd.\n", "two") == (
        "# Title\n\nText.\n\n<!-- comparison -->\ntwo\n<!-- /comparison -->\n\nEnd.\n"
    )


def test_changed_scenario_is_stale_unless_only_expectations_changed(folder):
    figures = load(folder)
    results = Results(folder)
    assert results.scenarios_to_run(figures) == ["one"]
    write_results(folder, duration=[60.0], fast=[0.9], slow=[0.7])
    results = Results(folder)
    file = folder / "scenarios" / "one.yaml"
    results.scenarios["one"]["digest"] = results.digest("one", {})
    assert not results.scenarios_to_run(figures)
    file.write_text(SCENARIO.replace("== 15", "== 16"))
    assert not results.scenarios_to_run(figures)
    file.write_text(SCENARIO.replace("batch_size: 100", "batch_size: 50"))
    assert results.scenarios_to_run(figures) == ["one"]


def test_committed_pages_match_results():
    systems = {folder.name: open_system(folder) for folder in system_folders()}
    assert all_papers_page(systems) in PAGE.read_text(encoding="utf-8")
    for system in systems.values():
        plots = {plot.title: f"plots/{plot.file_name}" for plot in system.figures.plots}
        # Plots are optional, since they need matplotlib.
        drawn = {}
        for title, path in plots.items():
            if (system.folder / path).is_file():
                drawn[title] = path
        page = (system.folder / "README.md").read_text(encoding="utf-8")
        assert system_page(system, drawn) in page
        scenario_files = (system.folder / "scenarios").glob("*.yaml")
        scenarios = {file.stem for file in scenario_files}
        assert {row.scenario for row in system.figures.rows} <= scenarios


def test_results_of_missing_scenario_are_saved(folder, monkeypatch):
    monkeypatch.chdir(folder)
    steps = [
        {"metric": "steps", "at": {"workload.epochs": epochs}} for epochs in (2, 1)
    ]
    file = folder / "scenarios" / "one.yaml"
    file.write_text(SCENARIO.replace("seed: 1", "seed: 1\nrepetitions: 2"))
    write_figures(
        folder,
        with_row(kind="arithmetic", paper="2.00", unit="x", ours={"ratio": steps}),
    )
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    results = Results(folder)
    results.run("one", figures, jobs=1, again=False)
    results.save()
    saved = Results(folder)
    assert saved.scenarios_to_run(figures) == []
    assert (
        saved.scenarios["one"]["command"] == "testbed run papers/one --runtime simulate"
    )
    assert saved.scenarios["one"]["computing"][0].keys() == {
        "processor",
        "instruction_set",
        "torch",
    }
    assert saved.scenarios["one"]["trains"]
    assert saved.scenarios["one"]["seeds"] == [1, derive(1, "repetition", 1)]
    assert System(folder, figures, saved).word(figures.rows[0]) == "exact"


def test_failed_run_has_no_value(folder, monkeypatch):
    monkeypatch.chdir(folder)
    file = folder / "scenarios" / "one.yaml"
    sweep = "sweep: {faults: [[], [{kill: a, at: 1ms}]]}"
    file.write_text(SCENARIO.replace("sweep: {workload.epochs: [1, 2]}", sweep))
    at = {"faults": [{"kill": "a", "at": "1ms"}]}
    write_figures(folder, with_row(unit="", ours={"metric": "steps", "at": at}))
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    results = Results(folder)
    results.run("one", figures, jobs=1, again=False)
    system = System(folder, figures, results)
    assert results.failed_runs("one") == 1
    assert system.word(figures.rows[0]) == "not run"
    assert "have no value: 1" in system_page(system, {})


def test_diverged_training_has_values(folder, monkeypatch):
    monkeypatch.chdir(folder)
    file = folder / "scenarios" / "one.yaml"
    training = "method: {name: single}, training: {optimizer: {learning_rate: 1.0e+12}}"
    text = SCENARIO.replace("method: {name: single}", training)
    file.write_text(text.replace("sweep: {workload.epochs: [1, 2]}", ""))
    write_figures(folder, with_row(unit="%", ours={"metric": "accuracy"}))
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    results = Results(folder)
    results.run("one", figures, jobs=1, again=False)
    assert System(folder, figures, results).ours(figures.rows[0]).runs == 1


def test_value_matching_several_sweep_points_is_rejected(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write_figures(folder, with_row(ours={"metric": "steps"}))
    with pytest.raises(
        InputError, match="2 points of the sweep match; name exactly one"
    ):
        Results(folder).run("one", load(folder), jobs=1, again=False)


def test_minimum_without_matching_sweep_point_is_rejected(folder, monkeypatch):
    monkeypatch.chdir(folder)
    ours = {"metric": "steps", "at": {"workload.epochs": 7}, "minimum": True}
    write_figures(folder, with_row(ours=ours))
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    with pytest.raises(InputError, match="0 points of the sweep match"):
        Results(folder).run("one", figures, jobs=1, again=False)


def test_incomplete_sweep_is_rejected(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write_figures(folder, with_row(ours={"metric": "steps", "minimum": True}))
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    results = Results(folder)
    results.run("one", figures, jobs=1, again=False)
    lost, _ = sorted((folder / RUNS).glob("*/*/scenario.yaml"))
    shutil.rmtree(lost.parent)
    monkeypatch.setattr(
        "testbed_comparison.results.run_scenario", lambda *arguments: None
    )
    with pytest.raises(InputError, match="1 of 2 runs exist"):
        results.run("one", figures, jobs=1, again=False)


@pytest.mark.parametrize(
    ("key", "value"), [("1", 2.0), ("-1", None), ("first", None), ("2", None)]
)
def test_metric_name_selects_list_element_by_index(key, value):
    run = SimpleNamespace(metrics={"times": [1.0, 2.0]})
    assert metric_of(SimpleNamespace(run=run), f"times.{key}") == value


CONTAINERS = {
    "figure": "Table 1: run time",
    "scenario": "one",
    "changes": {"sweep": {}},
    "metrics": ["duration"],
}


def test_container_figure_shows_both_clocks_after_run(folder):
    write_figures(folder, FIGURES | {"containers": CONTAINERS})
    system = System(folder, load(folder), Results(folder))
    assert "| duration | – | – | – | not run |" in system_page(system, {})
    clocks = Clocks(
        containers={"duration": 3.3},
        simulated={"duration": 3.0},
        verdict="trusted",
        date="2026-11-27",
        processor="some processor",
        revision="0123456789",
        command="testbed run papers/one",
    )
    (folder / "containers.json").write_text(json.dumps(vars(clocks)))
    system = System(folder, load(folder), Results(folder), load_clocks(folder))
    page = system_page(system, {})
    assert "| duration | 3.3 | 3 | 1.100 | trusted |" in page
    assert "2026-11-27, some processor, revision 01234567:" in page
    line = "| Table 1: run time | duration | 3.3 | 3 | 1.100 | trusted |"
    assert line in all_papers_page({"one": system})
