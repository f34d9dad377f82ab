"""A user's function with its parameters: arguments from this package, and resources from Dagster."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.consuming.handlers import check_runs
from eventsql_orchestration.dagster.resources import RESOURCE_KEY, EventSQLResource
from eventsql_orchestration.dagster.steps import begin_data_version
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.signatures import signature_of

CONFIG: Final = "config"
"""The parameter in which Dagster gives the config of a run."""


@dataclass(frozen=True)
class UserFunction:
    """A function with its parameters: names of arguments, and resources with their types."""

    call: Callable[..., Any]
    handed_over: tuple[str, ...]
    resources: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], *required: str) -> UserFunction:
        """Read the signature of a function that takes `required`, and optionally `context` and resources.

        Raises `DagsterInvalidDefinitionError` if a required parameter is missing, if a parameter cannot be given by its
        name, or is neither an argument nor annotated as a resource, if a resource is called `config`, for a coroutine
        or generator function, which would never run, and for an object without a name, such as a `functools.partial`.
        """
        name = getattr(function, "__name__", None)
        if name is None:
            raise dg.DagsterInvalidDefinitionError(f"{function!r} is not a function: define one that calls it")
        try:
            check_runs(function)
        except ValidationError as error:
            raise dg.DagsterInvalidDefinitionError(error.message) from None
        parameters = signature_of(function).parameters
        for parameter, kind in ((each.name, each.kind) for each in parameters.values()):
            if kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
                raise dg.DagsterInvalidDefinitionError(
                    f"{name}() gets its arguments by name, and its parameter {parameter} cannot be given by name: "
                    "leave out `/`, `*` and `**`"
                )
        for parameter in required:
            if parameter not in parameters:
                raise dg.DagsterInvalidDefinitionError(
                    f"{name}() needs a parameter called {parameter}: it takes {', '.join(required)}, and optionally "
                    "context and resources"
                )
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise dg.DagsterInvalidDefinitionError(
                f"{name}() has an annotation that cannot be resolved ({error}): import it at the top of its module, "
                "outside of TYPE_CHECKING"
            ) from None
        arguments = (*required, "context")
        handed_over = tuple(parameter for parameter in parameters if parameter in arguments)
        resources = {parameter: hints.get(parameter) for parameter in parameters if parameter not in handed_over}
        for parameter, annotation in resources.items():
            if not _is_resource(annotation):
                raise dg.DagsterInvalidDefinitionError(
                    f"{name}() has a parameter {parameter} that is neither one of {', '.join(arguments)} "
                    "nor annotated with the type of a resource"
                )
        if CONFIG in resources:
            raise dg.DagsterInvalidDefinitionError(
                f"{name}() has a resource {CONFIG}, the name of the run's config: give the resource another name"
            )
        return cls(function, handed_over, resources)

    def __call__(self, resources: Mapping[str, Any], **handed_over: Any) -> Any:
        """Call the function with its resources and with its arguments from `handed_over`."""
        return self.call(
            **{name: handed_over[name] for name in self.handed_over},
            **{name: resources[name] for name in self.resources},
        )

    def as_compute(
        self, config: type[dg.Config], compute: Callable[[dg.AssetExecutionContext, Any, Mapping[str, Any]], Any]
    ) -> Callable[..., Any]:
        """Give `compute(context, config, resources)` the form that Dagster's decorators take, with these resources."""
        resources = {RESOURCE_KEY: EventSQLResource, **self.resources}

        def entry(context: dg.AssetExecutionContext, config: Any, **given: Any) -> Any:
            begin_data_version(context)
            return compute(context, config, given)

        parameters = [("context", dg.AssetExecutionContext), (CONFIG, config), *resources.items()]
        # Dagster reads the arguments from the signature.
        entry.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # functions take any attribute
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
                for name, annotation in parameters
            ]
        )
        entry.__annotations__ = dict(parameters)
        return entry


def _is_resource(annotation: Any) -> bool:
    if isinstance(annotation, type):
        return issubclass(annotation, dg.ConfigurableResource)
    # `dg.ResourceParam[T]`
    return getattr(annotation, "__metadata__", None) == ("resource_param",)
