"""The documentation says what the code does."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import jsonschema
import pytest

from testbed.common import yamltext
from testbed.methods import METHODS
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.finding import scenarios_in
from testbed.scenario.loading import load
from testbed_controller.cli.main import COMMANDS
from tests.helpers import ROOT

DOCS = ROOT / "docs"


def test_generated_parts_are_current():
    # In a process of its own: a command that another test has called keeps the help options of that call.
    command = [sys.executable, str(DOCS / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (
        f"run: python docs/generate.py ({done.stdout}{done.stderr})"
    )


@pytest.mark.parametrize("program", ["generate.py", "website.py"])
def test_examples_of_the_generators_are_true(program):
    command = [sys.executable, "-m", "doctest", str(DOCS / program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_page_that_says_more_than_its_help(command):
    page = (DOCS / "commands" / f"{command}.md").read_text()
    assert page.startswith(f"# testbed {command}\n")
    prose = page[: page.index("<!-- help -->")]
    assert len(prose) > 80
    assert f"(commands/{command}.md)" in (DOCS / "README.md").read_text()


def test_every_command_says_what_it_does_in_its_help():
    for command in COMMANDS:
        page = (DOCS / "commands" / f"{command}.md").read_text()
        for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL):
            assert re.search(r"^Usage: .*\n\n  [A-Z]", block, re.MULTILINE), (
                block.splitlines()[0]
            )


def test_the_example_with_nearly_everything_is_a_scenario(tmp_path):
    blocks = re.findall(
        r"```yaml\n(.*?)```", (DOCS / "scenario.md").read_text(), re.DOTALL
    )
    (example,) = [block for block in blocks if "name: everything" in block]
    file = tmp_path / "everything.yaml"
    file.write_text(example)
    prepare(trials(load(file))[0])


def test_links_between_pages_lead_somewhere():
    for page in [
        *DOCS.rglob("*.md"),
        *(ROOT / "papers").glob("*/README.md"),
        ROOT / "generation/README.md",
    ]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_descriptions_of_the_schema_have_no_python():
    text = (DOCS / "scenario.schema.json").read_text()
    assert ">>>" not in text


def test_shipped_scenarios_fit_the_schema():
    schema = json.loads((DOCS / "scenario.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(
        schema
    )  # `jsonschema.validate` would check the schema for each file
    for file in scenarios_in().values():
        validator.validate(yamltext.values(file.read_text()))


def test_names_in_the_glossary_exist():
    page = (DOCS / "glossary.md").read_text()
    reference = "\n".join(page.read_text() for page in (DOCS / "scenario").glob("*.md"))
    known = {*COMMANDS, *METHODS, "this type", "up", "down", "events.jsonl"}
    known |= set(
        re.findall(
            r"^\| `(?:[\w.<>\[\]-]*\.)?([\w-]+)(?:\[\])?`", reference, re.MULTILINE
        )
    )
    known |= {
        name for method in METHODS.values() for name in method.Options.model_fields
    }
    assert sorted(set(re.findall(r"`([^`]+)`", page)) - known) == []
    for section in page.split("\n## ")[1:]:
        terms = re.findall(r"^\| ([^|`]+?) \|", section, re.MULTILINE)
        assert terms == sorted(terms, key=str.lower), "in the order of the alphabet"


def test_the_site_has_a_page_for_each_method_and_paper_and_its_links_lead_somewhere(
    tmp_path,
):
    spec = importlib.util.spec_from_file_location("website", DOCS / "website.py")
    website = importlib.util.module_from_spec(spec)
    sys.modules["website"] = website  # where its dataclass looks for its module
    spec.loader.exec_module(website)
    scenarios = [
        website.ShippedScenario(name, load(name))
        for name in ("quickstart", "papers/stahl-example")
    ]
    found = website.collect_pages(scenarios)
    assert {f"methods/{name}.md" for name in METHODS} | {
        f"papers/{name}/README.md" for name in website.PAPERS
    } <= {*found}
    assert "| `micro_batches` |" in found["methods/pipeline.md"]
    assert "(../scenarios/quickstart.yaml)" in found["methods/pipeline.md"]
    assert "| worked example |" in found["papers/stahl/README.md"]
    for place, text in found.items():
        for target in re.findall(
            r"\]\(([^)#:]+)(?:#[^)]*)?\)",
            website.rewrite_links(place, text, found, tmp_path),
        ):
            path = (tmp_path / place).parent / target
            assert (
                path.resolve().relative_to(tmp_path).as_posix() in found
                or path.resolve().exists()
            ), f"{place}: {target}"


def test_each_published_system_has_a_page_whose_scenarios_exist():
    names = scenarios_in()
    systems = {
        path.parent for path in names.values() if path.is_relative_to(ROOT / "papers")
    }
    assert len(systems) >= 5
    for scenarios in systems:
        page = (scenarios.parent / "README.md").read_text()
        shown = set(re.findall(r"testbed (?:run|plan) (\S+)", page))
        assert shown
        assert shown <= names.keys()
