"""The whole table of figures."""

from eventsql_orchestration.bench.benchmark import OnTopic
from eventsql_orchestration.bench.table import All
from eventsql_orchestration.model import ROWS


def test_every_figure_of_the_table_has_the_partitions_and_the_form_that_were_asked_for() -> None:
    on_topics = [each for each in All(partitions=3, storage=ROWS).parts if isinstance(each, OnTopic)]
    assert {(each.partitions, each.storage) for each in on_topics} == {(3, ROWS)}
