"""Where events come from, as a tree for people: in a terminal, or as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC
from urllib.parse import quote

from rich.text import Text
from rich.tree import Tree

from eventsql_orchestration.orchestration.owners import read_airflow_run
from eventsql_orchestration.orchestration.trace.tracer import AIRFLOW, TracedEvents, TracedInput, orchestrator_of
from eventsql_orchestration.orchestration.webservers import without_credentials
from eventsql_orchestration.validation import counted


@dataclass(frozen=True, slots=True)
class TraceTree:
    """Trees of traces. `urls` has the URL of an orchestrator by its name: its runs become links.

    `wider` says how to get publishers that were left out.
    """

    urls: Mapping[str, str]
    wider: str = "give a larger --width"

    def of(self, origin: TracedEvents) -> Tree:
        """Events and where they come from."""
        tree = Tree(_events(origin))
        self._grow(tree, origin)
        return tree

    def of_inputs(self, title: str, inputs: Iterable[TracedInput]) -> Tree:
        """Ranges that were read, and where their events come from."""
        tree = Tree(Text(_plain(title)))
        self._grow_inputs(tree, inputs)
        return tree

    def _grow(self, tree: Tree, origin: TracedEvents) -> None:
        """Add to `tree`, which shows these events, where they come from."""
        branch = tree
        if origin.run_id is not None:
            branch = tree.add(_run(origin, self.urls))
        elif origin.original is None and not origin.notes:
            tree.add("published by a service or a program, not by a run")
        for note in origin.notes:
            branch.add(Text(_plain(note), style="italic"))
        if origin.original is not None:
            copied = branch.add(Text.assemble("a copy of ", _events(origin.original)))
            self._grow(copied, origin.original)
        self._grow_inputs(branch, origin.inputs)

    def _grow_inputs(self, branch: Tree, inputs: Iterable[TracedInput]) -> None:
        for read in inputs:
            below = branch.add(_range(read))
            for note in read.notes:
                below.add(Text(_plain(note), style="italic"))
            for each in read.origins:
                self._grow(below.add(_events(each)), each)
            if read.left_out:
                below.add(Text(f"{counted(read.left_out, 'publisher')} more: {self.wider}", style="italic"))


def link_to(run_id: str | None, urls: Mapping[str, str]) -> str | None:
    """The page of a run; None if no URL is known."""
    if run_id is None or (url := urls.get(orchestrator_of(run_id))) is None:
        return None
    if orchestrator_of(run_id) == AIRFLOW:
        dag, run = (quote(part, safe="") for part in read_airflow_run(run_id))
        return f"{without_credentials(url)}/dags/{dag}/runs/{run}"
    return f"{without_credentials(url)}/runs/{quote(run_id, safe='')}"


def _plain(text: str) -> str:
    """Text of a publisher or a run, without characters that control a terminal or break a line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _events(origin: TracedEvents) -> Text:
    on = "" if origin.shard is None else f" on {origin.shard}"
    if origin.events == 1:
        return Text.assemble((origin.topic, "bold"), f" event {origin.first}{on}")
    offsets = f" {counted(origin.events, 'event')}, offsets {origin.first} to {origin.last}{on}"
    return Text.assemble((origin.topic, "bold"), offsets)


def _run(origin: TracedEvents, urls: Mapping[str, str]) -> Text:
    run, link = origin.run, link_to(origin.run_id, urls)
    style = "bold" if link is None else f"bold link {link}"
    line = Text.assemble("run ", (_plain(origin.run_id or ""), style))
    kind = "task" if orchestrator_of(origin.run_id or "") == AIRFLOW else "asset"
    line.append("" if origin.asset is None else f", {kind} {_plain(origin.asset)}")
    line.append("" if origin.partition is None else f" [{_plain(origin.partition)}]")
    if run is not None:
        line.append(f", {run.status}", style="green" if run.status == "SUCCESS" else "yellow")
        line.append("" if run.ended is None else f", ended {run.ended.astimezone(UTC).isoformat()}")
    return line.append("" if link is None else f", {link}")


def _range(read: TracedInput) -> Text:
    given = read.range
    offsets = "no event" if given.upto <= given.after else f"offsets {given.after + 1} to {given.upto}"
    line = Text.assemble("read ", (_plain(given.topic), "bold"), f" {offsets}")
    line.append("" if given.partition < 0 else f" of partition {given.partition}")
    line.append("" if given.shard is None else f" on {_plain(given.shard)}")
    line.append("" if given.consumer is None else f" as consumer {_plain(given.consumer)}")
    return line.append("" if given.claim is None else f", claim {given.claim}")
