"""Agreement of the documentation with the code."""

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


LINK_TARGET = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
"""The path of a Markdown link to a file, without an anchor; only addresses of the web have a colon."""
REFERENCE_ROW = re.compile(r"^\| `(?:[\w.<>\[\]-]*\.)?([\w-]+)(?:\[\])?`", re.MULTILINE)
"""The last part of the key in the first cell of a table's row."""


def command_page(command):
    return (DOCS / "commands" / f"{command}.md").read_text()


def run_python(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_generated_parts_are_current():
    # In a process of its own: a command that another test has called keeps the help options of that call.
    process = run_python(str(DOCS / "generate.py"), "--check")
    output = process.stdout + process.stderr
    assert process.returncode == 0, f"run: python docs/generate.py ({output})"


@pytest.mark.parametrize("program", ["generate.py", "website.py"])
def test_docstring_examples_of_generator_pass(program):
    process = run_python("-m", "doctest", str(DOCS / program))
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_page_with_help(command):
    page = command_page(command)
    assert page.startswith(f"# testbed {command}\n")
    assert "<!-- help -->" in page
    assert f"(commands/{command}.md)" in (DOCS / "README.md").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_command_has_description(command):
    for block in re.findall(r"```text\n(.*?)```", command_page(command), re.DOTALL):
        # Click prints the description, indented, after the usage.
        has_description = re.search(r"^Usage: .*\n\n  [A-Z]", block, re.MULTILINE)
        assert has_description, block.splitlines()[0]


def test_full_example_is_valid_scenario(tmp_path):
    page = (DOCS / "scenario.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (example,) = [block for block in blocks if "name: everything" in block]
    file = tmp_path / "everything.yaml"
    file.write_text(example)
    prepare(trials(load(file))[0])


def test_links_between_pages_have_existing_targets():
    pages = [
        *DOCS.rglob("*.md"),
        *(ROOT / "papers").glob("*/README.md"),
        ROOT / "generation/README.md",
    ]
    for page in pages:
        for target in LINK_TARGET.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_schema_descriptions_contain_no_python():
    text = (DOCS / "scenario.schema.json").read_text()
    assert ">>>" not in text


def test_shipped_scenarios_match_schema():
    schema = json.loads((DOCS / "scenario.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    # The function `jsonschema.validate` would check the schema again for each file.
    validator = jsonschema.Draft202012Validator(schema)
    for file in scenarios_in().values():
        validator.validate(yamltext.values(file.read_text()))


def test_code_names_in_glossary_exist():
    # These are no keys, metrics, events, methods or commands.
    known_names = {*COMMANDS, *METHODS, "this type", "up", "down", "events.jsonl"}
    for page in (DOCS / "scenario").glob("*.md"):
        known_names.update(REFERENCE_ROW.findall(page.read_text()))
    for method in METHODS.values():
        known_names.update(method.Options.model_fields)
    glossary = (DOCS / "glossary.md").read_text()
    names = set(re.findall(r"`([^`]+)`", glossary))
    assert sorted(names - known_names) == []


def test_glossary_is_in_alphabetical_order():
    glossary = (DOCS / "glossary.md").read_text()
    for section in glossary.split("\n## ")[1:]:
        terms = re.findall(r"^\| ([^|`]+?) \|", section, re.MULTILINE)
        assert terms == sorted(terms, key=str.lower)


@pytest.fixture(scope="module")
def website():
    spec = importlib.util.spec_from_file_location("website", DOCS / "website.py")
    module = importlib.util.module_from_spec(spec)
    # The decorator of its dataclass looks up the module by name.
    sys.modules["website"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def website_pages(website):
    scenarios = []
    for name in ("quickstart", "papers/stahl-example"):
        scenarios.append(website.ShippedScenario(name, load(name)))
    return website.collect_pages(scenarios)


def test_website_has_page_for_each_method_and_paper(website, website_pages):
    for name in METHODS:
        assert f"methods/{name}.md" in website_pages
    for name in website.PAPERS:
        assert f"papers/{name}/README.md" in website_pages


def test_website_pages_have_options_and_scenarios(website_pages):
    assert "| `micro_batches` |" in website_pages["methods/pipeline.md"]
    assert "(../scenarios/quickstart.yaml)" in website_pages["methods/pipeline.md"]
    assert "| worked example |" in website_pages["papers/stahl/README.md"]


def test_links_of_website_have_existing_targets(website, website_pages, tmp_path):
    for place, text in website_pages.items():
        rewritten = website.rewrite_links(place, text, website_pages, tmp_path)
        for target in LINK_TARGET.findall(rewritten):
            # A target is another page, or a file that `rewrite_links` has copied.
            path = ((tmp_path / place).parent / target).resolve()
            is_page = path.relative_to(tmp_path).as_posix() in website_pages
            assert is_page or path.exists(), f"{place}: {target}"


def test_readme_of_published_system_names_existing_scenarios():
    shipped = scenarios_in()
    systems = set()
    for path in shipped.values():
        if path.is_relative_to(ROOT / "papers"):
            systems.add(path.parent.parent)
    assert len(systems) >= 5
    for system in systems:
        page = (system / "README.md").read_text()
        names = set(re.findall(r"testbed (?:run|plan) ([\w/-]+)", page))
        assert names
        assert names <= shipped.keys()
