"""The directive `settings`: a table of the package's settings, out of their class."""

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from eventsql_orchestration.settings import Settings


class SettingsTable(Directive):
    """A list-table of the settings: name in the file, environment variable, default, meaning."""

    def run(self) -> list[nodes.Node]:
        rows = [("in the file", "in the environment", "default", "meaning")]
        for field, info in Settings.model_fields.items():
            name = str(info.validation_alias or field)
            default = "" if info.default is None else f"``{info.default}``"
            rows.append((f"``{name}``", f"``EVENTSQL_{name.upper()}``", default, info.description or ""))

        lines = [".. list-table::", "   :header-rows: 1", ""]
        for first, *others in rows:
            lines += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
        table = nodes.container()
        self.state.nested_parse(StringList(lines), self.content_offset, table)
        return table.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("settings", SettingsTable)
    return {"parallel_read_safe": True}
