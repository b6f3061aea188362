"""User code: imports between files, transfer to devices as text, and positions of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.common import usercode
from testbed.common.errors import InputError, Key
from testbed.common.usercode import Code

KEY: Key = ("method", "file")


@pytest.fixture(autouse=True)
def _clear_cache_around_test() -> Iterator[None]:
    usercode.clear_cache()
    yield
    usercode.clear_cache()


def write_modules(folder: Path, **texts: str) -> Path:
    """Write modules into a folder and return the file of the first one; two underscores in a name are a slash."""
    paths = []
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return paths[0]


def call_answer(file: Path) -> object:
    return usercode.call(usercode.read(file, "answer", KEY), KEY)


def test_every_form_of_import_between_files_works(tmp_path: Path) -> None:
    file = write_modules(
        tmp_path,
        main="""
import helper
import helper as other
from helper import value
import tools.inner
from tools import inner as third
from tools.inner import deep

def answer():
    import late
    from late import when
    return [helper.value, other.value, value, tools.inner.deep, third.deep, deep, late.when, when]
""",
        helper="from tools.inner import deep\nvalue = deep + 1\n",
        late="when = 'late'\n",
        tools__inner="from .more import number\ndeep = number\n",
        tools__more="number = 3\n",
    )
    names = ("helper", "tools", "late")
    modules_before = [sys.modules.get(name) for name in names]
    # helper.value is 3 + 1, and deep is 3.
    assert call_answer(file) == [4, 4, 4, 3, 3, 3, "late", "late"]
    # Modules of the user must not hide others of the same name.
    assert [sys.modules.get(name) for name in names] == modules_before


def test_circular_import_between_files_works(tmp_path: Path) -> None:
    file = write_modules(
        tmp_path,
        first="import second\nvalue = 1\ndef answer(): return second.answer()\n",
        second="import first\ndef answer(): return first.value\n",
    )
    assert call_answer(file) == 1


def test_class_is_identical_for_all_importing_files(tmp_path: Path) -> None:
    model = write_modules(tmp_path, net="class Net: pass\ndef build(): return Net()\n")
    method = write_modules(
        tmp_path, method="import net\ndef answer(): return net.Net\n"
    )
    model_key: Key = ("model", "file")
    model_code = usercode.read(model, "build", model_key)
    network = usercode.call(model_code, model_key)
    assert type(network) is call_answer(method)


def test_equally_named_modules_in_two_folders_are_distinct(tmp_path: Path) -> None:
    text = "def answer():\n    import helper\n    return helper.value\n"
    functions = []
    for name in ("one", "two"):
        file = write_modules(tmp_path / name, main=text, helper=f"value = {name!r}\n")
        code = usercode.read(file, "answer", KEY)
        functions.append(usercode.function(code, KEY))
    # Both modules are read before the first import.
    assert functions[0]() == "one"
    assert functions[1]() == "two"


def test_changed_file_is_read_after_clearing_cache(tmp_path: Path) -> None:
    file = write_modules(
        tmp_path,
        main="import helper\ndef answer(): return helper.value\n",
        helper="value = 1\n",
    )
    assert call_answer(file) == 1
    usercode.clear_cache()
    write_modules(tmp_path, helper="value = 2\n")
    assert call_answer(file) == 2


def test_modules_have_their_file_attribute(tmp_path: Path) -> None:
    file = write_modules(
        tmp_path,
        main="import helper\ndef answer(): return [__file__, helper.__file__]\n",
        helper="",
    )
    assert call_answer(file) == [str(tmp_path / "main.py"), str(tmp_path / "helper.py")]


@pytest.mark.parametrize(
    ("name", "other_module"),
    [
        ("json", "a module of the standard library"),
        ("torch", "an installed module"),
        ("testbed", ""),
    ],
)
def test_ambiguous_module_name_is_refused(
    tmp_path: Path, name: str, other_module: str
) -> None:
    file = write_modules(
        tmp_path,
        main=f"import helper\nfrom {name} import x\n",
        helper="",
        **{name: "x = 1\n"},
    )
    with pytest.raises(
        InputError,
        match=rf"main.py:2: imports '{name}', which is {name}.py beside it and {other_module}",
    ):
        usercode.read(file, "answer", KEY)


def test_unimported_files_in_folder_are_ignored(tmp_path: Path) -> None:
    file = write_modules(
        tmp_path,
        main="import json\ndef answer(): return json.dumps(1)\n",
        secret="broken(",
        torch="x = 1\n",
    )
    code = usercode.read(file, "answer", KEY)
    assert [*code.files.values()] == [str(file)]
    assert call_answer(file) == "1"


def test_code_runs_on_device_without_files(tmp_path: Path) -> None:
    file = write_modules(
        tmp_path,
        main="import helper\ndef answer():\n    return helper.divide(0)\n",
        helper="def divide(by):\n    return 1 / by\n",
    )
    text = usercode.read(file, "answer", KEY).model_dump_json()
    (tmp_path / "main.py").unlink()
    (tmp_path / "helper.py").unlink()
    # Errors still name the files and quote the lines of the controller.
    program = """
import sys
from testbed.common import usercode
code = usercode.Code.model_validate_json(sys.stdin.read())
try:
    usercode.function(code, ("method", "file"))()
except ZeroDivisionError as error:
    print(usercode.describe_error(error))
"""
    process = subprocess.run(
        [sys.executable, "-c", program],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.splitlines() == [
        f"{tmp_path}/helper.py:2: ZeroDivisionError: division by zero",
        f"  {tmp_path}/main.py:3, in answer: return helper.divide(0)",
        f"  {tmp_path}/helper.py:2, in divide: return 1 / by",
    ]


def test_error_is_located_in_raising_file(tmp_path: Path) -> None:
    file = write_modules(
        tmp_path,
        main="import helper\ndef answer(): return helper.fail()\n",
        helper="def fail():\n    {}['x']\n",
    )
    with pytest.raises(InputError, match=r"helper.py:2: KeyError: 'x'"):
        call_answer(file)


def test_error_in_exception_group_is_located(tmp_path: Path) -> None:
    file = write_modules(
        tmp_path, main="def answer():\n    from helper import missing\n", helper=""
    )
    function = usercode.function(usercode.read(file, "answer", KEY), KEY)
    with pytest.raises(ImportError) as error:
        function()
    text = usercode.describe_error(ExceptionGroup("some", [error.value])) or ""
    # The module has the user's name, not the unique internal one.
    assert text.startswith(
        f"{file}:2: ImportError: cannot import name 'missing' from 'helper'"
    )


def test_error_outside_user_code_is_not_located() -> None:
    assert usercode.describe_error(ValueError("x")) is None


def test_texts_are_keyed_by_relative_path(tmp_path: Path) -> None:
    file = write_modules(tmp_path, main="import tools.inner\n", tools__inner="")
    texts = usercode.texts_of(usercode.read(file, "answer", KEY))
    # The main file comes first.
    assert next(iter(texts)) == "main.py"
    assert set(texts) >= {"main.py", "tools/inner.py"}


def test_code_without_file_names_is_called() -> None:
    code = Code(
        name="answer", module="of_text", sources={"of_text": "def answer(): return 7\n"}
    )
    assert usercode.call(code, KEY) == 7
