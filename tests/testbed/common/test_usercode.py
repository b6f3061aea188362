"""Files of the user's import one another, on the controller and as text on a device, and errors are located in them."""

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
def _read_again() -> Iterator[None]:
    usercode.clear_cache()
    yield
    usercode.clear_cache()


def lay(folder: Path, **texts: str) -> Path:
    """Write modules into a folder, of packages with two underscores for a slash; return the first one's file."""
    paths = []
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return paths[0]


def called(file: Path, name: str = "answer") -> object:
    return usercode.call(usercode.read(file, name, KEY), KEY)


def test_files_import_one_another_by_every_kind_of_statement(tmp_path: Path) -> None:
    file = lay(
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
    before = {name: sys.modules.get(name) for name in ("helper", "tools", "late")}
    assert called(file) == [4, 4, 4, 3, 3, 3, "late", "late"]
    assert {name: sys.modules.get(name) for name in before} == before


def test_two_files_that_import_each_other(tmp_path: Path) -> None:
    file = lay(
        tmp_path,
        first="import second\nvalue = 1\ndef answer(): return second.answer()\n",
        second="import first\ndef answer(): return first.value\n",
    )
    assert called(file) == 1


def test_a_class_is_the_same_one_wherever_its_file_is_imported(tmp_path: Path) -> None:
    model = lay(tmp_path, net="class Net: pass\ndef build(): return Net()\n")
    method = lay(tmp_path, method="import net\ndef answer(): return net.Net\n")
    made = usercode.call(
        usercode.read(model, "build", ("model", "file")), ("model", "file")
    )
    assert type(made) is called(method)


def test_helpers_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    text = "def answer():\n    import helper\n    return helper.value\n"
    files = [
        lay(tmp_path / name, main=text, helper=f"value = {name!r}\n")
        for name in ("one", "two")
    ]
    codes = [usercode.read(file, "answer", KEY) for file in files]
    functions = [usercode.function(code, KEY) for code in codes]
    assert [function() for function in functions] == ["one", "two"]


def test_a_helper_that_was_edited_is_read_again(tmp_path: Path) -> None:
    file = lay(
        tmp_path,
        main="import helper\ndef answer(): return helper.value\n",
        helper="value = 1\n",
    )
    assert called(file) == 1
    usercode.clear_cache()
    lay(tmp_path, helper="value = 2\n")
    assert called(file) == 2


def test_a_file_knows_where_it_lies(tmp_path: Path) -> None:
    file = lay(
        tmp_path,
        main="import helper\ndef answer(): return [__file__, helper.__file__]\n",
        helper="",
    )
    assert called(file) == [str(tmp_path / "main.py"), str(tmp_path / "helper.py")]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("json", "a module of the standard library"),
        ("torch", "an installed module"),
        ("testbed", ""),
    ],
)
def test_ambiguous_module_name_is_refused(
    tmp_path: Path, name: str, other: str
) -> None:
    file = lay(
        tmp_path,
        main=f"import helper\nfrom {name} import x\n",
        helper="",
        **{name: "x = 1\n"},
    )
    with pytest.raises(
        InputError,
        match=rf"main.py:2: imports '{name}', which is {name}.py beside it and {other}",
    ):
        usercode.read(file, "answer", KEY)


def test_a_file_that_nobody_imports_does_not_matter(tmp_path: Path) -> None:
    file = lay(
        tmp_path,
        main="import json\ndef answer(): return json.dumps(1)\n",
        secret="broken(",
        torch="x = 1\n",
    )
    code = usercode.read(file, "answer", KEY)
    assert [*code.files.values()] == [str(file)]
    assert called(file) == "1"


def test_a_device_needs_none_of_the_files(tmp_path: Path) -> None:
    file = lay(
        tmp_path,
        main="import helper\ndef answer():\n    return helper.divide(0)\n",
        helper="def divide(by):\n    return 1 / by\n",
    )
    text = usercode.read(file, "answer", KEY).model_dump_json()
    (tmp_path / "main.py").unlink()
    (tmp_path / "helper.py").unlink()
    program = """
import sys
from testbed.common import usercode
code = usercode.Code.model_validate_json(sys.stdin.read())
try:
    usercode.function(code, ("method", "file"))()
except ZeroDivisionError as error:
    print(usercode.describe_error(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"{tmp_path}/helper.py:2: ZeroDivisionError: division by zero",
        f"  {tmp_path}/main.py:3, in answer: return helper.divide(0)",
        f"  {tmp_path}/helper.py:2, in divide: return 1 / by",
    ]


def test_an_error_is_located_in_the_helper_that_raised_it(tmp_path: Path) -> None:
    file = lay(
        tmp_path,
        main="import helper\ndef answer(): return helper.fail()\n",
        helper="def fail():\n    {}['x']\n",
    )
    with pytest.raises(InputError, match=r"helper.py:2: KeyError: 'x'"):
        called(file)


def test_an_error_in_a_group_is_located_and_names_are_the_users(tmp_path: Path) -> None:
    file = lay(
        tmp_path, main="def answer():\n    from helper import missing\n", helper=""
    )
    function = usercode.function(usercode.read(file, "answer", KEY), KEY)
    with pytest.raises(ImportError) as raised:
        function()
    text = usercode.describe_error(ExceptionGroup("some", [raised.value])) or ""
    assert text.startswith(
        f"{file}:2: ImportError: cannot import name 'missing' from 'helper'"
    )


def test_errors_of_elsewhere_are_not_located() -> None:
    assert usercode.describe_error(ValueError("x")) is None


def test_texts_keep_their_relative_paths(tmp_path: Path) -> None:
    file = lay(tmp_path, main="import tools.inner\n", tools__inner="")
    assert (
        next(iter(usercode.texts_of(usercode.read(file, "answer", KEY)))) == "main.py"
    )
    assert set(usercode.texts_of(usercode.read(file, "answer", KEY))) >= {
        "main.py",
        "tools/inner.py",
    }


def test_a_code_without_files_is_still_read() -> None:
    code = Code(
        name="answer", module="of_text", sources={"of_text": "def answer(): return 7\n"}
    )
    assert usercode.call(code, KEY) == 7
