"""The file format of the papers' figures, and the pages that are written from it."""

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
from testbed_comparison.words import Ours

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
    write(tmp_path, FIGURES)
    return tmp_path


def write(folder, figures):
    (folder / "figures.yaml").write_text(yaml.safe_dump(figures))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"note": "theirs 1.03 min with other links"}, "remove it from the note"),
        ({"note": "the paper prints 58 min"}, "remove it from the note"),
        ({"unit": "hours"}, "unknown unit 'hours'"),
        ({"paper": "larger"}, "the paper's value of a ranking"),
        ({"kind": "ranking", "paper": "larger"}, "a ranking compares two values"),
        (
            {"name": "fast above slow"},
            "each row needs a name of its own: fast above slow",
        ),
        ({"name": "renamed"}, "unknown rows: run time"),
        ({"ours": {"at": {"seed": 1}}}, "a value needs a metric"),
    ],
)
def test_mistakes_are_refused(folder, keys, reason):
    write(folder, with_row(**keys))
    with pytest.raises(InputError, match=reason):
        load(folder)


def test_row_states_once_what_its_values_share(folder):
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
    write(folder, FIGURES | {"rows": [FIGURES["rows"][0], row]})
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


def test_largest_of_a_range_is_compared_with_a_stated_maximum(folder, monkeypatch):
    values = {"each": {"workload.epochs": [1, 2]}, "ours": {"metric": "duration"}}
    write(folder, with_row(**values, largest=True))
    system = open_system(folder)
    monkeypatch.setattr(
        system.results, "ours", lambda *arguments: Ours(1.0, 3.0, None, runs=1)
    )
    ours = system.ours(system.figures.row("run time"))
    assert (ours.low, ours.high) == (3.0, 3.0)


def test_trial_without_an_expression_has_that_of_its_row(folder):
    trial = {"value": "8", "scenario": "one", "at": {"workload.batch_size": 8}}
    parameter = {"row": "run time", "parameter": "batch size", "values": [trial]}
    write(folder, FIGURES | {"sensitivity": [parameter]})
    figures = load(folder)
    (expression,) = (
        figures.sensitivity[0].values[0].expressions(figures.row("run time"))
    )
    assert expression.metric == "duration"
    assert expression.at == {"workload.batch_size": 8, "workload.method.name": "fast"}


def test_a_note_may_refer_to_a_figure_of_the_paper(folder):
    write(
        folder, with_row(note="the paper's Figure 6(b) and equation (9) leave it out")
    )
    assert load(folder).rows[0].note


def result(folder, **values):
    at = {name: f'at {{"workload.method.name": "{name}"}}' for name in ("fast", "slow")}
    keys = {
        f"duration {at['fast']}": values["duration"],
        f"accuracy {at['fast']}": values["fast"],
        f"accuracy {at['slow']}": values["slow"],
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


def test_tables_show_words_intervals_and_provenance(folder):
    result(folder, duration=[59.0, 61.0, 60.5], fast=[0.9, 0.8], slow=[0.7, 0.61])
    page = system_page(System(folder, load(folder), Results(folder)), {})
    assert "| batches of 100 | Section IV |" in page
    assert "| Table 1 | run time | 1.0 min | 1.003 ± 0.043 min | 3 | agrees |" in page
    assert (
        "|  | fast above slow | larger | 19.5 ± 6.4 points | 2 | same ranking |" in page
    )
    assert "A processor (AVX2) | 2.9 |" in page


def test_what_was_not_run_is_said(folder):
    page = system_page(System(folder, load(folder), Results(folder)), {})
    assert "2 rows: 2 not run." in page
    assert "Not run yet, or stale: one." in page


def test_plots_draw_rankings_and_leave_places_without_a_run_empty(folder):
    pytest.importorskip("matplotlib")
    missing = FIGURES["rows"][1] | {"name": "missing", "scenario": "two"}
    series = {"label": "fast", "rows": ["fast above slow", "missing"]}
    plot = {"title": "Figure 1", "x": ["here", "there"], "series": [series]}
    write(folder, FIGURES | {"rows": [*FIGURES["rows"], missing], "plots": [plot]})
    system = System(folder, load(folder), Results(folder))
    assert draw_plots(system) == {}
    result(folder, duration=[60.0], fast=[0.9, 0.8], slow=[0.7, 0.61])
    system = System(folder, load(folder), Results(folder))
    assert draw_plots(system) == {"Figure 1": "plots/figure-1.svg"}
    image = (folder / "plots" / "figure-1.svg").read_text()
    assert "here" in image
    assert "paper" not in image


def test_headlines_are_one_row_each(folder):
    result(folder, duration=[80.0], fast=[0.9], slow=[0.7])
    page = headline_page({"system": System(folder, load(folder), Results(folder))})
    assert page.endswith(
        "(../papers/system/README.md) | fast | 1.0 min | 1.333 min | 1.33 | links | differs |"
    )


def test_only_the_text_between_the_marks_is_replaced():
    page = fill_in("# Title\n\nText.\n", "one")
    assert fill_in(page + "\nEnd.\n", "two") == (
        "# Title\n\nText.\n\n<!-- comparison -->\ntwo\n<!-- /comparison -->\n\nEnd.\n"
    )


def test_a_changed_scenario_is_stale_and_a_changed_expectation_is_not(folder):
    figures = load(folder)
    results = Results(folder)
    assert results.stale(figures) == ["one"]
    result(folder, duration=[60.0], fast=[0.9], slow=[0.7])
    results = Results(folder)
    file = folder / "scenarios" / "one.yaml"
    results.scenarios["one"]["digest"] = results.digest("one", {})
    assert not results.stale(figures)
    file.write_text(SCENARIO.replace("== 15", "== 16"))
    assert not results.stale(figures)
    file.write_text(SCENARIO.replace("batch_size: 100", "batch_size: 50"))
    assert results.stale(figures) == ["one"]


def test_the_pages_of_the_papers_are_those_of_their_results():
    systems = {folder.name: open_system(folder) for folder in system_folders()}
    assert all_papers_page(systems) in PAGE.read_text(encoding="utf-8")
    for system in systems.values():
        plots = {plot.title: f"plots/{plot.file_name}" for plot in system.figures.plots}
        drawn = {
            title: place
            for title, place in plots.items()
            if (system.folder / place).is_file()
        }
        assert system_page(system, drawn) in (system.folder / "README.md").read_text(
            encoding="utf-8"
        )
        assert {row.scenario for row in system.figures.rows} <= {
            file.stem for file in (system.folder / "scenarios").glob("*.yaml")
        }


def test_a_missing_scenario_is_run_once_and_its_values_are_kept(folder, monkeypatch):
    monkeypatch.chdir(folder)
    steps = [
        {"metric": "steps", "at": {"workload.epochs": epochs}} for epochs in (2, 1)
    ]
    file = folder / "scenarios" / "one.yaml"
    file.write_text(SCENARIO.replace("seed: 1", "seed: 1\nrepetitions: 2"))
    write(
        folder,
        with_row(kind="arithmetic", paper="2.00", unit="x", ours={"ratio": steps}),
    )
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    results = Results(folder)
    results.run("one", figures, jobs=1, again=False)
    results.save()
    kept = Results(folder)
    assert kept.stale(figures) == []
    assert (
        kept.scenarios["one"]["command"] == "testbed run papers/one --runtime simulate"
    )
    assert kept.scenarios["one"]["computing"][0].keys() == {
        "processor",
        "instruction_set",
        "torch",
    }
    assert kept.scenarios["one"]["trains"]
    assert kept.scenarios["one"]["seeds"] == [1, derive(1, "repetition", 1)]
    assert System(folder, figures, kept).word(figures.rows[0]) == "exact"


def test_a_run_that_the_method_ended_with_an_error_has_no_value(folder, monkeypatch):
    monkeypatch.chdir(folder)
    file = folder / "scenarios" / "one.yaml"
    sweep = "sweep: {faults: [[], [{kill: a, at: 1ms}]]}"
    file.write_text(SCENARIO.replace("sweep: {workload.epochs: [1, 2]}", sweep))
    at = {"faults": [{"kill": "a", "at": "1ms"}]}
    write(folder, with_row(unit="", ours={"metric": "steps", "at": at}))
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    results = Results(folder)
    results.run("one", figures, jobs=1, again=False)
    system = System(folder, figures, results)
    assert results.failed_runs("one") == 1
    assert system.word(figures.rows[0]) == "not run"
    assert "have no value: 1" in system_page(system, {})


def test_training_that_diverges_has_values(folder, monkeypatch):
    monkeypatch.chdir(folder)
    file = folder / "scenarios" / "one.yaml"
    training = "method: {name: single}, training: {optimizer: {learning_rate: 1.0e+12}}"
    text = SCENARIO.replace("method: {name: single}", training)
    file.write_text(text.replace("sweep: {workload.epochs: [1, 2]}", ""))
    write(folder, with_row(unit="%", ours={"metric": "accuracy"}))
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    results = Results(folder)
    results.run("one", figures, jobs=1, again=False)
    assert System(folder, figures, results).ours(figures.rows[0]).runs == 1


def test_a_value_has_to_name_one_point_of_a_sweep(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write(folder, with_row(ours={"metric": "steps"}))
    with pytest.raises(
        InputError, match="2 points of the sweep match; name exactly one"
    ):
        Results(folder).run("one", load(folder), jobs=1, again=False)


def test_least_value_without_a_matching_point_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    ours = {"metric": "steps", "at": {"workload.epochs": 7}, "minimum": True}
    write(folder, with_row(ours=ours))
    figures = load(folder)
    figures = figures.model_copy(update={"rows": figures.rows[:1]})
    with pytest.raises(InputError, match="0 points of the sweep match"):
        Results(folder).run("one", figures, jobs=1, again=False)


def test_incomplete_sweep_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write(folder, with_row(ours={"metric": "steps", "minimum": True}))
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
def test_metric_names_an_element_of_a_list_by_its_index(key, value):
    run = SimpleNamespace(metrics={"times": [1.0, 2.0]})
    assert metric_of(SimpleNamespace(run=run), f"times.{key}") == value


CONTAINERS = {
    "figure": "Table 1: run time",
    "scenario": "one",
    "changes": {"sweep": {}},
    "metrics": ["duration"],
}


def test_short_figure_is_listed_before_it_was_run_and_shows_both_clocks_after(folder):
    write(folder, FIGURES | {"containers": CONTAINERS})
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
